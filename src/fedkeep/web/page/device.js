"use strict";
// One device: what is in its slots, and what came and went.

const FATES = {
  kept: ["+", "kept in a free slot"],
  replaced: ["⇄", "kept"],
  refreshed: ["↻", "value renewed"],
  refused: ["×", "refused"],
};

class DevicePane {
  constructor(chooseDevice) {
    this.choice = new Choice("Device", (value) => chooseDevice(Number(value)));
    this.summary = make("p", { class: "quiet" });
    this.slots = make("div", { class: "scroll slots", tabindex: 0, role: "region", "aria-label": "Slots" });
    this.changes = make("ol", { class: "changes" });
    this.node = make(
      "div",
      {},
      make("div", { class: "pane-head" }, make("h3", {}, "One device"), this.choice.node),
      this.summary,
      this.slots,
      make("h4", {}, "Came and went"),
      this.changes,
    );
  }

  update(view, device, snapshot) {
    const options = view.snapshots.map(([number]) => [String(number), String(number)]);
    const known = view.snapshots.some(([number]) => number === device);
    if (!known && device != null) options.unshift([String(device), `${device} (no snapshot)`]);
    this.choice.update(options, String(device), { always: true });
    this.slots.hidden = !snapshot;
    if (!snapshot) {
      this.summary.textContent = known ? "Loading…" : "This run recorded no snapshot of this device.";
      this.changes.replaceChildren();
      return;
    }
    const filled = plural(snapshot.slots.length, "sample", "samples");
    const slots = plural(snapshot.capacity, "slot", "slots");
    this.summary.textContent = `${filled} in ${slots}, as of round ${snapshot.round}`;
    this.slots.replaceChildren(
      snapshot.slots.length ? this.table(view, snapshot) : make("p", { class: "quiet" }, "The store is empty."),
    );
    this.changes.replaceChildren(...this.history(view, snapshot));
  }

  table(view, { slots }) {
    const images = view.image && slots.some((slot) => slot.thumbnail);
    const meaningful = scoresMeanSomething(view.config);
    const largest = Math.max(...slots.map((slot) => Math.abs(slot.score ?? 0)), 1e-12);
    const ranks = ranksOf(slots);
    const bars = slots.map((slot, place) =>
      meaningful ? (slot.score ?? 0) / largest : (slots.length - ranks[place] + 1) / slots.length,
    );
    const heads = ["Sample", "Label", meaningful ? "Value" : "Rank", "Age", "Used"];
    const head = heads.map((name, place) =>
      make("th", { scope: "col", class: place > 2 ? "number" : null }, name),
    );
    return make(
      "table",
      {},
      make("thead", {}, make("tr", {}, head)),
      make(
        "tbody",
        {},
        slots.map((slot, place) =>
          this.row(view, slot, bars[place], meaningful ? formatNumber(slot.score) : `${ranks[place]}.`, images),
        ),
      ),
    );
  }

  row(view, slot, length, value, images) {
    const label = labelName(view, slot.label);
    const bar = make("i", { class: length < 0 ? "bar negative" : "bar" });
    bar.style.width = `${56 * Math.abs(length)}px`;
    const image =
      images && slot.thumbnail ? makeImage(slot.thumbnail, view.image, `sample ${slot.id}, ${label}`) : null;
    return make(
      "tr",
      {},
      make("td", { class: "sample" }, image, make("span", {}, `#${slot.id}`)),
      make("td", {}, slot.target == null ? label : `${formatNumber(slot.target)} (${label})`),
      make("td", {}, make("span", { class: "value", title: `key ${formatNumber(slot.score)}` }, bar, value)),
      make("td", { class: "number" }, formatCount(slot.age)),
      make("td", { class: "number" }, `${slot.uses ?? 0}×`),
    );
  }

  history(view, { changes = [] }) {
    if (!changes.length) return [make("li", { class: "quiet" }, "No arrivals are recorded.")];
    return [...changes].reverse().map((change) => {
      const [sign, words] = Object.hasOwn(FATES, change.fate) ? FATES[change.fate] : ["?", change.fate];
      const instead = change.displaced == null ? "" : ` for #${change.displaced}`;
      return make(
        "li",
        { class: Object.hasOwn(FATES, change.fate) ? change.fate : null },
        make("b", { "aria-hidden": "true" }, sign),
        make("span", {}, `#${change.id} ${labelName(view, change.label)}`),
        make("span", { class: "quiet" }, `${words}${instead}`),
        change.score != null &&
          scoresMeanSomething(view.config) &&
          make("span", { class: "number" }, formatNumber(change.score)),
      );
    });
  }
}

/** Whether a policy's scores say something by themselves; random keys and arrival numbers only order samples. */
function scoresMeanSomething(config) {
  const name = JSON.parse(config["policy.name"] ?? '""');
  if (name === "ode") return config["policy.choice"] !== '"drawn"';
  return !["fifo", "reservoir", "balanced-reservoir", "draw", "full-data", "central"].includes(name);
}

/** The place of each slot by its score: the first is the last to go. */
function ranksOf(slots) {
  const order = slots.map((slot) => slot.score ?? Number.NEGATIVE_INFINITY);
  return order.map((score) => 1 + order.filter((other) => other > score).length);
}

/** A label in words: one that is called by a number, or by nothing, is "label 3". */
function labelName(view, label) {
  const name = view.labels[label] ?? String(label);
  return /^\d+$/.test(name) ? `label ${name}` : name;
}
