"""Replies of any Flower app as reports of the core, and back: what the robust stages work on."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict

from fedkeep.core.errors import RejectedError, RejectionReason
from fedkeep.core.types import AnyArray, Report, Vector

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
"""What layers count and do not learn: no part of an update."""
_MOST_NAMED = 3
"""Differences of a reply that its rejection names."""


class ModelLayout:
    """Which arrays of a model's record are its parameters, and their place in a flat vector.

    Parameters
    ----------
    arrays : ArrayRecord
        The global model as the inner strategy sends it. Arrays of integers and running statistics
        of layers are no parameters.

    Examples
    --------
    >>> weight, bias = np.ones((2, 2), np.float32), np.zeros(1, np.float32)
    >>> record = ArrayRecord({"w": Array(weight), "b": Array(bias)})
    >>> layout = ModelLayout(record)
    >>> layout.flatten(record).tolist()
    [1.0, 1.0, 1.0, 1.0, 0.0]
    >>> layout.write(record, np.full(5, 3.0, np.float32))
    >>> record["b"].numpy().tolist()
    [3.0]
    """

    def __init__(self, arrays: ArrayRecord) -> None:
        found = {name: array.numpy() for name, array in arrays.items()}
        self._forms = {name: (array.shape, array.dtype) for name, array in found.items()}
        self._parameters = [name for name, array in found.items() if _is_parameter(name, array)]

    @property
    def has_parameters(self) -> bool:
        """Whether any array of the model is trained."""
        return bool(self._parameters)

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shapes of the parameters, in the order in which they are flattened."""
        return [tuple(self._forms[name][0]) for name in self._parameters]

    def fits(self, record: ArrayRecord) -> bool:
        """Say whether a record has the arrays of this model."""
        return set(record) == set(self._forms)

    def flatten(self, record: ArrayRecord) -> Vector:
        """Return the parameters of a record as one vector.

        Raises
        ------
        RejectedError
            If an array has another shape than the model's, or integers for floats, or running
            statistics are not finite.
        """
        if not self.fits(record):
            raise RejectedError(
                RejectionReason.MODEL_SHAPE, f"expected the arrays {sorted(self._forms)[:5]}"
            )
        found: dict[str, AnyArray] = {}
        for name, (shape, dtype) in self._forms.items():
            try:
                array = found[name] = record[name].numpy()
            except (TypeError, ValueError) as error:
                raise RejectedError(RejectionReason.MALFORMED, f"{name}: {error}") from error
            if array.shape != shape:
                raise RejectedError(
                    RejectionReason.MODEL_SHAPE, f"{name}: expected {shape}, got {array.shape}"
                )
            # Strategies that merge in float64 send that; a torch model replies in its own float32.
            floats = np.issubdtype(dtype, np.floating) and np.issubdtype(array.dtype, np.floating)
            if array.dtype != dtype and not floats:
                raise RejectedError(
                    RejectionReason.MODEL_DTYPE, f"{name}: expected {dtype}, got {array.dtype}"
                )
            if np.issubdtype(dtype, np.floating) and not np.isfinite(array).all():
                raise RejectedError(
                    RejectionReason.MODEL_NOT_FINITE, f"{name} holds NaN or infinity"
                )
        parts = [found[name].ravel().astype(np.float32) for name in self._parameters]
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.float32)

    def write(self, record: ArrayRecord, vector: Vector) -> None:
        """Write a vector into the parameters of a record."""
        start = 0
        for name in self._parameters:
            shape, dtype = self._forms[name]
            end = start + int(np.prod(shape, dtype=np.int64))
            values = vector[start:end].reshape(shape)
            record[name] = Array(np.ascontiguousarray(values, dtype=dtype))
            start = end


class ReplyUpdate:
    """The update in one reply: its model and its weight.

    Parameters
    ----------
    reply : Message
        A reply with one record of arrays.
    layout : ModelLayout
        The model's form.
    weight_key : str
        The metric by which the inner strategy weighs replies.
    """

    def __init__(self, reply: Message, layout: ModelLayout, weight_key: str) -> None:
        self._layout = layout
        self.arrays: ArrayRecord = next(iter(reply.content.array_records.values()))
        self._metrics: MetricRecord | None = next(
            (m for m in reply.content.metric_records.values() if weight_key in m), None
        )
        self._key = weight_key

    def report(self, round_: int) -> Report:
        """Return the reply as a report without a local gradient.

        Raises
        ------
        RejectedError
            If it is not of the model's form, or its weight is no number.
        """
        weight: Any = 1.0 if self._metrics is None else self._metrics[self._key]
        if not isinstance(weight, int | float):
            raise RejectedError(
                RejectionReason.BAD_WEIGHT, f"{self._key} must be one number, not {weight!r}"
            )
        return Report(round_, self._layout.flatten(self.arrays), float(weight), 1, 1, None)

    def replace(self, before: Report, after: Report) -> None:
        """Write into the reply what changed of its report; the rest stays as it came."""
        if after.model is not before.model:
            self._layout.write(self.arrays, after.model)
        if self._metrics is not None and after.weight != before.weight:
            self._metrics[self._key] = after.weight


def updates_in(
    replies: list[Message], layout: ModelLayout, weight_key: str
) -> Mapping[int, ReplyUpdate]:
    """Return the updates of the replies by their nodes.

    Empty if most replies hold something else than the model: an app that trains a part of it. Empty
    also where the model has no parameters: boosted trees travel as bytes of any length.
    """
    if not layout.has_parameters:
        return {}
    sent = [reply for reply in replies if not reply.has_error()]
    updates = {
        reply.metadata.src_node_id: ReplyUpdate(reply, layout, weight_key)
        for reply in sent
        if len(reply.content.array_records) == 1
    }
    fitting = sum(layout.fits(update.arrays) for update in updates.values())
    return updates if 2 * fitting > len(sent) else {}


def odd_ones(replies: list[Message]) -> dict[int, str]:
    """Find the replies whose records are not those of most, as strategies want them all alike.

    Returns
    -------
    dict of int to str
        By node, what differs; empty if no form is that of more than half.
    """
    forms = {r.metadata.src_node_id: _form(r.content) for r in replies if not r.has_error()}
    counted = Counter(forms.values()).most_common(1)
    if not counted or 2 * counted[0][1] <= len(forms):
        return {}
    [(usual, _)] = counted
    differing = {node: form for node, form in forms.items() if form != usual}
    words = {
        node: (_words("it lacks", usual - form), _words("it alone has", form - usual))
        for node, form in differing.items()
    }
    return {node: "; ".join(filter(None, said)) for node, said in words.items()}


_Form = frozenset[tuple[str, str]]
"""What a reply holds: each array and metric by its record and name, with lists' lengths."""


def _form(content: RecordDict) -> _Form:
    arrays = {(record, key) for record, found in content.array_records.items() for key in found}
    metrics = {
        (record, f"{key}, {len(value)} numbers" if isinstance(value, list) else key)
        for record, found in content.metric_records.items()
        for key, value in found.items()
    }
    return frozenset(arrays | metrics)


def _words(lead: str, form: _Form) -> str:
    """Name up to three parts of a reply."""
    found = [f"'{key}' in '{record}'" for record, key in sorted(form)]
    return f"{lead} {', '.join(found[:_MOST_NAMED])}" if found else ""


def _is_parameter(name: str, array: AnyArray) -> bool:
    counted = name.rpartition(".")[2] in STATISTICS
    return np.issubdtype(array.dtype, np.floating) and not counted
