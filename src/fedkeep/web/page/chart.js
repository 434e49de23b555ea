"use strict";
// A line or stacked-area chart: resizes with its card, explains a point under the pointer or the arrow keys.

const CHART_HEIGHT = 240;
const NAME_LENGTH = 14;

class Chart {
  /** `options`: title, note, yFormat, tickFormat, stacked, fromZero, labelled (names at the lines' ends), height, close
   * (the frame follows what comes after the steep beginning). */
  constructor(options) {
    this.options = options;
    this.data = { series: [], xName: "round", xFormat: formatNumber };
    this.svg = draw("svg", { "aria-hidden": "true", focusable: "false" });
    this.tip = make("div", { class: "tip", hidden: true });
    this.plot = make(
      "div",
      {
        class: "plot",
        tabindex: 0,
        role: "group",
        "aria-roledescription": "chart",
        onpointerdown: (event) => this.press(event),
        onpointermove: (event) => this.point(event),
        onpointerup: (event) => this.release(event),
        onpointerleave: () => this.hide(),
        ondblclick: () => this.zoomTo(null),
        onkeydown: (event) => this.key(event),
        onblur: () => this.hide(),
      },
      this.svg,
      this.tip,
    );
    this.legend = make("div", { class: "key" });
    this.title = make("strong", {}, options.title);
    this.note = make("span", {}, options.note);
    this.whole = make("button", { type: "button", class: "keep", hidden: true, onclick: () => this.zoomTo(null) }, "Show all");
    this.node = make(
      "figure",
      { class: "card chart" },
      make(
        "figcaption",
        {},
        this.title,
        this.note,
        this.legend,
        this.whole,
        downloads(
          () => options.title,
          () => this.svg,
          () => this.rows(),
        ),
      ),
      this.plot,
    );
    this.drawnWidth = 0;
    this.zoom = null;
    this.pressed = null;
    this.clip = `clip-${(Chart.made = (Chart.made ?? 0) + 1)}`;
    new ResizeObserver(() => this.resized()).observe(this.plot);
  }

  /** `series`: name, colour, dash, points of x, y and perhaps low and high. */
  update(data) {
    this.data = { ...this.data, ...data };
    this.title.textContent = this.data.title ?? this.options.title;
    this.note.textContent = this.data.note ?? this.options.note ?? "";
    this.render();
  }

  resized() {
    if (Math.abs(this.plot.clientWidth - this.drawnWidth) > 1) this.render();
  }

  /** The numbers beside the vertical axis and how they are written. */
  marks(ys, height) {
    const at = niceTicks(...ys, height / 48);
    const step = at.length > 1 ? at[1] - at[0] : Math.abs(at[0] ?? 1);
    return at.map((value) => ({ value, text: (this.options.tickFormat || tickNumber)(value, step) }));
  }

  frame(ys) {
    const width = this.plot.clientWidth;
    const longest = Math.max(0, ...this.shown.map((series) => Math.min(NAME_LENGTH, series.name.length)));
    const roomForNames = this.options.labelled && width > 460 ? 16 + 7.6 * longest : 18;
    const full = this.options.height || CHART_HEIGHT;
    const height = full - 46;
    const marks = this.marks(ys, height);
    const left = 14 + 6.6 * Math.max(2, ...marks.map(({ text }) => text.length));
    return { left, marks, top: 10, width: Math.max(40, width - left - roomForNames), height, full };
  }

  /** The series as drawn: stacked ones lie on those before them. */
  layers() {
    if (!this.options.stacked) return this.data.series;
    let floor = null;
    return this.data.series.map((series) => {
      const below = floor;
      const points = series.points.map((point, place) => {
        const low = below ? below[place] : 0;
        return { x: point.x, y: low + point.y, low, high: low + point.y, own: point.y };
      });
      floor = points.map((point) => point.y);
      return { ...series, points };
    });
  }

  render() {
    if (!this.plot.clientWidth) return;
    this.drawnWidth = this.plot.clientWidth;
    this.shown = this.layers().filter((series) => series.points.length);
    const all = this.shown.flatMap((series) => series.points);
    const domain = this.measure(all);
    this.cursor = draw("g", { class: "cursor" });
    const { left, top, width, height } = this.box;
    const inside = { "clip-path": `url(#${this.clip})` };
    this.svg.replaceChildren(
      draw("clipPath", { id: this.clip }, draw("rect", { x: left, y: top - 4, width: width + 6, height: height + 8 })),
      drawAxes(this.box, this.x, this.y, domain, this.data),
      this.data.zeroLine ? this.zero() : draw("g"),
      draw("g", inside, ...this.shown.map((series) => this.area(series))),
      draw("g", inside, ...this.shown.map((series) => this.line(series))),
      all.length ? this.names() : this.nothing(),
      this.cursor,
    );
    this.describe();
    this.drawLegend();
    if (this.at != null && !this.tip.hidden) this.show(Math.min(this.at, this.xs.length - 1));
  }

  /** Sets the frame and the scales for all points; returns the horizontal range. */
  measure(all) {
    const [first, final] = this.zoom ?? span(all.map((point) => point.x));
    const domain = first === final ? [first - 1, final + 1] : [first, final];
    const from = this.options.close && !this.zoom ? first + 0.15 * (final - first) : first;
    const near = all.filter((point) => point.x >= from && point.x <= final);
    const framed = near.length ? near : all;
    const ys = roomFor(
      this.data.zeroLine ? aboutZero(framed) : framed.flatMap((point) => [point.y, point.low, point.high]),
      this.options,
    );
    this.box = this.frame(ys);
    const { left, top, width, height, full } = this.box;
    this.x = scale(domain, [left, left + width]);
    this.y = scale(ys, [top + height, top]);
    const xs = all.map((point) => point.x).filter((x) => x >= domain[0] && x <= domain[1]);
    this.xs = [...new Set(xs)].sort((a, b) => a - b);
    this.svg.setAttribute("width", this.drawnWidth);
    this.svg.setAttribute("height", full);
    return domain;
  }

  /** Where two methods are alike. */
  zero() {
    const { left, width } = this.box;
    return draw("line", { class: "zero", x1: left, x2: left + width, y1: this.y(0), y2: this.y(0) });
  }

  /** Shows only this span of the horizontal axis, or all of it. */
  zoomTo(span) {
    this.zoom = span;
    this.whole.hidden = !span;
    this.render();
  }

  /** All that the chart shows, as rows of a table. */
  rows() {
    const head = ["series", this.data.xName, "value", "low", "high"];
    return [head, ...this.shown.flatMap(({ name, points }) => points.map((p) => [name, p.x, p.own ?? p.y, p.low, p.high]))];
  }

  nothing() {
    const middle = { x: this.drawnWidth / 2, y: this.box.full / 2, "text-anchor": "middle" };
    return draw("text", { class: "nothing", ...middle }, "nothing yet");
  }

  area(series) {
    const points = series.points.filter((point) => point.low != null);
    if (!points.length) return draw("g");
    const top = points.map((point) => `${this.x(point.x).toFixed(1)},${this.y(point.high).toFixed(1)}`);
    const bottom = points.map((point) => `${this.x(point.x).toFixed(1)},${this.y(point.low).toFixed(1)}`).reverse();
    const kind = this.options.stacked ? "layer" : "band";
    return draw("path", { class: `${kind} c${series.colour}`, d: `M${top.join("L")}L${bottom.join("L")}Z` });
  }

  line(series) {
    const path = series.points.map((point) => `${this.x(point.x).toFixed(1)},${this.y(point.y).toFixed(1)}`);
    const only = series.points.length === 1;
    if (only) return this.dot(series, series.points[0]);
    return draw("path", { class: `line c${series.colour}`, d: `M${path.join("L")}`, "stroke-dasharray": series.dash });
  }

  dot(series, point) {
    return draw("circle", { class: `dot c${series.colour}`, cx: this.x(point.x), cy: this.y(point.y), r: 4 });
  }

  /** The series' names at the ends of their lines, pushed apart. */
  names() {
    const group = draw("g", { class: "names" });
    if (!this.options.labelled || this.plot.clientWidth <= 460) return group;
    const ends = this.shown.map((series) => ({ series, at: this.y(last(series.points).y) }));
    ends.sort((a, b) => a.at - b.at);
    for (let place = 1; place < ends.length; place += 1)
      ends[place].at = Math.max(ends[place].at, ends[place - 1].at + 14);
    const over = ends.length ? Math.max(0, last(ends).at - (this.box.top + this.box.height)) : 0;
    for (const { series, at } of ends) {
      const name = shortName(series.name, this.shown.map((other) => other.name), NAME_LENGTH);
      const x = Math.min(this.x(last(series.points).x), this.box.left + this.box.width) + 8;
      group.append(draw("text", { class: `c${series.colour}`, x, y: at - over, dy: "0.32em" }, name));
    }
    return group;
  }

  drawLegend() {
    if (this.options.labelled || this.shown.length < 2) return;
    this.legend.replaceChildren(
      ...this.shown.map((series) => make("span", {}, make("i", { class: `swatch c${series.colour}` }), series.name)),
    );
  }

  describe() {
    const ends = this.shown.map((series) => {
      const end = last(series.points);
      return `${series.name} ${this.options.yFormat(end.own ?? end.y)}`;
    });
    const x = this.xs.length ? `at ${this.data.xName} ${this.data.xFormat(last(this.xs))}: ` : "";
    this.plot.setAttribute("aria-label", `${this.options.title}: ${x}${ends.join(", ") || "nothing yet"}`);
  }

  across(event) {
    return event.clientX - this.plot.getBoundingClientRect().left;
  }

  press(event) {
    this.pressed = this.xs?.length ? this.across(event) : null;
  }

  /** A span drawn with the pointer becomes the frame, if it holds two points or more. */
  release(event) {
    const [start, end] = [this.pressed, this.across(event)].sort((a, b) => a - b);
    this.pressed = null;
    if (start == null || end - start < 12) return;
    const held = this.xs.filter((x) => this.x(x) >= start && this.x(x) <= end);
    if (held.length > 1) this.zoomTo([held[0], last(held)]);
  }

  point(event) {
    if (!this.xs || !this.xs.length) return;
    const at = this.across(event);
    const distance = this.xs.map((x) => Math.abs(this.x(x) - at));
    this.show(distance.indexOf(Math.min(...distance)));
  }

  key(event) {
    if (!this.xs || !this.xs.length) return;
    const end = this.xs.length - 1;
    const now = this.at ?? end + 1;
    const moves = { ArrowLeft: now - 1, ArrowRight: now + 1, Home: 0, End: end };
    if (event.key === "+" && end > 3) this.zoomTo([this.xs[Math.ceil(end / 2)], this.xs[end]]);
    if (event.key === "-") this.zoomTo(null);
    if (event.key === "Escape") this.hide();
    if (!(event.key in moves)) return;
    event.preventDefault();
    this.show(Math.max(0, Math.min(end, moves[event.key])));
    announce(this.tip.textContent);
  }

  /** Explains the place'th x. */
  show(place) {
    this.at = place;
    const x = this.xs[place];
    const { top, height } = this.box;
    const found = this.shown.map((series) => ({ series, point: nearest(series.points, x) }));
    const near = found.filter(({ point }) => Math.abs(this.x(point.x) - this.x(x)) < 12);
    const across = this.pressed == null ? [] : [this.span()];
    if (!this.options.stacked) near.sort((a, b) => b.point.y - a.point.y);
    this.cursor.replaceChildren(
      ...across,
      draw("line", { x1: this.x(x), x2: this.x(x), y1: top, y2: top + height }),
      ...near.map(({ series, point }) => this.dot(series, point)),
    );
    this.tip.replaceChildren(
      make("div", { class: "tip-head" }, `${this.data.xName} ${this.data.xFormat(x)} `),
      ...near.map(({ series, point }) => this.tipRow(series, point)),
    );
    this.tip.hidden = false;
    const toLeft = this.x(x) > this.plot.clientWidth / 2;
    this.tip.style.left = toLeft ? "" : `${this.x(x) + 14}px`;
    this.tip.style.right = toLeft ? `${this.plot.clientWidth - this.x(x) + 14}px` : "";
  }

  /** What is being drawn with the pointer. */
  span() {
    const { top, height } = this.box;
    const [start, end] = [this.pressed, this.x(this.xs[this.at])].sort((a, b) => a - b);
    return draw("rect", { class: "span", x: start, y: top, width: end - start, height });
  }

  tipRow(series, point) {
    const seeds = point.seeds > 1 ? ` (${point.seeds} seeds) ` : " ";
    return make(
      "div",
      { class: "tip-row" },
      make("i", { class: `swatch c${series.colour}` }),
      make("span", {}, `${series.name} `),
      make("b", {}, this.options.yFormat(point.own ?? point.y)),
      make("small", {}, seeds),
    );
  }

  hide() {
    this.at = null;
    this.tip.hidden = true;
    if (this.cursor) this.cursor.replaceChildren();
  }
}

function nearest(points, x) {
  return points.reduce((best, point) => (Math.abs(point.x - x) < Math.abs(best.x - x) ? point : best));
}
