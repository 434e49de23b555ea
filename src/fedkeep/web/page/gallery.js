"use strict";
// The kept images of two methods, label by label: what ODE keeps beside what random keeps.

const GALLERY_DEVICES = 12;

class Gallery {
  constructor(chooseSide) {
    this.sides = ["left", "right"].map(
      (side) => new Choice(side === "left" ? "Compare" : "with", (value) => chooseSide(side, value)),
    );
    this.tools = this.sides.map((choice) => choice.node);
    this.node = make("div", {});
  }

  /** `pair`: two of {view, snapshots}; `methods`: those with images. */
  update(methods, pair) {
    const options = methods.map((method) => [method, method]);
    this.sides.forEach((choice, side) => choice.update(options, pair[side].view.method, { always: true }));
    const kept = pair.flatMap(({ snapshots }) =>
      snapshots.flatMap((snapshot) => snapshot.slots.map((slot) => slot.label)),
    );
    const labels = [...new Set(kept)].sort((a, b) => a - b);
    if (!labels.length) {
      this.node.replaceChildren(make("p", { class: "quiet" }, "No images are recorded with these methods yet."));
      return;
    }
    const head = pair.map(({ view, snapshots }) =>
      make(
        "th",
        { scope: "col" },
        view.method,
        make("small", {}, ` ${plural(snapshots.length, "device", "devices")}, seed ${view.seed}, round ${view.round}`),
      ),
    );
    this.node.replaceChildren(
      make(
        "table",
        { class: "gallery" },
        make("caption", { class: "hidden" }, "Kept images by label and method"),
        make("thead", {}, make("tr", {}, make("th", { scope: "col" }, "Label"), head)),
        make(
          "tbody",
          {},
          labels.map((label) => this.row(label, pair)),
        ),
      ),
    );
  }

  row(label, pair) {
    const cells = pair.map(({ view, snapshots }) => {
      const images = snapshots.flatMap(({ device, slots }) =>
        slots
          .filter((slot) => slot.label === label && slot.thumbnail)
          .map((slot) =>
            makeImage(
              slot.thumbnail,
              view.image,
              `${labelName(view, label)}, device ${device}, sample ${slot.id}, value ${formatNumber(slot.score)}`,
            ),
          ),
      );
      return make("td", {}, images.length ? images : make("span", { class: "quiet" }, "none"));
    });
    return make("tr", {}, make("th", { scope: "row" }, labelName(pair[0].view, label)), cells);
  }
}
