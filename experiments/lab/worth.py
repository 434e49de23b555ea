"""What a byte buys: accuracy against the bytes a device keeps, and the FIFO store that a gist is worth."""

from __future__ import annotations

import math
from typing import Any

from fedkeep.core.encoding import SCALE_BYTES, SampleCodec
from fedkeep.sim.assembly import build_learner, load_data
from fedkeep.sim.experiment import Experiment
from lab.findings import FIFO, Findings, summed

_FLOAT, _BLOCK = 4, 64
"""Bytes of a number in full, and numbers that share a scale in int8."""


def bytes_table(found: Findings) -> dict[str, Any]:
    """By task and method: [bytes at rest, slots, accuracy, half of its interval], smallest first; and the worth."""
    table: dict[str, Any] = {}
    for stage in found.programme.stages:
        for row in found.programme.rows(stage):
            runs = found.runs(row)
            accuracy = summed(curve.final for curve in runs.values())
            if accuracy is not None:
                at_rest = max(curve.bytes_at_rest for curve in runs.values())
                point = [at_rest, found.experiment(row).storage.capacity, *accuracy]
                table.setdefault(row.task, {}).setdefault(row.method, []).append(point)
    for task, methods in table.items():
        methods["worth"] = {m: _worth(points, methods.get(FIFO, [])) for m, points in methods.items() if "gist" in m}
        table[task] = dict(methods)
    return table


def bytes_at_rest(experiment: Experiment) -> int:
    """The stored samples and the gist as they are kept; the model is on every device anyway."""
    data = load_data(experiment.task, experiment.seed)
    codec = SampleCodec(data.sample_shape, encoding=experiment.stream.encoding)
    samples = experiment.storage.capacity * codec.nbytes
    samples += SCALE_BYTES * math.prod(data.sample_shape) if codec.quantised else 0
    gist = experiment.resolved().get("gist", {"name": "none"})
    if gist["name"] == "none":
        return samples
    return samples + vector_bytes(build_learner(experiment, data).gradient_size, gist["encoding"])


def vector_bytes(numbers: int, encoding: str) -> int:
    """A vector in this encoding."""
    if encoding == "int8":
        return numbers + _FLOAT * math.ceil(numbers / _BLOCK)
    return numbers * (_FLOAT if encoding == "float32" else _FLOAT // 2)


def _worth(points: list[list[Any]], fifo: list[list[Any]]) -> dict[str, int | None]:
    """By slots under a gist: the smallest FIFO store that is as accurate; None where no size that was tried is."""
    return {
        str(slots): min((point[1] for point in fifo if point[2] >= accuracy), default=None)
        for _, slots, accuracy, _ in points
    }
