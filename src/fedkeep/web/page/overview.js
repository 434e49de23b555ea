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
    byId("overview-tools").append(this.group.node, this.across.node);
    this.accuracy = new Chart({
      title: "Accuracy",
      note: "mean over seeds, shaded from lowest to highest",
      yFormat: (v) => formatPercent(v),
      tickFormat: tickPercent,
      labelled: true,
      height: 300,
    });
    this.loss = new Chart({
      title: "Loss",
      note: "on the test data",
      yFormat: formatNumber,
      labelled: true,
      height: 300,
    });
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
    this.drawLegend(methods, styles, state.hidden);
    const shown = methods.filter((method) => !state.hidden.has(method));
    this.drawCurves(views, shown, styles, state.across);
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

  drawCurves(views, methods, styles, across) {
    const xName = across === "round" ? "round" : "sent";
    const xFormat = across === "round" ? formatCount : formatBytes;
    for (const [chart, column] of [
      [this.accuracy, "accuracy"],
      [this.loss, "loss"],
    ]) {
      const series = methods.map((method) => ({
        name: method,
        ...styles.get(method),
        points: meanOverSeeds(
          views.filter((view) => view.method === method),
          column,
          across,
        ),
      }));
      chart.update({ series, xName, xFormat });
    }
  }

  table(state, views, methods, styles) {
    const { rows } = state.comparison;
    const known = new Map(rows.filter((row) => groupName(row) === state.group).map((row) => [row.method, row]));
    const bases = basesThatRan(state.comparison.bases, [...known.values()]);
    const names = bases.map(([base]) => `Speed-up over ${base}`);
    const heads = ["Method", "Final accuracy", ...names, "Seeds", "Progress"];
    return make(
      "table",
      {},
      make(
        "thead",
        {},
        make(
          "tr",
          {},
          heads.map((head, place) => make("th", { scope: "col", class: place ? "number" : null }, head)),
        ),
      ),
      make(
        "tbody",
        {},
        methods.map((method) => this.row(method, known.get(method), bases, views, styles)),
      ),
    );
  }

  row(method, row, bases, views, styles) {
    const own = views.filter((view) => view.method === method);
    const accuracy = row
      ? formatPercent(row.measures.final.mean, 2) + plusMinus(row.measures.final.half_width)
      : NONE;
    const ratios = bases.map(([, place]) => make("td", { class: "number" }, row ? speedup(row.ratios[place]) : NONE));
    return make(
      "tr",
      {},
      make("th", { scope: "row" }, swatchLine(styles.get(method)), method),
      make("td", { class: "number strong" }, accuracy),
      ratios,
      make("td", { class: "number" }, own.length),
      make("td", { class: "number" }, progress(own)),
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

/** The bases that any row has seeds in common with, each with its place among all. */
function basesThatRan(bases, rows) {
  const placed = bases.map((base, place) => [base, place]);
  return placed.filter(([, place]) => rows.some((row) => row.ratios[place].seeds > 0));
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

/** Half an interval's width in points, where there is one. */
function plusMinus(half) {
  return half == null ? "" : ` ± ${(100 * half).toFixed(2)}`;
}
