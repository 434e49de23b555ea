"use strict";
// The settings of a run, and where two runs differ.

class Settings {
  constructor(chooseOther) {
    this.other = new Choice("Compare with", chooseOther);
    this.summary = make("p", { class: "quiet" });
    this.body = make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Settings" });
    this.details = make("details", { class: "card settings" }, make("summary", {}, "Settings of this run"), this.other.node, this.summary, this.body);
    this.node = this.details;
  }

  /** `other` is the run to compare with, or null to list everything. */
  update(views, view, other) {
    const others = views.filter((run) => run.key !== view.key);
    this.other.update(
      [["", "nothing: list all"], ...others.map((run) => [run.key, `${run.method}, seed ${run.seed}`])],
      other ? other.key : "",
    );
    const rows = other ? differing(view.config, other.config) : Object.entries(view.config).map(([key, value]) => [key, value]);
    this.summary.textContent = other
      ? `${plural(rows.length, "setting differs", "settings differ")} between ${runName(view)} and ${runName(other)}`
      : `${plural(rows.length, "setting", "settings")} of ${runName(view)}`;
    const heads = other ? ["Setting", runName(view), runName(other)] : ["Setting", "Value"];
    this.body.replaceChildren(settingsTable(heads, rows));
  }
}

function runName(view) {
  return `${view.method}, seed ${view.seed}`;
}

/** Keys whose values differ, with both values; "–" where one has none. */
function differing(one, other) {
  const keys = [...new Set([...Object.keys(one), ...Object.keys(other)])].sort();
  return keys.filter((key) => one[key] !== other[key]).map((key) => [key, one[key] ?? NONE, other[key] ?? NONE]);
}

function settingsTable(heads, rows) {
  return make(
    "table",
    { class: "wraps" },
    make("thead", {}, make("tr", {}, heads.map((head) => make("th", { scope: "col" }, head)))),
    make(
      "tbody",
      {},
      rows.map(([key, ...values]) =>
        make("tr", {}, make("th", { scope: "row" }, key), values.map((value, place) => make("td", { "data-head": heads[place + 1] }, value))),
      ),
    ),
  );
}
