"use strict";
// From runs to lines: which method has which colour, and the mean over its seeds.

const COLOURS = 8;
const USUAL_COLOUR = {
  ode: 0,
  fifo: 1,
  reservoir: 2,
  "high-loss": 3,
  "gradient-norm": 4,
  fedbalancer: 5,
  sld: 6,
  "full-data": 7,
};
const RANDOM = ["fifo", "reservoir", "reservoir-reset", "random"];

function isRandom(method) {
  return RANDOM.includes(method);
}

function isOde(method) {
  return method === "ode" || method.startsWith("ode-");
}

/** Methods in reading order: ODE first, random right beside it, then the rest. */
function orderedMethods(views) {
  const rank = (method) => (method === "ode" ? 0 : isOde(method) ? 1 : isRandom(method) ? 2 : 3);
  const methods = [...new Set(views.map((view) => view.method))];
  return methods.sort((a, b) => rank(a) - rank(b) || a.localeCompare(b, "en", { numeric: true }));
}

/** A style per method that stays the same while methods come and go: colour, and dashes so that colour is not all. */
function methodStyles(methods) {
  const used = new Set(methods.map((method) => USUAL_COLOUR[method]));
  const free = [...Array(COLOURS).keys()].filter((colour) => !used.has(colour));
  const styles = new Map();
  let others = 0;
  for (const method of methods) {
    const usual = Object.hasOwn(USUAL_COLOUR, method) ? USUAL_COLOUR[method] : null;
    let repeated = false;
    let colour = usual;
    if (usual == null) {
      colour = others < free.length ? free[others] : others % COLOURS;
      repeated = others >= free.length;
      others += 1;
    }
    styles.set(method, { colour, dash: isRandom(method) ? "6 4" : repeated ? "2 3" : null });
  }
  return styles;
}

function groupName(view) {
  return view.setting ? `${view.task}, ${view.setting}` : view.task;
}

/** The value of `ys` at x by straight lines between the points; null outside them or beside a gap. */
function valueAt(xs, ys, x) {
  if (!xs.length || x < xs[0] || x > xs[xs.length - 1]) return null;
  let low = 0;
  let high = xs.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (xs[middle] <= x) low = middle;
    else high = middle;
  }
  if (x === xs[high]) return ys[high];
  if (x === xs[low]) return ys[low];
  if (ys[low] == null || ys[high] == null) return null;
  return ys[low] + ((ys[high] - ys[low]) * (x - xs[low])) / (xs[high] - xs[low]);
}

/** The mean over the seeds of one method, with the span from lowest to highest. */
function meanOverSeeds(views, column, across) {
  const longest = views.reduce((best, view) =>
    view.evaluations.round.length > best.evaluations.round.length ? view : best,
  );
  const points = [];
  for (const round of longest.evaluations.round) {
    const at = (name) =>
      views
        .map(({ evaluations }) => valueAt(evaluations.round, evaluations[name], round))
        .filter((value) => value != null);
    const values = at(column);
    if (!values.length) continue;
    const x = across === "round" ? round : mean(at("bytes_up")) + mean(at("bytes_down"));
    points.push({ x, y: mean(values), low: Math.min(...values), high: Math.max(...values), seeds: values.length });
  }
  return points;
}

/** Two-sided 95 % quantiles of Student's t for 1, 2, ... degrees of freedom. */
const T95 = [
  12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.16, 2.145, 2.131, 2.12, 2.11, 2.101,
  2.093, 2.086, 2.08, 2.074, 2.069, 2.064, 2.06, 2.056, 2.052, 2.048, 2.045, 2.042,
];

/** The mean over common seeds of one method's values less another's, with its 95 % interval. */
function differenceOverSeeds(views, baseViews, column, across) {
  const pairs = views
    .map((view) => [view, baseViews.find((other) => other.seed === view.seed)])
    .filter(([, other]) => other);
  if (!pairs.length) return [];
  const longest = pairs.map(([view]) => view).reduce((a, b) => (b.evaluations.round.length > a.evaluations.round.length ? b : a));
  const points = [];
  for (const round of longest.evaluations.round) {
    const at = ({ evaluations }, name) => valueAt(evaluations.round, evaluations[name], round);
    const found = pairs.filter(([view, other]) => at(view, column) != null && at(other, column) != null);
    if (!found.length) continue;
    const values = found.map(([view, other]) => at(view, column) - at(other, column));
    const x = across === "round" ? round : mean(found.map(([view]) => at(view, "bytes_up") + at(view, "bytes_down")));
    points.push({ x, ...withInterval(values), seeds: values.length });
  }
  return points;
}

/** A mean and, of two values or more, its 95 % interval. */
function withInterval(values) {
  const y = mean(values);
  if (values.length < 2) return { y };
  const variance = values.reduce((sum, value) => sum + (value - y) ** 2, 0) / (values.length - 1);
  const half = (T95[values.length - 2] ?? 1.96) * Math.sqrt(variance / values.length);
  return { y, low: y - half, high: y + half };
}

function mean(values) {
  return values.reduce((sum, value) => sum + value, 0) / values.length;
}

/** One column of a run's table as points. */
function columnPoints(columns, name) {
  return columns.round
    .map((round, place) => ({ x: round, y: columns[name][place] }))
    .filter((point) => point.y != null);
}

function last(values) {
  return values.length ? values[values.length - 1] : null;
}
