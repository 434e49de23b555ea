"""Values of the last layer without torch: ONNX Runtime gives activations and logits, numpy the rest.

With error e = softmax(z) - onehot(y) and activation h, a sample's gradient by the last layer is e (h, 1)^T, so its
projection on a direction (G, b) is e . (G h + b): inference and two small products.

New parameters are put into the file's own bytes, without the onnx library. An ONNX file is a protobuf message:
ModelProto.graph (field 7) holds GraphProto.initializer (field 5), each a TensorProto with dims (1), data_type (2), name
(8) and raw_data (9). ModelProto.metadata_props (field 14) holds pairs of key (1) and value (2).
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from fedkeep.core.errors import DataError, needing
from fedkeep.core.ports import Job
from fedkeep.core.types import AnyArray, Batch, LocalTraining, Scores, Vector
from fedkeep.learn.dense_learner import DenseLearner, DenseTrace
from fedkeep.learn.flat import Layout
from fedkeep.learn.measurements import TracedMeasurements

LAYOUT_KEY = "fedkeep.layout"
INPUTS = ("x", "y", "weight", "bias")
OUTPUTS = ("values", "activations", "logits")
PICKLE_STARTS = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
"""First bytes of files that may run code when they are opened: archives as `torch.save` writes them, and pickles."""
_CHUNK = 256
_FLOAT32 = np.dtype(np.float32)
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_FLOAT = 1


class OnnxMeasurements(TracedMeasurements):
    """What a last linear layer sees in a batch, by its closed form; the session runs once, when it is first asked.

    Asked for projections first, the session gives them with the rest: for a single sample a few calls into numpy would
    cost more than the network itself.
    """

    def __init__(self, probe: "OnnxProbe", batch: Batch) -> None:  # nothing more: this is done for every single sample
        self._probe, self._batch = probe, batch
        self._size, self._n, self._c = probe.head.size, len(batch.y), 0
        self._seen: list[AnyArray] | None = None

    @cached_property
    def _trace(self) -> DenseTrace:  # type: ignore[override]
        return DenseTrace(self._forward, self._batch.y[None])

    def projections(self, direction: Vector) -> Scores:
        if self._seen is not None:
            return super().projections(direction)
        self._seen = self._probe.run(self._batch.x, self._batch.y, direction)
        return self._seen[0][:, 0].astype(np.float64)

    def _forward(self) -> tuple[list[AnyArray], AnyArray]:
        """Input and output of the last layer, as those of one of C models."""
        if self._seen is None:
            self._seen = self._probe.run(self._batch.x, self._batch.y, self._probe.nowhere)
        _, activations, logits = self._seen
        return [activations[None]], logits[None]


class OnnxProbe:
    """A frozen model in an ONNX Runtime session."""

    def __init__(self, data: bytes, shape: tuple[int, ...], head: Layout) -> None:
        self.session = session(data)
        self.head = head
        """The layout of the last layer, which alone is valued."""
        self._shape = shape
        self.nowhere = np.zeros(head.size, dtype=np.float32)
        self._last: tuple[Vector, AnyArray, AnyArray] | None = None

    def measure(self, batch: Batch) -> OnnxMeasurements:
        return OnnxMeasurements(self, batch)

    def run(self, x: AnyArray, y: AnyArray, direction: Vector) -> list[AnyArray]:
        """Projections (n, 1), activations (n, d) and logits (n, classes)."""
        last = self._last
        if last is None or last[0] is not direction:
            weight, bias = self.head.views(direction)
            self._last = last = (direction, weight, bias)
        if x.dtype is not _FLOAT32 or x.shape[1:] != self._shape:
            x = np.ascontiguousarray(x, dtype=np.float32).reshape(-1, *self._shape)
        feed = {"x": x, "y": y[:, None], "weight": last[1], "bias": last[2]}
        found: list[AnyArray] = self.session.run(OUTPUTS, feed)
        return found

    def infer(self, x: AnyArray) -> tuple[AnyArray, AnyArray]:
        """Activations and logits alone."""
        _, activations, logits = self.run(x, np.zeros(len(x), dtype=np.int64), self.nowhere)
        return activations, logits


class OnnxLearner:
    """The architecture of an exported file; it values by the last layer, and trains the last layer only.

    New models go into the file's own bytes. The body of a model is never trained here: that needs torch.
    """

    def __init__(self, path: Path) -> None:
        try:
            data = path.read_bytes()
        except OSError as error:
            raise DataError(f"cannot read the model {path}: {error.strerror}") from error
        if not data or data.startswith(PICKLE_STARTS):
            raise DataError(f"{path} is not an ONNX file but a pickle or an archive: write one by `fedkeep export`")
        self.layout, self._shape = _describe(data, path)
        self._weights = OnnxWeights(data, self.layout)
        outputs, inputs = self.layout.shapes[-2]
        self._head = DenseLearner((inputs, outputs))
        self.size, self.gradient_size = self.layout.size, self._head.size
        self._loaded: tuple[Vector, OnnxProbe] | None = None

    def tail(self, layers: int | None) -> int:
        return self._head.tail(layers)

    def initial(self, seed: int) -> Vector:  # noqa: ARG002 - the file holds the first model
        return self._weights.read()

    def probe(self, model: Vector) -> OnnxProbe:
        if self._loaded is None or self._loaded[0] is not model:
            self._loaded = (model, OnnxProbe(self._weights.replaced(model), self._shape, self._head.layout))
        return self._loaded[1]

    def train(self, model: Vector, job: Job, local: LocalTraining) -> Vector:
        """Softmax regression on the activations, which do not change while the body does not."""
        body = self.size - self._head.size
        activations, _ = self.probe(model).infer(job.batch.x)
        seen = replace(job, batch=Batch(activations, job.batch.y, job.batch.ids))
        return np.concatenate([model[:body], self._head.train(model[body:], seen, local)])

    def logits(self, model: Vector, x: AnyArray) -> AnyArray:
        probe = self.probe(model)
        parts = [probe.infer(x[i : i + _CHUNK])[1] for i in range(0, len(x), _CHUNK)]
        return np.concatenate(parts) if parts else np.empty((0, self.layout.shapes[-1][0]), dtype=np.float32)


class OnnxWeights:
    """The parameters of `layout` inside the bytes of an ONNX file."""

    def __init__(self, data: bytes, layout: Layout) -> None:
        self._data = data
        try:
            found = {name: (kind, *place) for name, kind, place in _initializers(data)}
        except (ValueError, IndexError, UnicodeDecodeError) as error:
            raise DataError(f"this is not an ONNX file: {error}") from error
        self._places = []
        for name, part in zip(layout.names, layout.slices, strict=True):
            kind, start, end = found.get(name, (0, 0, 0))
            if kind != _FLOAT or end - start != 4 * (part.stop - part.start):
                raise DataError(f"the ONNX file does not hold the parameter '{name}': write it by `fedkeep export`")
            self._places.append((start, end, part))

    def read(self) -> Vector:
        """The parameters as they are in the file."""
        parts = [np.frombuffer(self._data[start:end], "<f4") for start, end, _ in self._places]
        return np.concatenate(parts).astype(np.float32)

    def replaced(self, model: Vector) -> bytes:
        """The file with these parameters instead."""
        data = bytearray(self._data)
        for start, end, part in self._places:
            data[start:end] = np.asarray(model[part], dtype="<f4").tobytes()
        return bytes(data)


def session(data: bytes) -> Any:
    """A session that uses one thread and gives memory back: the device has other work."""
    with needing("an ONNX model", "onnx"):
        import onnxruntime
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.enable_cpu_mem_arena = False
    options.log_severity_level = 3
    try:
        return onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    except onnxruntime.capi.onnxruntime_pybind11_state.InvalidProtobuf as error:
        raise DataError(f"this is not an ONNX file: {error}") from error


def _describe(data: bytes, path: Path) -> tuple[Layout, tuple[int, ...]]:
    """The layout of the parameters and the shape of a sample, as `fedkeep export` wrote them down."""
    written = _metadata(data).get(LAYOUT_KEY)
    if written is None:
        raise DataError(f"{path} does not give {', '.join(OUTPUTS)}: write it by `fedkeep export`")
    described = json.loads(written)
    layout = Layout(tuple(described["names"]), tuple(tuple(shape) for shape in described["shapes"]))
    return layout, tuple(described["sample"])


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if not byte & 0x80:
            return value, at


def _fields(data: bytes, at: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Number, value, and the place of the bytes of each field of the message between `at` and `end`."""
    while at < end:
        key, at = _varint(data, at)
        number, wire = key >> 3, key & 7
        value, start = 0, at
        if wire == _VARINT:
            value, at = _varint(data, at)
        elif wire == _BYTES:
            length, start = _varint(data, at)
            at = start + length
        elif wire in (_FIXED32, _FIXED64):
            at += 4 if wire == _FIXED32 else 8
        else:
            raise ValueError(f"wire type {wire}")
        if at > end:
            raise ValueError("a field runs past its message")
        yield number, value, start, at


def _initializers(data: bytes) -> Iterator[tuple[str, int, tuple[int, int]]]:
    """Name, data type and place of each tensor of the graph."""
    graphs = [(start, end) for number, _, start, end in _fields(data, 0, len(data)) if number == 7]
    for tensor in (field for graph in graphs for field in _fields(data, *graph) if field[0] == 5):
        parts = {number: (value, start, end) for number, value, start, end in _fields(data, *tensor[2:])}
        (_, start, end), (kind, *_) = parts.get(8, (0, 0, 0)), parts.get(2, (0, 0, 0))
        yield data[start:end].decode(), kind, parts.get(9, (0, 0, 0))[1:]


def _metadata(data: bytes) -> dict[str, str]:
    """What the writer of an ONNX file noted in it; raises `DataError` if it is none."""
    try:
        pairs = [
            {inner: data[at:to].decode() for inner, _, at, to in _fields(data, start, end)}
            for number, _, start, end in _fields(data, 0, len(data))
            if number == 14
        ]
    except (ValueError, IndexError) as error:
        raise DataError(f"this is not an ONNX file: {error}") from error
    return {pair.get(1, ""): pair.get(2, "") for pair in pairs}
