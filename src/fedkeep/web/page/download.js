"use strict";
// A figure as a file: the drawing as SVG, its numbers as CSV.

const DRAWN = ["fill", "stroke", "stroke-width", "stroke-dasharray", "opacity", "font-size", "font-weight", "font-family"];

/** Hands the browser a file to keep. */
function save(name, type, text) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  make("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}

/** A drawing with the page's style written into it, so that it looks the same alone. */
function standalone(svg) {
  const copy = svg.cloneNode(true);
  const copies = copy.querySelectorAll("*");
  svg.querySelectorAll("*").forEach((node, place) => {
    const style = getComputedStyle(node);
    for (const name of DRAWN) copies[place].setAttribute(name, style.getPropertyValue(name));
  });
  copy.setAttribute("xmlns", SVG);
  const ground = { width: "100%", height: "100%", fill: getComputedStyle(document.body).backgroundColor };
  copy.prepend(draw("rect", ground));
  return new XMLSerializer().serializeToString(copy);
}

/** Rows of cells as CSV. */
function asCsv(rows) {
  const cell = (value) => (/[",\n]/.test(value) ? `"${String(value).replaceAll('"', '""')}"` : String(value ?? ""));
  return `${rows.map((row) => row.map(cell).join(",")).join("\n")}\n`;
}

/** Two buttons that keep a figure: `rows` are made when they are asked for. */
function downloads(title, svg, rows) {
  const name = title().toLowerCase().replace(/[^a-z0-9]+/g, "-");
  const button = (kind, keep) =>
    make("button", { type: "button", class: "keep", "aria-label": `Save "${title()}" as ${kind}`, onclick: keep }, kind);
  return make(
    "span",
    { class: "downloads" },
    svg && button("SVG", () => save(`${name}.svg`, "image/svg+xml", standalone(svg()))),
    button("CSV", () => save(`${name}.csv`, "text/csv", asCsv(rows()))),
  );
}
