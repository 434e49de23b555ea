"use strict";
// The inside of one run: figures at a glance, then the stream, the traffic, the failures and the privacy budget.

class Panels {
  constructor(actions) {
    this.method = new Choice("Method", actions.chooseMethod);
    this.seed = new Choice("Seed", actions.chooseSeed);
    byId("run-tools").append(this.method.node, this.seed.node);
    this.spread = new Chart({
      title: "Across devices",
      note: "accuracy, quartiles shaded",
      yFormat: (v) => formatPercent(v),
      tickFormat: tickPercent,
    });
    this.stream = new Chart({
      title: "Stream",
      note: "samples a round",
      yFormat: formatNumber,
      stacked: true,
      fromZero: true,
    });
    this.stale = new Chart({
      title: "Age of ĝ",
      note: "in rounds, mean over its parts",
      yFormat: formatNumber,
      fromZero: true,
    });
    this.traffic = new Chart({
      title: "Bytes sent",
      note: "since the start",
      yFormat: formatBytes,
      tickFormat: formatBytes,
      fromZero: true,
    });
    this.store = new Chart({
      title: "Store",
      note: "of labels and samples",
      yFormat: (v) => formatPercent(v, 0),
      tickFormat: tickPercent,
      fromZero: true,
    });
    this.gist = new Chart({
      title: "Gist",
      note: "mean over participations",
      yFormat: (v) => formatPercent(v, 0),
      tickFormat: tickPercent,
      fromZero: true,
    });
    this.correction = make("div", { class: "card" });
    this.failures = make("div", { class: "card" });
    this.privacy = make("div", { class: "card" });
    byId("panels").append(
      this.spread.node,
      this.stream.node,
      this.traffic.node,
      this.stale.node,
      this.store.node,
      this.gist.node,
      this.correction,
      make("div", { class: "stack" }, this.failures, this.privacy),
    );
  }

  update(views, view) {
    this.method.update(
      orderedMethods(views).map((method) => [method, method]),
      view.method,
      { always: true },
    );
    const runs = views.filter((other) => other.method === view.method);
    this.seed.update(
      runs.map((run) => [run.key, seedName(run, runs)]),
      view.key,
      { always: true },
    );
    byId("tiles").replaceChildren(...tiles(view));
    this.spread.update({ note: `${view.measure === "r2" ? "R2" : "accuracy"}, quartiles shaded` });
    this.drawCharts(view);
    this.failures.replaceChildren(...failures(view));
    this.privacy.replaceChildren(make("h3", {}, "Privacy budget"), ...budget(view));
  }

  drawCharts({ activity, evaluations, gist }) {
    const line = (name, colour, columns, column, dash = null) => ({
      name,
      colour,
      dash,
      points: columnPoints(columns, column),
    });
    this.spread.update({
      series: [
        { name: "median", colour: 0, points: quartilePoints(evaluations) },
        line("worst", 1, evaluations, "worst_device", "6 4"),
      ],
    });
    this.stream.update({
      series: ["kept", "replaced", "refused"].map((fate, place) => line(fate, [0, 2, 6][place], activity, fate)),
    });
    this.stale.update({ series: [line("age of ĝ", 0, activity, "staleness")] });
    this.traffic.update({
      series: [line("up", 0, evaluations, "bytes_up"), line("down", 1, evaluations, "bytes_down", "6 4")],
    });
    this.store.update({
      series: [
        line("labels covered", 2, evaluations, "label_coverage"),
        line("exchanged", 3, evaluations, "store_turnover", "6 4"),
      ],
    });
    this.gist.node.hidden = this.correction.hidden = !gist.round.length;
    this.gist.update({
      series: [
        line("correction weight", 0, gist, "trust"),
        line("gradient correlation", 2, gist, "likeness", "6 4"),
        line("correction norm", 1, gist, "reach", "2 3"),
      ],
    });
    this.correction.replaceChildren(...correctionFigures(gist));
  }
}

/** The median device's accuracy, with the span from the lower to the upper quartile. */
function quartilePoints({ round, median_device: middle, lower_device: low, upper_device: high }) {
  return round
    .map((x, place) => ({ x, y: middle[place], low: low[place], high: high[place] }))
    .filter((point) => point.y != null);
}

function seedName(view, among) {
  const twins = among.filter((other) => other.seed === view.seed).length;
  return twins > 1 ? `${view.seed} (${view.key})` : String(view.seed);
}

function tile(name, value, detail) {
  return make(
    "div",
    { class: "tile" },
    make("dt", {}, name),
    make("dd", {}, make("b", {}, value), make("small", {}, detail)),
  );
}

function tiles(view) {
  const { totals, evaluations, activity } = view;
  const stored = totals.kept + totals.replaced;
  const refusedReports = Object.values(view.refused_reports).reduce((sum, count) => sum + count, 0);
  const spent = last(view.privacy.spent);
  const found = [
    tile("Round", formatCount(view.round), view.rounds ? `of ${formatCount(view.rounds)}` : stateOf(view)),
    ...scores(view),
    tile("Stream", formatNumber(last(activity.arrivals)), "arrivals a round"),
    tile(
      "Stored",
      formatPercent(totals.arrivals ? stored / totals.arrivals : null, 0),
      `of ${plural(totals.arrivals, "arrival", "arrivals")}`,
    ),
    tile("Sent up", formatBytes(last(evaluations.bytes_up)), `${formatBytes(last(evaluations.bytes_down))} down`),
    tile(
      "Lost",
      formatCount(totals.dropouts + refusedReports),
      `${formatCount(totals.dropouts)} dropped, ${formatCount(refusedReports)} rejected`,
    ),
    tile("Age of ĝ", formatNumber(last(activity.staleness)), "rounds"),
  ];
  if (spent != null)
    found.push(tile("Privacy ε", formatNumber(spent), `${formatNumber(last(view.privacy.left))} left`));
  if (view.seconds != null) found.push(tile("Time", formatDuration(view.seconds), stateOf(view)));
  return found;
}

/** How good the model is: its accuracy, or where targets are numbers R2 and the errors. */
function scores({ evaluations, measure }) {
  const score = formatPercent(last(evaluations.accuracy));
  const loss = `loss ${formatNumber(last(evaluations.loss))}`;
  if (measure !== "r2") return [tile("Accuracy", score, loss)];
  return [
    tile("R2", score, "of the variance is predicted"),
    tile("RMSE", formatNumber(last(evaluations.rmse)), `MAE ${formatNumber(last(evaluations.mae))}, ${loss}`),
  ];
}

/** What the gist does now, a figure and a sentence each. */
function correctionFigures(gist) {
  const rows = [
    ["Correction weight", formatPercent(last(gist.trust), 0), "beta: the share of the difference between gist and store that is added to each step."],
    ["Gradient correlation", formatPercent(last(gist.likeness), 0), "rho: between a sample's gradients under a device's old model and the new one; at 0 an old gist holds no information."],
    ["Effective sample size", `${formatNumber(last(gist.worth))} samples`, "How many fresh samples would estimate the stream's gradient as well as the gist does."],
    ["Correction norm", formatPercent(last(gist.reach), 0), "The length of the correction, relative to the stored samples' own gradient."],
  ].map(([name, value, means]) => make("li", {}, make("span", {}, name), make("b", {}, value), make("small", {}, means)));
  return [make("h3", {}, "What the gist does"), make("ul", { class: "reasons" }, rows)];
}

/** Dropouts and rejected updates, by reason. */
function failures({ totals, refused_reports: refused, damaged }) {
  const counts = [
    ["dropped out", totals.dropouts],
    ...Object.entries(refused).map(([reason, count]) => [`rejected: ${reason}`, count]),
  ];
  if (damaged) counts.push(["damaged lines in the record", damaged]);
  const head = make("h3", {}, "Dropouts and rejected updates");
  const of = `of ${plural(totals.participants, "participation", "participations")}`;
  if (counts.every(([, count]) => count === 0)) return [head, make("p", { class: "quiet" }, `None, ${of}.`)];
  const largest = Math.max(1, ...counts.map(([, count]) => count));
  const rows = counts.map(([name, count]) => {
    const bar = make("i", { class: "bar" });
    bar.style.width = `${(100 * count) / largest}%`;
    return make(
      "li",
      {},
      make("span", {}, name),
      make("b", {}, formatCount(count)),
      make("span", { class: "track", "aria-hidden": "true" }, bar),
    );
  });
  return [head, make("p", { class: "quiet" }, of), make("ul", { class: "reasons" }, rows)];
}

/** What the ledger says of the budget. */
function budget({ privacy: columns, delta }) {
  const spent = last(columns.spent);
  if (spent == null) return [make("p", { class: "quiet" }, "This run adds no noise: nothing is accounted.")];
  const left = last(columns.left);
  const rest = left == null ? "no limit set" : `${formatNumber(left)} left`;
  const text = make("p", { class: "quiet" }, `ε ${formatNumber(spent)} spent, ${rest}, at δ = ${delta}`);
  if (left == null) return [text];
  const share = spent / (spent + left || 1);
  const bar = make("i", { class: share > 0.9 ? "nearly" : null });
  bar.style.width = `${100 * share}%`;
  const meter = {
    class: "meter",
    role: "meter",
    "aria-label": "Privacy budget spent",
    "aria-valuemin": 0,
    "aria-valuemax": 100,
    "aria-valuenow": Math.round(100 * share),
  };
  return [make("div", meter, bar), text];
}

/** Whether a run is going, as far as its file tells. */
function stateOf(view) {
  if (view.finished) return "finished";
  return Date.now() / 1000 - view.modified < 60 ? "running" : "stopped";
}
