"use strict";
// All methods of one task beside each other: curves, legend and the table of a report.

class Overview {
  constructor(actions) {
    this.actions = actions;
    this.group = new Choice("Task", actions.chooseGroup);
    this.across = new Segments(
      "Horizontal axis",
      [
        ["round", "by round"],
        ["bytes", "by bytes sent"],
      ],
      actions.chooseAcross,
    );
    this.against = new Choice("Against", actions.chooseAgainst);
    this.shown = new Segments(
      "What the accuracy chart shows",
      [
        ["values", "values"],
        ["differences", "differences"],
      ],
      actions.chooseShown,
    );
    byId("overview-tools").append(this.group.node, this.against.node, this.shown.node, this.across.node);
    this.accuracy = new Chart({
      title: "Accuracy",
      yFormat: (v) => (this.differing ? formatPoints(v) : formatPercent(v)),
      tickFormat: (v, step) => (this.differing ? formatPoints(v, decimals(100 * step)) : tickPercent(v, step)),
      labelled: true,
      close: true,
      height: 300,
    });
    this.loss = new Chart({
      title: "Loss",
      note: "on the test data",
      yFormat: formatNumber,
      labelled: true,
      close: true,
      height: 300,
    });
    byId("comparison").prepend(
      downloads(
        () => "Comparison",
        null,
        () => this.tableRows(),
      ),
    );
    byId("curves").append(this.accuracy.node, this.loss.node);
  }

  /** `views` are those of the chosen group. */
  update(state, views, styles) {
    const groups = [...new Set([...state.views.values()].map(groupName))].sort();
    this.group.update(
      groups.map((name) => [name, name]),
      state.group,
    );
    this.across.update(state.across);
    const methods = orderedMethods(views);
    this.against.update(
      methods.map((method) => [method, method]),
      state.against,
    );
    this.numbers = views.some((view) => view.measure === "r2");
    this.shown.update(state.shown);
    this.shown.node.hidden = methods.length < 2;
    this.differing = state.shown === "differences" && methods.length > 1;
    this.drawLegend(methods, styles, state.hidden);
    const shown = methods.filter((method) => !state.hidden.has(method));
    this.drawCurves(views, shown, styles, state);
    byId("comparison-table").replaceChildren(this.table(state, views, methods, styles));
    this.drawNotes(state.comparison.notes);
  }

  drawLegend(methods, styles, hidden) {
    const legend = byId("legend");
    if (legend.dataset.methods !== JSON.stringify(methods)) {
      legend.dataset.methods = JSON.stringify(methods);
      legend.replaceChildren(
        ...methods.map((method) =>
          make(
            "button",
            {
              type: "button",
              value: method,
              title: "Show or hide; double-click shows only this one",
              onclick: () => this.actions.toggleMethod(method),
              ondblclick: () => this.actions.onlyMethod(method),
            },
            swatchLine(styles.get(method)),
            method,
          ),
        ),
      );
    }
    for (const button of legend.children) button.setAttribute("aria-pressed", String(!hidden.has(button.value)));
  }

  drawCurves(views, methods, styles, { across, against }) {
    const shared = { xName: across === "round" ? "round" : "sent", xFormat: across === "round" ? formatCount : formatBytes };
    const of = (method) => views.filter((view) => view.method === method);
    const line = (method, points) => ({ name: method, ...styles.get(method), points });
    const values = (column) => methods.map((method) => line(method, meanOverSeeds(of(method), column, across)));
    const differences = methods
      .filter((method) => method !== against)
      .map((method) => line(method, differenceOverSeeds(of(method), of(against), "accuracy", across)));
    this.accuracy.update({
      ...shared,
      zeroLine: this.differing,
      title: this.differing ? `${measureName(this.numbers)} against ${against}` : measureName(this.numbers),
      note: this.differing
        ? "points of difference, paired by seed, 95 % interval shaded"
        : "mean over seeds, shaded from lowest to highest",
      series: this.differing ? differences : values("accuracy"),
    });
    this.loss.update({
      ...shared,
      title: this.numbers ? "RMSE" : "Loss",
      note: this.numbers ? "on the test data, in the targets' units" : "on the test data",
      series: values(this.numbers ? "rmse" : "loss"),
    });
  }

  table(state, views, methods, styles) {
    const { rows, bases } = state.comparison;
    const known = new Map(rows.filter((row) => groupName(row) === state.group).map((row) => [row.method, row]));
    const place = bases.indexOf(state.against);
    const measure = this.numbers ? "R2" : "accuracy";
    const errors = this.numbers ? ["rmse", "mae"] : [];
    const heads = [
      "Method",
      this.numbers ? "Final R2" : "Final",
      "Best",
      `Mean ${measure}`,
      ...errors.map((name) => name.toUpperCase()),
      this.numbers ? `Against ${state.against}` : `Final against ${state.against}`,
      "Verdict",
      "Speedup",
      "Seeds",
      "Progress",
    ];
    const cells = methods.map((method) => comparisonCells(method, known.get(method), place, views, errors));
    this.tableRows = () => [heads, ...cells.map((row) => [...row.slice(0, -1), ""])];
    return make(
      "table",
      { class: "wraps" },
      make(
        "thead",
        {},
        make(
          "tr",
          {},
          heads.map((head, at) => make("th", { scope: "col", class: at ? "number" : null }, head)),
        ),
      ),
      make(
        "tbody",
        {},
        cells.map(([method, ...rest]) =>
          make(
            "tr",
            {},
            make("th", { scope: "row" }, swatchLine(styles.get(method)), method),
            rest.map((value, at) =>
              make("td", { class: at ? "number" : "number strong", "data-head": heads[at + 1] }, verdictMark(value)),
            ),
          ),
        ),
      ),
    );
  }

  drawNotes(notes) {
    const node = byId("notes");
    if (node.dataset.notes === JSON.stringify(notes)) return;
    node.dataset.notes = JSON.stringify(notes);
    const items = notes.map((note) => make("li", {}, note));
    const details = make(
      "details",
      { open: node.querySelector("details")?.open },
      make("summary", {}, plural(notes.length, "note", "notes")),
      make("ul", {}, items),
    );
    node.replaceChildren(...(notes.length ? [details] : []));
  }
}

/** One method's row: its figures, how it stands to the chosen method, and how far it is. */
function comparisonCells(method, row, place, views, errors) {
  const own = views.filter((view) => view.method === method);
  const value = (name) => formatPercent(row.measures[name].mean, 2) + plusMinus(row.measures[name].half_width);
  // Unfinished runs have no final accuracy: the curves show how far they are.
  const final = (name) => (row?.finished ? value(name) : NONE);
  const stands = place < 0 || !row?.finished ? null : row.differences[place]?.final;
  const lead = stands ? formatPoints(stands.mean, 2) + plusMinus(stands.half_width) : NONE;
  const ratio = place < 0 || !row?.finished ? NONE : speedup(row.ratios[place]);
  const finished = own.filter((view) => view.finished).length;
  const seeds = finished === own.length ? own.length : `${finished} of ${own.length}`;
  const off = (name) => (row?.finished && row.errors[name] ? errorWithInterval(row.errors[name]) : NONE);
  const figures = [final("final"), final("best"), final("mean_accuracy"), ...errors.map(off)];
  return [method, ...figures, lead, stands?.verdict ?? NONE, ratio, seeds, progress(own)];
}

/** A verdict with a sign beside the word, anything else as it is. */
function verdictMark(value) {
  const signs = { better: "▲", worse: "▼", equivalent: "=", inconclusive: "?" };
  return typeof value === "string" && Object.hasOwn(signs, value)
    ? make("span", { class: `verdict ${value}` }, make("i", { "aria-hidden": "true" }, `${signs[value]} `), value)
    : value;
}

function speedup({ value, reached, seeds }) {
  if (value == null) return "-";
  return `${value.toFixed(2)}×${reached === seeds ? "" : ` (${reached} of ${seeds})`}`;
}

/** How far the runs of one method are, as words and a bar. */
function progress(views) {
  const finished = views.filter((view) => view.finished).length;
  if (finished === views.length) return "finished";
  const planned = views.every((view) => view.rounds > 0);
  if (!planned) return `round ${formatCount(Math.max(...views.map((view) => view.round)))}`;
  const share = mean(views.map((view) => (view.finished ? 1 : Math.min(1, view.round / view.rounds))));
  const bar = make("i", {});
  bar.style.width = `${100 * share}%`;
  return [make("span", { class: "progress", "aria-hidden": "true" }, bar), `${Math.floor(100 * share)} %`];
}

function swatchLine({ colour, dash }) {
  return draw(
    "svg",
    { class: "swatch-line", width: 22, height: 10, "aria-hidden": "true" },
    draw("path", { class: `line c${colour}`, d: "M1,5H21", "stroke-dasharray": dash }),
  );
}

/** What models are judged by: R2 of numbers to predict, else the share of labels found. */
function measureName(numbers) {
  return numbers ? "R2" : "Accuracy";
}

/** A mean in units of its own, with its interval. */
function errorWithInterval({ mean, half_width: half }) {
  return formatNumber(mean) + (half == null ? "" : ` ± ${formatNumber(half)}`);
}

/** Half an interval's width in points, where there is one. */
function plusMinus(half) {
  return half == null ? "" : ` ± ${(100 * half).toFixed(2)}`;
}
