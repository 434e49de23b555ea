"""Pictures of a federation as SVG text, without any drawing library: how much each device has, and of what.

Text takes the colour of its surroundings, so a picture fits a light or dark page.
"""

from html import escape

import numpy as np

from fedkeep.core.types import AnyArray, IntArray
from fedkeep.data import Federation

_WIDTH, _LEFT, _PLOT = 920, 64, 660
_TOP, _SIZES, _SHARES, _BETWEEN, _BOTTOM = 56, 150, 210, 46, 46
_MOST_COLUMNS = 220
_MOST_NAMES = 20
_MIDDLE, _FLOOR = _TOP + _SIZES, _TOP + _SIZES + _BETWEEN + _SHARES
_HEIGHT = _FLOOR + _BOTTOM


def distribution_svg(federation: Federation) -> str:
    """Devices from the largest to the smallest: their training samples above, their shares of labels below.

    >>> from fedkeep.data import TASKS
    >>> picture = distribution_svg(TASKS["embedded"](devices=3).load(seed=0))
    >>> "3 devices, 10 labels" in picture, picture.count("<path")
    (True, 19)
    """
    counts = _columns(federation.label_counts)
    some = f" ({len(counts)} of {federation.devices:,} shown)" if len(counts) < federation.devices else ""
    axis = f"devices, from the largest to the smallest{some}"
    size = f'viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img"'
        ' font-family="system-ui, sans-serif" fill="currentColor">'
        f"<title>{escape(federation.name)}: training samples and labels of each device</title>"
        + _text(_LEFT, 24, f"{federation.name}: what each device has", 'font-size="16" font-weight="600"')
        + _text(_LEFT, 43, _summary(federation), 'font-size="12" opacity="0.75"')
        + _size_panel(counts.sum(axis=1))
        + _share_panel(counts)
        + _legend(federation.label_names)
        + _text(_LEFT + _PLOT / 2, _HEIGHT - 14, axis, 'font-size="12" text-anchor="middle"')
        + "</svg>\n"
    )


def _columns(label_counts: IntArray) -> IntArray:
    """The devices by falling size; of very many, evenly spaced ones."""
    order = np.argsort(-label_counts.sum(axis=1), kind="stable")
    if len(order) > _MOST_COLUMNS:
        order = order[np.linspace(0, len(order) - 1, _MOST_COLUMNS).round().astype(np.int64)]
    return label_counts[order]


def _summary(federation: Federation) -> str:
    sizes, owned = federation.train.sizes, (federation.label_counts > 0).sum(axis=1)
    ranges = [(f"{v.min():,}" if v.min() == v.max() else f"{v.min():,} to {v.max():,}") for v in (sizes, owned)]
    return (
        f"{federation.devices:,} devices, {federation.labels} labels, {int(sizes.sum()):,} training and "
        f"{int(federation.test.sizes.sum()):,} test samples; a device has {ranges[0]} samples "
        f"(median {np.median(sizes):,.0f}) of {ranges[1]} labels"
    )


def _size_panel(sizes: IntArray) -> str:
    """Bars above a grid of round numbers from 0 to just above the largest."""
    largest = int(sizes.max())
    unit = 10 ** (len(str(largest)) - 1)
    step = next(s for s in (unit // 5 or 1, unit // 2 or 1, unit, 2 * unit, 5 * unit) if s * 5 >= largest)
    ticks = range(0, largest + step, step)
    scale = _SIZES / ticks[-1]
    grid = "".join(_grid_line(_MIDDLE - tick * scale, f"{tick:,}") for tick in ticks)
    bars = _bars(np.full(len(sizes), float(_MIDDLE)), _MIDDLE - sizes * scale, np.arange(len(sizes)))
    return f'{grid}<path d="{bars}" fill="#4477aa"/>' + _vertical("training samples", _TOP + _SIZES / 2)


def _share_panel(counts: IntArray) -> str:
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    edges = _FLOOR - _SHARES + _SHARES * (1 - np.cumsum(np.pad(shares, ((0, 0), (1, 0))), axis=1))
    drawn = [_grid_line(_FLOOR - _SHARES + _SHARES * (1 - share / 100), f"{share} %") for share in (0, 50, 100)]
    for label in range(counts.shape[1]):
        path = _bars(edges[:, label], edges[:, label + 1], np.flatnonzero(counts[:, label]))
        drawn.append(f'<path d="{path}" fill="{_colour(label, counts.shape[1])}"/>')
    return "".join(drawn) + _vertical("share of labels", _FLOOR - _SHARES / 2)


def _bars(bottoms: AnyArray, tops: AnyArray, columns: IntArray) -> str:
    """One path with a bar per device, which keeps the picture of hundreds of devices small."""
    step = _PLOT / len(tops)
    width = step * (0.86 if step > 4 else 1.0)
    return "".join(f"M{_LEFT + n * step:.1f} {bottoms[n]:.1f}h{width:.1f}V{tops[n]:.1f}h{-width:.1f}z" for n in columns)


def _legend(names: tuple[str, ...]) -> str:
    shown = names if len(names) <= _MOST_NAMES else names[: _MOST_NAMES - 1]
    rows = [*shown, f"and {len(names) - len(shown)} more"] if len(shown) < len(names) else shown
    left, step, drawn = _LEFT + _PLOT + 24, 20, ""
    for n, name in enumerate(rows):
        y = _FLOOR + step * (n - len(rows))
        if n < len(shown):
            fill = _colour(n, len(names))
            drawn += f'<rect x="{left}" y="{y}" width="12" height="12" rx="2" fill="{fill}"/>'
        drawn += _text(left + 18, y + 10.5, name[:22], 'font-size="12"')
    return drawn


def _colour(label: int, labels: int) -> str:
    """Hues all around the circle, neighbours also apart in lightness."""
    return f"hsl({360 * label / labels:.0f} {(62, 48)[label % 2]}% {(46, 66, 56)[label % 3]}%)"


def _grid_line(y: float, name: str) -> str:
    line = f'<path d="M{_LEFT} {y:.1f}h{_PLOT}" stroke="currentColor" stroke-opacity="0.15"/>'
    return line + _text(_LEFT - 8, y + 4, name, 'font-size="11" text-anchor="end"')


def _vertical(words: str, y: float) -> str:
    turned = f'font-size="12" text-anchor="middle" transform="rotate(-90 16 {y:.1f})"'
    return _text(16, y, words, turned)


def _text(x: float, y: float, words: str, attributes: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {attributes}>{escape(words)}</text>'
