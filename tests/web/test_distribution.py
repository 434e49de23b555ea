"""The picture of a federation is well-formed SVG that shows the right bars."""

import re
from xml.etree import ElementTree

import numpy as np

from fedkeep.data import Federation, ModelSpec, Ownership
from fedkeep.data.synthetic import Synthetic
from fedkeep.web.distribution import distribution_svg

SVG = "{http://www.w3.org/2000/svg}"


def toy(counts: list[list[int]], names: tuple[str, ...]) -> Federation:
    table = np.array(counts)
    y = np.concatenate([np.repeat(np.arange(table.shape[1]), row) for row in table])
    members = Ownership.from_assignment(np.repeat(np.arange(len(table)), table.sum(axis=1)), len(table))
    nothing = Ownership.from_assignment(np.full(len(y), -1), len(table))
    return Federation("a <b>", np.zeros((len(y), 1)), y, members, nothing, names, ModelSpec("softmax"))


def bars(svg: str) -> list[list[float]]:
    """The heights of the bars of every filled path."""
    paths = [p.get("d", "") for p in ElementTree.fromstring(svg).iter(f"{SVG}path") if p.get("fill")]
    edge = re.compile(r"M[\d.]+ ([\d.]+)h[\d.]+V([\d.]+)h")
    return [[float(bottom) - float(top) for bottom, top in edge.findall(path)] for path in paths]


def test_bars_are_sorted_and_stand_for_sizes_and_shares() -> None:
    svg = distribution_svg(toy([[5, 0], [10, 30]], ("one & two", "three")))
    sizes, first_label, second_label = bars(svg)
    assert round(sizes[0] / sizes[1]) == 8
    np.testing.assert_allclose(first_label, [52.5, 210], atol=0.11)
    np.testing.assert_allclose(second_label, [157.5], atol=0.11)
    texts = [t.text or "" for t in ElementTree.fromstring(svg).iter(f"{SVG}text")]
    assert "one & two" in texts
    assert any(text.startswith("2 devices, 2 labels, 45 training and 0 test samples") for text in texts)


def test_a_large_fleet_with_many_labels_stays_a_small_picture() -> None:
    fleet = Synthetic(devices=3000, labels=50, features=3, smallest=5, largest=60).load(seed=0)
    svg = distribution_svg(fleet)
    assert len(svg) < 200_000
    texts = [t.text or "" for t in ElementTree.fromstring(svg).iter(f"{SVG}text")]
    assert "devices, from the largest to the smallest (220 of 3,000 shown)" in texts
    assert "and 31 more" in texts
