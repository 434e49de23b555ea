"use strict";
// The coordination matrix: devices by labels, with what is assigned, filled and missing.

const MATRIX_KINDS = { empty: "assigned, empty", part: "partly filled", full: "filled", extra: "held, not assigned" };

class Matrix {
  constructor(chooseDevice) {
    this.chooseDevice = chooseDevice;
    this.summary = make("p", { class: "quiet" });
    this.warning = make("p", { class: "warning", hidden: true });
    this.key = make("div", { class: "key" });
    this.head = draw("svg", { "aria-hidden": "true" });
    this.body = draw("svg", { "aria-hidden": "true" });
    this.foot = draw("svg", { "aria-hidden": "true" });
    this.tip = make("div", { class: "tip", hidden: true });
    this.find = make("input", { type: "number", min: 0, onchange: () => this.seek(Number(this.find.value)) });
    this.rows = make("div", { class: "matrix-rows" }, this.body);
    this.plot = make(
      "div",
      {
        class: "matrix",
        tabindex: 0,
        role: "group",
        "aria-roledescription": "heat map",
        onpointermove: (event) => this.point(event),
        onpointerleave: () => this.leave(),
        onclick: (event) => this.click(event),
        onkeydown: (event) => this.press(event),
        onblur: () => this.leave(),
      },
      this.head,
      this.rows,
      this.foot,
    );
    this.node = make(
      "div",
      { class: "matrix-pane" },
      make(
        "div",
        { class: "pane-head" },
        make("h3", {}, "Coordination"),
        make("label", { class: "choice" }, make("span", {}, "Go to device"), this.find),
        downloads(
          () => "Coordination",
          () => this.body,
          () => this.tableRows(),
        ),
      ),
      this.summary,
      this.warning,
      this.key,
      this.plot,
      this.tip,
    );
    new ResizeObserver(() => this.render()).observe(this.node);
  }

  update(view, chosen) {
    this.view = view;
    this.chosen = chosen;
    this.render();
  }

  /** Devices, labels and cells as drawn: {quota, filled} by row and column. */
  table() {
    const { plan, holdings } = this.view;
    const labels = plan?.regions?.length ? plan.regions : this.view.labels;
    const listed = plan || holdings;
    if (!listed) return null;
    const filled = new Map(holdings ? holdings.devices.map((device, row) => [device, holdings.filled[row]]) : []);
    const cells = listed.devices.map((device, row) =>
      labels.map((_, column) => ({
        quota: plan ? (plan.quotas[row]?.[column] ?? 0) : 0,
        filled: filled.get(device)?.[column] ?? 0,
      })),
    );
    return { devices: listed.devices, labels, cells, planned: Boolean(plan) };
  }

  render() {
    if (!this.view) return;
    this.shown = this.table();
    this.plot.hidden = !this.shown;
    this.key.hidden = !this.shown;
    this.explain();
    if (!this.shown || !this.node.clientWidth) return;
    const { devices, labels } = this.shown;
    const left = 40;
    this.size = {
      left,
      width: Math.max(16, Math.min(72, (this.node.clientWidth - left - 14) / Math.max(1, labels.length))),
      height: devices.length <= 40 ? 17 : devices.length <= 120 ? 10 : 6,
    };
    this.drawHead();
    this.drawBody();
    this.drawFoot();
    this.drawKey();
  }

  /** Opens a device and scrolls to its row. */
  seek(device) {
    const row = this.shown ? this.shown.devices.indexOf(device) : -1;
    if (row >= 0) this.rows.scrollTop = Math.max(0, (row + 0.5) * this.size.height - this.rows.clientHeight / 2);
    this.chooseDevice(device);
  }

  tableRows() {
    const { devices, labels, cells } = this.shown ?? { devices: [], labels: [], cells: [] };
    const head = ["device", ...labels.flatMap((label) => [`${label} slots`, `${label} filled`])];
    return [head, ...devices.map((device, row) => [device, ...cells[row].flatMap(({ quota, filled }) => [quota, filled])])];
  }

  explain() {
    const { plan, holdings, devices } = this.view;
    this.warning.hidden = true;
    if (!this.shown) {
      this.summary.textContent = "No plan and no holdings are recorded for this run.";
      return;
    }
    const listed = this.shown.devices.length;
    const some =
      listed < devices
        ? `the first ${formatCount(listed)} of ${plural(devices, "device", "devices")}`
        : plural(devices, "device", "devices");
    const what = plan ? `planned at round ${plan.round}` : "no plan: each device stores what its own policy keeps";
    this.summary.textContent = `${some}, ${what}${holdings ? `, filled as of round ${holdings.round}` : ""}`;
    const missing = plan
      ? this.shown.labels
          .map((label, place) => ({ label, has: plan.holders[place], wants: plan.wanted[place] }))
          .filter(({ has, wants }) => has < wants)
      : [];
    this.warning.hidden = !missing.length;
    const named = missing.slice(0, 6).map(({ label, has, wants }) => `${label} (${has} of ${wants})`);
    const more = missing.length > 6 ? ` and ${missing.length - 6} more` : "";
    this.warning.textContent = `Missing holders: ${named.join(", ")}${more}`;
    this.plot.setAttribute(
      "aria-label",
      `Coordination matrix, ${this.summary.textContent}. Arrow keys read cells, Enter opens a device.`,
    );
  }

  cellPath(column, row) {
    const { left, width, height } = this.size;
    const gap = height > 8 ? 1.5 : 0.5;
    const across = width - 2 * gap;
    return `M${left + column * width + gap},${row * height + gap}h${across}v${height - 2 * gap}h${-across}Z`;
  }

  kind({ quota, filled }) {
    if (!this.shown.planned) return filled ? "full" : null;
    if (!quota) return filled ? "extra" : null;
    return filled >= quota ? "full" : filled ? "part" : "empty";
  }

  drawBody() {
    const { devices, labels, cells } = this.shown;
    const { left, width, height } = this.size;
    const paths = { none: "", empty: "", part: "", full: "", extra: "" };
    cells.forEach((row, place) =>
      row.forEach((cell, column) => {
        paths[this.kind(cell) || "none"] += this.cellPath(column, place);
      }),
    );
    this.used = Object.keys(MATRIX_KINDS).filter((kind) => paths[kind]);
    const every = Math.ceil(16 / height);
    const names = devices.map((device, row) =>
      row % every
        ? null
        : draw("text", { x: left - 6, y: (row + 0.5) * height, dy: "0.34em", "text-anchor": "end" }, device),
    );
    const at = devices.indexOf(this.chosen);
    const mark =
      at < 0
        ? null
        : draw("rect", { class: "chosen", x: 1, y: at * height, width: left + labels.length * width, height });
    this.pointer = draw("rect", { class: "pointer", width, height, visibility: "hidden" });
    this.body.setAttribute("width", left + labels.length * width + 2);
    this.body.setAttribute("height", devices.length * height + 1);
    this.body.replaceChildren(
      ...[mark, ...names].filter(Boolean),
      ...Object.entries(paths).map(([kind, d]) => draw("path", { class: `cell ${kind}`, d })),
      this.pointer,
    );
  }

  drawHead() {
    const { left, width } = this.size;
    const longest = Math.min(12, Math.max(0, ...this.shown.labels.map((label) => label.length)));
    const tilted = longest * 6.5 > width;
    const height = tilted ? 14 + longest * 4.6 : 20;
    this.head.setAttribute("width", left + this.shown.labels.length * width + 40);
    this.head.setAttribute("height", height);
    this.head.replaceChildren(
      ...this.shown.labels.map((label, column) => {
        const x = left + (column + 0.5) * width;
        const short = label.length > 12 ? `${label.slice(0, 11)}…` : label;
        const place = tilted
          ? { transform: `translate(${x},${height - 5}) rotate(-42)` }
          : { x, y: height - 6, "text-anchor": "middle" };
        return draw("text", place, short);
      }),
    );
  }

  drawFoot() {
    const { plan } = this.view;
    const { left, width } = this.size;
    this.foot.setAttribute("width", left + this.shown.labels.length * width + 40);
    this.foot.setAttribute("height", plan ? 34 : 0);
    if (!plan) return this.foot.replaceChildren();
    return this.foot.replaceChildren(
      draw("text", { x: left - 6, y: 17, "text-anchor": "end" }, "has"),
      draw("text", { x: left - 6, y: 30, "text-anchor": "end" }, "wants"),
      ...plan.holders.flatMap((has, column) => {
        const x = left + (column + 0.5) * width;
        const short = has < plan.wanted[column];
        return [
          draw("text", { class: short ? "short" : "enough", x, y: 17, "text-anchor": "middle" }, has),
          draw("text", { x, y: 30, "text-anchor": "middle" }, plan.wanted[column]),
        ];
      }),
    );
  }

  drawKey() {
    const names = this.shown.planned ? MATRIX_KINDS : { full: "held" };
    this.key.replaceChildren(
      ...this.used.map((kind) => make("span", {}, make("i", { class: `swatch cell-${kind}` }), names[kind])),
    );
  }

  cellAt(event) {
    const box = this.body.getBoundingClientRect();
    const column = Math.floor((event.clientX - box.left - this.size.left) / this.size.width);
    const row = Math.floor((event.clientY - box.top) / this.size.height);
    const inside =
      this.rows.contains(event.target) &&
      column < this.shown.labels.length &&
      row >= 0 &&
      row < this.shown.devices.length;
    return inside ? { row, column } : null;
  }

  point(event) {
    const cell = this.shown && this.cellAt(event);
    if (!cell || cell.column < 0) return this.leave();
    return this.show(cell);
  }

  click(event) {
    const cell = this.shown && this.cellAt(event);
    if (cell) this.chooseDevice(this.shown.devices[cell.row]);
  }

  press(event) {
    if (!this.shown) return;
    const { row, column } = this.at || { row: -1, column: 0 };
    const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
    if (event.key === "Enter" && this.at) this.chooseDevice(this.shown.devices[row]);
    if (event.key === "Escape") this.leave();
    if (!(event.key in moves)) return;
    event.preventDefault();
    const [down, right] = moves[event.key];
    const clamp = (value, end) => Math.max(0, Math.min(end, value));
    this.show({
      row: clamp(row + down, this.shown.devices.length - 1),
      column: clamp(column + right, this.shown.labels.length - 1),
    });
    this.rows.scrollTop = Math.max(0, (this.at.row + 1) * this.size.height - this.rows.clientHeight / 2);
    announce(this.tip.textContent);
  }

  show({ row, column }) {
    this.at = { row, column };
    const { left, width, height } = this.size;
    const { quota, filled } = this.shown.cells[row][column];
    const state =
      this.shown.planned && quota
        ? `${filled} of ${plural(quota, "slot", "slots")} filled`
        : filled
          ? `holds ${filled}${this.shown.planned ? ", not assigned" : ""}`
          : this.shown.planned
            ? "not assigned"
            : "holds none";
    this.tip.textContent = `device ${this.shown.devices[row]}, ${this.shown.labels[column]}: ${state}`;
    this.tip.hidden = false;
    for (const [name, value] of Object.entries({ x: left + column * width, y: row * height, visibility: "visible" }))
      this.pointer.setAttribute(name, value);
    const box = this.pointer.getBoundingClientRect();
    const pane = this.node.getBoundingClientRect();
    this.tip.style.left = `${Math.min(box.left - pane.left + 10, Math.max(0, pane.width - 220))}px`;
    this.tip.style.top = `${box.bottom - pane.top + 6}px`;
  }

  leave() {
    this.at = null;
    this.tip.hidden = true;
    if (this.pointer) this.pointer.setAttribute("visibility", "hidden");
  }
}
