"use strict";
// Scales and the lines behind a chart.

/** Round numbers from `low` to `high`, about `count` of them. */
function niceTicks(low, high, count) {
  const span = high - low || Math.abs(high) || 1;
  const rough = span / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((candidate) => candidate >= rough);
  const ticks = [];
  for (let place = Math.ceil(low / step - 1e-9); place * step <= high + step * 1e-9; place += 1) {
    ticks.push(Number((place * step).toPrecision(12)));
  }
  return ticks;
}

function scale([low, high], [start, end]) {
  const factor = high === low ? 0 : (end - start) / (high - low);
  return (value) => start + (value - low) * factor;
}

/** The lowest and the highest of the values that are numbers. */
function span(values) {
  const known = values.filter((value) => Number.isFinite(value));
  return known.length ? [known.reduce((a, b) => Math.min(a, b)), known.reduce((a, b) => Math.max(a, b))] : [0, 1];
}

/** The values' span, a little wider than they are. */
function roomFor(values, { fromZero = false } = {}) {
  let [low, high] = span(values);
  if (fromZero) low = Math.min(0, low);
  if (low === high) return fromZero && high > 0 ? [0, 1.1 * high] : [low - 0.5, high + 0.5];
  const margin = 0.06 * (high - low);
  return [fromZero && low === 0 ? 0 : low - margin, high + margin];
}

/** What frames differences: zero, the means, and of their intervals no more than the means' own span, as the
 * interval of two seeds is many times wider than what it is about. */
function aboutZero(points) {
  const [low, high] = span([0, ...points.map((point) => point.y)]);
  const room = high - low;
  const bounds = points.flatMap((point) => [point.low, point.high]).filter(Number.isFinite);
  return [low, high, ...bounds.map((value) => Math.min(Math.max(value, low - room), high + room))];
}

/** Grid lines with their numbers. */
function drawAxes(frame, x, y, xs, { xFormat, xName }) {
  const group = draw("g", { class: "axes" });
  for (const { value, text } of frame.marks) {
    const at = Math.round(y(value)) + 0.5;
    group.append(
      draw("line", { x1: frame.left, x2: frame.left + frame.width, y1: at, y2: at }),
      draw("text", { x: frame.left - 8, y: at, dy: "0.32em", "text-anchor": "end" }, text),
    );
  }
  for (const tick of niceTicks(...xs, frame.width / 90)) {
    const text = { x: x(tick), y: frame.top + frame.height + 17, "text-anchor": "middle" };
    group.append(draw("text", text, xFormat(tick)));
  }
  const name = { x: frame.left + frame.width, y: frame.top + frame.height + 32, "text-anchor": "end" };
  group.append(draw("text", { ...name, class: "axis-name" }, xName));
  return group;
}
