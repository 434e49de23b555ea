"""Labels by their names: `"y": "ok"` where `[samples] names` lists them."""

from collections.abc import Sequence
from dataclasses import replace

from fedkeep.agent.arrivals import Arrival


class LabelNames:
    """Translates the labels of arrivals from names to numbers.

    Without names, labels are numbers already and stay as they are. With names, a label is its
    name; a whole number stands for the name of its digits. A label that is not among the names
    becomes -1, which is rejected like any other unknown label; no label stays none.

    Parameters
    ----------
    names : sequence of str
        The names in the order of their numbers; empty: labels are numbers.

    Examples
    --------
    >>> labels = LabelNames(["ok", "worn"])
    >>> [labels.numbered(Arrival([1.0], y, None, "pump")).y for y in ("worn", "broken")]
    [1, -1]
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._numbers = {name: number for number, name in enumerate(names)}

    def numbered(self, arrival: Arrival) -> Arrival:
        """Return the arrival with the number of its label."""
        if not self._numbers or arrival.y is None:
            return arrival
        label = arrival.y
        if isinstance(label, float) and label.is_integer():
            label = int(label)
        is_name = isinstance(label, str | int) and not isinstance(label, bool)
        return replace(arrival, y=self._numbers.get(str(label), -1) if is_name else -1)
