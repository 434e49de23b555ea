"""A document as a list of Markdown blocks and pictures, written as Markdown or as one HTML page.

Charts are SVG text, without a drawing library; their text takes the colour of its surroundings.
"""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import NamedTuple, TypeAlias

import markdown as renderer

_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:62rem;margin:2rem auto;padding:0 1rem}"
    "body{color:#222;background:#fff}"
    "table{border-collapse:collapse;margin:1rem 0;font-variant-numeric:tabular-nums;"
    "display:block;overflow-x:auto}"
    "th,td{border-bottom:1px solid #8884;padding:.25rem .6rem;text-align:left;vertical-align:top}"
    "code{font-size:.9em}@media(prefers-color-scheme:dark){body{color:#ddd;background:#181818}}"
)
_INK = "svg{color:#222}@media(prefers-color-scheme:dark){svg{color:#ddd}}"
"""A picture that stands in a page as a file takes no colour from it."""
_WIDTH, _LEAST_HEIGHT = 720, 340
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 236, 34, 42
_LEGEND_LINE = 17
_COLOURS = (
    "#4477aa",
    "#ee6677",
    "#228833",
    "#ccbb44",
    "#66ccee",
    "#aa3377",
    "#7b5c3e",
    "#888888",
    "#cc6600",
    "#3a3a9c",
)


class Picture(NamedTuple):
    name: str
    """A file name without its ending."""
    svg: str
    says: str


Block: TypeAlias = str | Picture


def sheet(columns: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: bool = True) -> str:
    """A table: the first column holds names, the others right-aligned numbers if `numbers`."""
    rule = ["---"] + ["---:" if numbers else "---"] * (len(columns) - 1)
    lines = ([cell.replace("|", "\\|") for cell in line] for line in (columns, rule, *rows))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def markdown(blocks: Iterable[Block], pictures: str) -> str:
    """The document as Markdown; `pictures` is the pictures' folder relative to the document."""
    words = (b if isinstance(b, str) else f"![{b.says}]({pictures}/{b.name}.svg)" for b in blocks)
    return "\n\n".join(words) + "\n"


def html(blocks: Iterable[Block], title: str) -> str:
    """The document as one page that needs nothing else."""
    words = (b if isinstance(b, str) else f"<figure>{b.svg}</figure>" for b in blocks)
    body = renderer.markdown("\n\n".join(words), extensions=["tables"])
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    head += f"<title>{escape(title)}</title><style>{_STYLE}</style>"
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{body}</body></html>\n'


def line_chart(
    title: str, series: Mapping[str, Sequence[tuple[float, float]]], x_name: str, y_name: str
) -> str:
    """One line per series, with a legend; the first series is drawn last, on top."""
    high = max(_LEAST_HEIGHT, _TOP + _LEGEND_LINE * (len(series) + 1))
    points = [point for line in series.values() for point in line]
    x_low, x_high = _range([x for x, _ in points])
    y_low, y_high = _range([y for _, y in points])

    def place(x: float, y: float) -> tuple[float, float]:
        across = _LEFT + (x - x_low) / (x_high - x_low) * (_WIDTH - _LEFT - _RIGHT)
        return across, high - _BOTTOM - (y - y_low) / (y_high - y_low) * (high - _TOP - _BOTTOM)

    parts = [_opened(title, high, _LEFT)]
    for y in _ticks(y_low, y_high):
        left, height = place(x_low, y)
        level = f"M{left:.0f} {height:.1f}H{_WIDTH - _RIGHT}"
        parts.append(f'<path d="{level}" stroke="currentColor" opacity="0.15"/>')
        parts.append(
            f'<text x="{left - 6:.0f}" y="{height + 4:.1f}" text-anchor="end">{y:g}</text>'
        )
    for x in _ticks(x_low, x_high):
        across, floor = place(x, y_low)
        parts.append(
            f'<text x="{across:.1f}" y="{floor + 16:.1f}" text-anchor="middle">{x:g}</text>'
        )
    for number, (name, line) in reversed(list(enumerate(series.items()))):
        parts.append(_line(name, number, [place(x, y) for x, y in line]))
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    parts.append(
        f'<text x="{middle:.0f}" y="{high - 8}" text-anchor="middle">{escape(x_name)}</text>'
    )
    turned = f'transform="rotate(-90 14 {high / 2:.0f})" text-anchor="middle"'
    parts.append(f'<text x="14" y="{high / 2:.0f}" {turned}>{escape(y_name)}</text></svg>\n')
    return "".join(parts)


def _opened(title: str, high: int, left: int) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {high}" width="{_WIDTH}"'
        ' role="img" font-family="system-ui, sans-serif" font-size="11" fill="currentColor">'
        f"<title>{escape(title)}</title>"
        f"<style>{_INK}</style>"
        f'<text x="{left}" y="18" font-size="13" font-weight="600">{escape(title)}</text>'
    )


def _line(name: str, number: int, places: Sequence[tuple[float, float]]) -> str:
    colour = _COLOURS[number % len(_COLOURS)]
    dashes = ' stroke-dasharray="5 3"' if number >= len(_COLOURS) else ""
    path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
    if len(places) == 1:
        path += "m-3 0h6m-3 -3v6"
    left, y = _WIDTH - _RIGHT + 10, _TOP + 10 + _LEGEND_LINE * number
    return (
        f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="1.6"{dashes}/>'
        f'<path d="M{left} {y - 4}h16" stroke="{colour}" stroke-width="2.4"{dashes}/>'
        f'<text x="{left + 21}" y="{y}">{escape(name)}</text>'
    )


def _range(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values, default=0.0), max(values, default=1.0)
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _ticks(low: float, high: float) -> list[float]:
    """Three to six round numbers between the ends."""
    steps = (factor * 10.0**power for power in range(-20, 300) for factor in (1, 2, 5))
    step = next(step for step in steps if (high - low) / step <= 6)
    first = -(-low // step)
    return [
        round((first + k) * step, 12) for k in range(int((high - first * step) / step + 1e-9) + 1)
    ]


def bar_chart(title: str, bars: Mapping[str, float], unit: str) -> str:
    """One horizontal bar per name, with its number; zero is marked, negative bars go left."""
    row, left, right = 22, 190, _WIDTH - 70
    high = _TOP + row * len(bars) + 14
    low, top = min(0.0, *bars.values()), max(1e-9, *bars.values())

    def across(value: float) -> float:
        return left + (value - low) / (top - low) * (right - left)

    parts = [_opened(title, high, 10)]
    for number, (name, value) in enumerate(bars.items()):
        y, start, end = _TOP + row * number, across(min(0.0, value)), across(max(0.0, value))
        colour = _COLOURS[2] if value > 0 else _COLOURS[1]
        parts.append(f'<text x="{left - 8}" y="{y + 13}" text-anchor="end">{escape(name)}</text>')
        size = f'width="{end - start:.1f}" height="15"'
        parts.append(f'<rect x="{start:.1f}" y="{y + 2}" {size} fill="{colour}"/>')
        parts.append(f'<text x="{end + 5:.1f}" y="{y + 13}">{value:.0f}{escape(unit)}</text>')
    zero = f"M{across(0):.1f} {_TOP}V{high - 12}"
    parts.append(f'<path d="{zero}" stroke="currentColor" opacity="0.4"/></svg>\n')
    return "".join(parts)
