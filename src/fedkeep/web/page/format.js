"use strict";
// Numbers as people read them; "–" where there is none.

const NONE = "–";
const groupedDigits = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

function formatPercent(value, digits = 1) {
  return value == null ? NONE : `${(100 * value).toFixed(digits)} %`;
}

/** A difference of accuracies, in points. */
function formatPoints(value, digits = 1) {
  return value == null ? NONE : `${value > 0 ? "+" : ""}${(100 * value).toFixed(digits)}`;
}

function formatNumber(value) {
  if (value == null) return NONE;
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e9 || size < 0.001) return value.toExponential(1);
  if (size >= 1000) return groupedDigits.format(value);
  return String(Number(value.toPrecision(3)));
}

/** Decimals that tell numbers apart which lie `step` from each other. */
function decimals(step) {
  return step > 0 ? Math.min(6, Math.max(0, Math.ceil(-Math.log10(step) - 1e-9))) : 0;
}

/** A number on an axis whose marks lie `step` apart. */
function tickNumber(value, step) {
  return Math.abs(value) >= 1000 ? groupedDigits.format(value) : value.toFixed(decimals(step));
}

function tickPercent(value, step) {
  return formatPercent(value, decimals(100 * step));
}

function formatCount(value) {
  return value == null ? NONE : groupedDigits.format(value);
}

function formatBytes(value) {
  if (value == null) return NONE;
  const units = ["B", "kB", "MB", "GB", "TB"];
  let place = 0;
  while (value >= 1000 && place < units.length - 1) {
    value /= 1000;
    place += 1;
  }
  return `${Number(value.toPrecision(3))} ${units[place]}`;
}

function formatDuration(seconds) {
  if (seconds == null) return NONE;
  if (seconds < 90) return `${seconds.toFixed(0)} s`;
  if (seconds < 5400) return `${(seconds / 60).toFixed(0)} min`;
  return `${(seconds / 3600).toFixed(1)} h`;
}

function plural(count, one, many) {
  return `${formatCount(count)} ${count === 1 ? one : many}`;
}

/** A name in at most `length` letters: of names that begin alike, what tells them apart is kept. */
function shortName(name, names, length) {
  if (name.length <= length) return name;
  const alike = names.filter((other) => other !== name && other.slice(0, length - 1) === name.slice(0, length - 1));
  if (!alike.length) return `${name.slice(0, length - 1)}…`;
  const common = alike.map((other) => {
    let at = 0;
    while (at < name.length && other[at] === name[at]) at += 1;
    return at;
  });
  const start = Math.max(1, Math.min(Math.min(...common) - 2, name.length - length + 1));
  const rest = name.slice(start);
  return rest.length < length ? `…${rest}` : `…${rest.slice(0, length - 2)}…`;
}
