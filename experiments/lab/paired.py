"""Two methods over many tasks: how often one is ahead, by how much, and whether that is chance.

Tasks of one data set are variants of each other (shuffled, in time order, with fewer slots), and
seeds vary still less: so the unit of the test is the data set, with the mean difference of its
tasks.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from scipy.stats import wilcoxon

from fedkeep.core.seeds import generator
from fedkeep.tables import Table

_DRAWS = 10_000
FEWEST = 5
"""With fewer data sets nothing is said."""
_VARIANTS = {"ordered", "once", "bursts", "drift", "converging", "all", "labels", "3", "5"}
"""What the names of tasks say of how a data set is used."""


class PairedTest(NamedTuple):
    """One method against another over tasks."""

    tasks: int
    ahead: int
    """Tasks on which the mean difference is above 0."""
    data_sets: int
    data_sets_ahead: int
    mean: float
    """The mean over data sets of the differences, in points."""
    low: float
    """The ends of its 95 % interval: the bootstrap's, by drawing data sets."""
    high: float
    p: float
    """Of the Wilcoxon signed-rank test over data sets, two-sided."""


def data_set(task: str) -> str:
    """Give the data set of a task of the arena.

    Examples
    --------
    >>> data_set("uji-indoor-5-ordered"), data_set("st-all-labels"), data_set("tc-real")
    ('uji-indoor', 'st', 'tc-real')
    """
    return "-".join(part for part in task.split("-") if part not in _VARIANTS)


def paired_test(differences: Mapping[str, float]) -> PairedTest | None:
    """Test a difference a task; None of fewer than `FEWEST` data sets.

    Examples
    --------
    >>> found = paired_test({"a": 1.0, "a-once": 2.0, "b": 0.5, "c": 3.0, "d": 0.8, "e": -0.2})
    >>> found.tasks, found.ahead, found.data_sets, found.data_sets_ahead, round(found.mean, 2)
    (6, 5, 5, 4, 1.12)
    """
    sets: dict[str, list[float]] = {}
    for task, found in differences.items():
        sets.setdefault(data_set(task), []).append(found)
    if len(sets) < FEWEST:
        return None
    means = np.array([np.mean(own) for own in sets.values()])
    rng = generator(0, "bootstrap", len(means))
    drawn = rng.choice(means, (_DRAWS, len(means))).mean(axis=1)
    low, high = np.quantile(drawn, (0.025, 0.975)).tolist()
    return PairedTest(
        len(differences),
        sum(found > 0 for found in differences.values()),
        len(means),
        int((means > 0).sum()),
        float(means.mean()),
        low,
        high,
        float(wilcoxon(means).pvalue) if means.any() else 1.0,
    )


def differences(arena: Table, one: str, other: str, key: str) -> dict[str, float]:
    """How far `one` is from `other` by task, where both ran; `key` is `own_rate` or `shared_rate`.

    `arena` is results/arena.json.
    """
    return {
        task: float(rows[one][key][0]) - float(rows[other][key][0])
        for task, rows in arena.items()
        if all(rows.get(method, {}).get(key) for method in (one, other))
    }
