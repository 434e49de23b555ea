"""Each method at its own learning rate, chosen on seeds that are not reported.

A method that takes longer steps gains from a rate that is too small for the others, so one rate for
all can decide a comparison. The rule: a third, one, three and ten times the task's rate, two seeds
set apart, and the rate with the best mean accuracy over the last five evaluations; of equal ones
the smallest.
"""

from collections.abc import Iterable, Sequence
from statistics import fmean

from fedkeep.records import Run
from fedkeep.records.measures import late_accuracy
from fedkeep.tables import Table, merged

FACTORS = (1 / 3, 1.0, 3.0, 10.0)
_APART = 1000
"""How far the seeds of the choice lie above the reported ones."""


def rate_experiment(experiment: Table, rate: float, reported: Sequence[int]) -> Table:
    """Return the experiment that tries every method at every rate.

    Parameters
    ----------
    experiment : Table
        What will be reported, with its methods.
    rate : float
        The task's learning rate.
    reported : sequence of int
        The seeds that will be reported; none of them is used.

    Examples
    --------
    >>> tried = rate_experiment({"task": {"name": "demo"}}, 0.03, reported=[0, 1])
    >>> tried["sweep"]
    {'train.learning_rate': [0.01, 0.03, 0.09, 0.3], 'seed': [1001, 1002]}
    """
    first = max(reported, default=0) + _APART
    rates = [float(f"{rate * factor:.6g}") for factor in FACTORS]
    sweep = {"train.learning_rate": rates, "seed": [first, first + 1]}
    return {**merged(experiment, {}), "sweep": sweep}


def best_rates(runs: Iterable[Run]) -> dict[str, float]:
    """Return the rate of each method, by the rule of this module."""
    reached: dict[str, dict[float, list[float]]] = {}
    for run in runs:
        rate = float(run.header.config["train"]["learning_rate"])
        of_method = reached.setdefault(run.header.method, {})
        of_method.setdefault(rate, []).append(late_accuracy(run.evaluations))
    return {
        method: max(sorted(rates), key=lambda rate: fmean(rates[rate]))
        for method, rates in reached.items()
    }
