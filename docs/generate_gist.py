"""Writes the picture and the table of options of docs/gist.md; a test fails if they are stale.

The picture is a worked case: sixty gradients of two numbers each, of which a store keeps five.
"""

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedkeep.config.reference import keys_of
from fedkeep.core.gist import Gist, GistOptions, StoredGradients
from fedkeep.core.gradients import GradientAccumulator
from fedkeep.core.gradients.layout import whole_layout
from fedkeep.core.types import FloatArray, Vector

PAGE = Path(__file__).with_name("gist.md")
FIGURE = Path(__file__).parent / "figures" / "gist.svg"
OPTIONS = re.compile(r"(?<=<!-- options -->\n).*?(?=<!-- end of options -->)", re.DOTALL)
ARRIVALS, KEPT, SEED = 60, 5, 47
WIDTH, HEIGHT, PANEL, SCALE = 780, 330, 250, 42.0
STYLE = (
    "text{font:13px sans-serif;fill:#333}"
    ".head{font-weight:bold;font-size:14px}.small{font-size:12px}"
    ".gone{fill:#999;fill-opacity:.45}.ghost{fill:none;stroke:#999;stroke-opacity:.5}"
    ".kept{fill:#268bd2}"
    ".store{fill:#268bd2;stroke:#fff}.gist{fill:#d33682;stroke:#fff}"
    ".truth{fill:none;stroke:#d33682;stroke-width:2}"
    ".corrected{fill:#859900;stroke:#fff}.add{stroke:#d33682;stroke-width:2.5;fill:none}"
    ".tip{fill:#d33682}"
    ".way{stroke:#999;stroke-width:1.5;fill:none}.waytip{fill:#999}"
    ".box{fill:none;stroke:#999;stroke-opacity:.6}"
    "@media(prefers-color-scheme:dark){text{fill:#ddd}}"
)
TITLE = (
    "Five of sixty samples are stored; the mean gradient of all sixty corrects the next step "
    "on the five"
)


class Given:
    """Measurements whose gradients are given, (n, P)."""

    def __init__(self, gradients: FloatArray) -> None:
        self._gradients = gradients

    def weighted_gradient(self, weights: FloatArray) -> Vector:
        mean: Vector = (weights @ self._gradients / len(weights)).astype(np.float32)
        return mean

    def mean_gradient(self) -> Vector:
        return self.weighted_gradient(np.ones(len(self._gradients)))

    def inner(self, other: "Given") -> FloatArray:
        products: FloatArray = (self._gradients * other._gradients).sum(axis=1)
        return products

    def norms(self) -> FloatArray:
        return np.sqrt(self.inner(self))


@dataclass(frozen=True)
class Case:
    """Every arrival's gradient under the old and the new model, and the gist's correction."""

    old: FloatArray
    new: FloatArray
    correction: FloatArray

    @property
    def stored_mean(self) -> tuple[FloatArray, FloatArray]:
        return self.old[:KEPT].mean(axis=0), self.new[:KEPT].mean(axis=0)


def case() -> Case:
    """The first samples are the kept ones; the new model moves all gradients, not quite alike."""
    rng = np.random.default_rng(SEED)
    old = rng.standard_normal((ARRIVALS, 2))
    new = 0.9 * old + np.array([0.35, -0.25]) + 0.3 * rng.standard_normal((ARRIVALS, 2))
    window = GradientAccumulator(2, 1)
    window.add(Given(old), np.zeros(ARRIVALS, dtype=np.int64))  # type: ignore[arg-type]
    holding = (np.full(KEPT, 1 / KEPT), np.zeros(KEPT, dtype=np.int64), np.ones(KEPT, dtype=bool))
    kept = StoredGradients(*holding, Given(old[:KEPT]), Given(new[:KEPT]))  # type: ignore[arg-type]
    correction = Gist(GistOptions("local", label_matching=False), whole_layout(2), 1).correct(
        kept, window, np.ones(1), None, np.ones(2, dtype=np.float32)
    )
    assert correction.vector is not None
    return Case(old, new, correction.vector.astype(np.float64))


def picture() -> str:
    """The whole picture."""
    box = f'viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}"'
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" {box} role="img">'
    tips = "".join(
        f'<marker id="{name}" viewBox="0 0 8 8" refX="7" refY="4"'
        ' markerWidth="4.5" markerHeight="4.5" orient="auto">'
        f'<path class="{name}" d="M0 0L8 4L0 8z"/></marker>'
        for name in ("tip", "waytip")
    )
    worked = case()
    parts = [f"<title>{TITLE}</title>", f"<style>{STYLE}</style>", f"<defs>{tips}</defs>"]
    parts += [*_stream(), *_before(worked), *_after(worked)]
    return "\n".join([opening, *parts, "</svg>\n"])


def _stream() -> list[str]:
    """Panel 1: what comes, what is kept, what counts."""
    kept = set(np.random.default_rng(SEED).choice(ARRIVALS, KEPT, replace=False).tolist())
    signs = ["kept" if i in kept else "gone" for i in range(ARRIVALS)]
    dots = [
        f'<circle class="{sign}" cx="{33 + 17 * (i % 12)}" cy="{84 + 15 * (i // 12)}" r="5"/>'
        for i, sign in enumerate(signs)
    ]
    slots = [f'<circle class="kept" cx="{39 + 15 * i}" cy="240" r="5"/>' for i in range(KEPT)]
    return [
        *_words(0, "1. Samples arrive", f"{ARRIVALS} of them, and {KEPT} slots"),
        *dots,
        *(f'<path class="way" d="M{x} 158V216" marker-end="url(#waytip)"/>' for x in (69, 185)),
        f'<text class="small" x="62" y="192" text-anchor="end">{KEPT} stored</text>',
        f'<text class="small" x="178" y="192" text-anchor="end">all {ARRIVALS} counted</text>',
        '<rect class="box" x="25" y="226" width="88" height="28" rx="5"/>',
        *slots,
        _diamond(185, 240, "gist"),
        '<text x="69" y="276" text-anchor="middle">the store</text>',
        '<text x="185" y="276" text-anchor="middle">the gist:</text>',
        '<text class="small" x="185" y="293" text-anchor="middle">their mean gradient</text>',
        '<text class="small" x="69" y="293" text-anchor="middle">'
        f"{ARRIVALS - KEPT} discarded</text>",
    ]


def _before(worked: Case) -> list[str]:
    """Panel 2: how far the store is off under the model that the device has."""
    store, _ = worked.stored_mean
    whole = worked.old.mean(axis=0)
    return [
        *_words(1, "2. The store's error", "gradients under the old model"),
        *_cloud(1, worked.old, "gone"),
        _arrow(1, store, whole),
        _square(*_at(1, store)),
        _diamond(*_at(1, whole), "gist"),
        *_legend(1, _square(0, 0), "mean of the five", _diamond(0, 0, "gist"), "mean of all sixty"),
    ]


def _after(worked: Case) -> list[str]:
    """Panel 3: the same arrow, a little shorter, under the model that comes next."""
    _, store = worked.stored_mean
    return [
        *_words(2, "3. Correct the step", "gradients under the new model"),
        *_cloud(2, worked.new, "ghost"),
        _diamond(*_at(2, worked.new.mean(axis=0)), "truth"),
        _arrow(2, store, store + worked.correction),
        _square(*_at(2, store)),
        _circle(*_at(2, store + worked.correction)),
        *_legend(
            2,
            _circle(0, 0),
            "the five, corrected",
            _diamond(0, 0, "truth"),
            "mean of all sixty",
        ),
    ]


def _words(panel: int, head: str, below: str) -> list[str]:
    x = 20 + panel * (PANEL + 10)
    return [
        f'<text class="head" x="{x}" y="24">{head}</text>',
        f'<text class="small" x="{x}" y="44">{below}</text>',
    ]


def _legend(panel: int, first: str, what: str, second: str, other: str) -> list[str]:
    x = 34 + panel * (PANEL + 10)
    return [
        line
        for y, sign, text in ((292, first, what), (314, second, other))
        for line in (
            f'<g transform="translate({x} {y - 4})">{sign}</g>',
            f'<text class="small" x="{x + 16}" y="{y}">{text}</text>',
        )
    ]


def _cloud(panel: int, gradients: FloatArray, others: str) -> list[str]:
    """All gradients, those of kept samples last and in their own colour."""
    signs = [*([("kept", g) for g in gradients[:KEPT]]), *((others, g) for g in gradients[KEPT:])]
    return [
        f'<circle class="{sign}" cx="{x:.1f}" cy="{y:.1f}" r="4"/>'
        for sign, gradient in reversed(signs)
        for x, y in (_at(panel, gradient),)
    ]


def _at(panel: int, gradient: FloatArray) -> tuple[float, float]:
    x, y = gradient
    return 20 + panel * (PANEL + 10) + PANEL / 2 - 10 + SCALE * float(x), 162 - SCALE * float(y)


def _arrow(panel: int, start: FloatArray, end: FloatArray) -> str:
    (x, y), (to_x, to_y) = _at(panel, start), _at(panel, end)
    short = 1 - 8 / float(np.hypot(to_x - x, to_y - y))  # of the sign that stands at its end
    to_x, to_y = x + short * (to_x - x), y + short * (to_y - y)
    return f'<path class="add" d="M{x:.1f} {y:.1f}L{to_x:.1f} {to_y:.1f}" marker-end="url(#tip)"/>'


def _square(x: float, y: float) -> str:
    return f'<rect class="store" x="{x - 5:.1f}" y="{y - 5:.1f}" width="10" height="10"/>'


def _circle(x: float, y: float) -> str:
    return f'<circle class="corrected" cx="{x:.1f}" cy="{y:.1f}" r="6"/>'


def _diamond(x: float, y: float, sign: str) -> str:
    return f'<path class="{sign}" d="M{x:.1f} {y - 7:.1f}l7 7l-7 7l-7 -7z"/>'


def options() -> str:
    """The table of options, as the dataclass has them."""
    rows = [
        f"| `{key.name}` | {key.takes} | {key.default} | {key.text} |"
        for key in keys_of(GistOptions)
    ]
    return "\n".join(["", "| key | takes | default | |", "|---|---|---|---|", *rows, "", ""])


def page(text: str) -> str:
    """The page with its table of options as it should be."""
    return OPTIONS.sub(lambda _: options(), text)


if __name__ == "__main__":
    FIGURE.write_text(picture(), encoding="utf-8")
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
