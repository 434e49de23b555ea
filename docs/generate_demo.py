"""Writes the README's picture (mean over seeds) and table of `make demo`, from its records.

python docs/generate_demo.py runs/demo
"""

import contextlib
import io
import os
import re
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from fedkeep.cli.report import print_tables
from fedkeep.records import compare, read_runs

README = Path(__file__).parents[1] / "README.md"
TABLE = re.compile(r"(?<=<!-- demo -->\n```text\n).*?(?=```)", re.DOTALL)
FIGURE = Path(__file__).parent / "figures" / "demo.svg"
COLOURS = {
    "full-data": "#888888",
    "gist-shared": "#d33682",
    "gist-local": "#b58900",
    "ode": "#2aa198",
    "balanced-fifo": "#6c71c4",
    "fifo": "#268bd2",
}
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 340, 52, 100, 18, 44
STYLE = (
    "text{font:13px sans-serif;fill:#333}.line{fill:none;stroke-width:2.2;stroke-linejoin:round}"
    ".grid{stroke:#999;stroke-opacity:.3}.gist-shared{stroke-width:3.4}"
    "@media(prefers-color-scheme:dark){text{fill:#ddd}}"
)
Curve = dict[int, float]


def curves(directory: Path) -> dict[str, Curve]:
    """Per method the mean accuracy by round."""
    found: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for run in read_runs(directory):
        for evaluation in run.evaluations:
            found[run.header.method][evaluation.round].append(evaluation.accuracy or 0.0)
    return {
        method: {round_: sum(values) / len(values) for round_, values in sorted(by_round.items())}
        for method, by_round in found.items()
    }


class Axes:
    """Where a round and an accuracy stand in the picture."""

    def __init__(self, lines: Mapping[str, Curve]) -> None:
        self.last = max(max(curve) for curve in lines.values())
        lowest = min(
            min(value for round_, value in curve.items() if round_) for curve in lines.values()
        )
        self.low, self.high = int(lowest * 20) / 20, 1.0

    def x(self, round_: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * round_ / self.last

    def y(self, accuracy: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (self.high - accuracy) / (self.high - self.low)

    def grid(self) -> str:
        parts = []
        for tenth in range(round(self.low * 10 + 0.49), 11):
            y = self.y(tenth / 10)
            parts.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
            parts.append(
                f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{10 * tenth} %</text>'
            )
        for part in range(4):
            x = self.x(self.last * part / 3)
            place = f'x="{x:.1f}" y="{HEIGHT - 22}" text-anchor="middle"'
            parts.append(f"<text {place}>{self.last * part // 3}</text>")
        middle = (LEFT + WIDTH - RIGHT) / 2
        return "\n".join(
            [*parts, f'<text x="{middle}" y="{HEIGHT - 4}" text-anchor="middle">rounds</text>']
        )


def draw(lines: Mapping[str, Curve]) -> str:
    """The whole picture."""
    axes = Axes(lines)
    parts = [axes.grid()]
    labels = _spread({method: axes.y(curve[max(curve)]) for method, curve in lines.items()})
    for method, curve in lines.items():
        points = " ".join(f"{axes.x(r):.1f},{axes.y(a):.1f}" for r, a in curve.items() if r)
        colour = COLOURS.get(method, "#666")
        parts.append(f'<polyline class="line {method}" stroke="{colour}" points="{points}"/>')
        place = f'x="{WIDTH - RIGHT + 6}" y="{labels[method] + 4:.1f}"'
        parts.append(f'<text {place} style="fill:{colour}">{method}</text>')
    box = f'viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}"'
    opening = f'<svg xmlns="http://www.w3.org/2000/svg" {box} role="img">'
    title = "<title>fedkeep demo: accuracy against rounds, mean of three seeds</title>"
    return "\n".join([opening, title, f"<style>{STYLE}</style>", *parts, "</svg>\n"])


def _spread(heights: Mapping[str, float], apart: float = 16.0) -> dict[str, float]:
    """The heights, moved down where names would stand on each other."""
    placed: dict[str, float] = {}
    below = -apart
    for name, height in sorted(heights.items(), key=lambda item: item[1]):
        below = placed[name] = max(height, below + apart)
    return placed


def printed(directory: Path) -> str:
    """The first table as the demo prints it, without its title."""
    os.environ["COLUMNS"] = "100"  # so that no cell is broken into two lines
    with contextlib.redirect_stdout(io.StringIO()) as out:
        print_tables(compare(read_runs(directory)))
    drawn = [line for line in out.getvalue().splitlines(keepends=True) if line[0] in "┏┃┡│└"]
    last = next(place for place, line in enumerate(drawn) if line[0] == "└")
    return "".join(drawn[: last + 1])


def main(directory: Path) -> None:
    FIGURE.parent.mkdir(exist_ok=True)
    FIGURE.write_text(draw(curves(directory)), encoding="utf-8")
    README.write_text(
        TABLE.sub(lambda _: printed(directory), README.read_text(encoding="utf-8"), count=1),
        encoding="utf-8",
    )


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.stderr.write(
            "name the folder that the demo wrote to, "
            "as in: python docs/generate_demo.py runs/demo\n"
        )
        sys.exit(2)
    main(Path(sys.argv[1]))
