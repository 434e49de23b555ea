"use strict";
// Everything on the page is made here, and text is only ever set as text: nothing from a record becomes HTML.

const SVG = "http://www.w3.org/2000/svg";

function withChildren(node, children) {
  for (const child of children.flat()) {
    if (child == null || child === false) continue;
    node.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return node;
}

/** An HTML element; `properties` are attributes, or listeners where they begin with "on". */
function make(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value != null && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  return withChildren(node, children);
}

function draw(tag, attributes = {}, ...children) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value != null) node.setAttribute(name, value);
  }
  return withChildren(node, children);
}

function byId(id) {
  return document.getElementById(id);
}

/** Tells those who listen instead of look. */
function announce(text) {
  byId("live").textContent = text;
}

/** A labelled select whose options can be renewed without losing the focus. */
class Choice {
  constructor(label, choose) {
    this.select = make("select", { onchange: () => choose(this.select.value) });
    this.node = make("label", { class: "choice" }, make("span", {}, label), this.select);
    this.shown = "";
  }

  /** Shows `options`, pairs of value and text, with one chosen; hides itself where there is no choice. */
  update(options, chosen, { always = false } = {}) {
    const wanted = JSON.stringify(options);
    if (wanted !== this.shown) {
      this.shown = wanted;
      this.select.replaceChildren(...options.map(([value, text]) => make("option", { value }, text)));
    }
    this.select.value = chosen;
    this.node.hidden = options.length < (always ? 1 : 2);
  }
}

/** Buttons of which exactly one is pressed. */
class Segments {
  constructor(label, options, choose) {
    this.buttons = options.map(([value, text]) =>
      make("button", { type: "button", value, onclick: () => choose(value) }, text),
    );
    this.node = make("div", { class: "segments", role: "group", "aria-label": label }, this.buttons);
  }

  update(chosen) {
    for (const button of this.buttons) button.setAttribute("aria-pressed", String(button.value === chosen));
  }
}

/** A grey image from the base64 of its bytes, or null where they do not fit. */
function makeImage(thumbnail, [height, width], name) {
  let bytes;
  try {
    bytes = atob(thumbnail);
  } catch {
    return null;
  }
  if (bytes.length !== height * width) return null;
  const canvas = make("canvas", { width, height, role: "img", "aria-label": name, title: name });
  const context = canvas.getContext("2d");
  const image = context.createImageData(width, height);
  for (let place = 0; place < bytes.length; place += 1) {
    image.data.fill(bytes.charCodeAt(place), 4 * place, 4 * place + 3);
    image.data[4 * place + 3] = 255;
  }
  context.putImageData(image, 0, 0);
  return canvas;
}
