"""The last layer without torch: ONNX Runtime gives activations and logits, numpy the rest.

With error e (softmax(z) - onehot(y) for labels) and activation h, a sample's gradient by the last
layer is e (h, 1)^T, so its projection on a direction (G, b) is e . (G h + b): inference and two
small products.

New parameters are put into the file's own bytes, without the onnx library. An ONNX file is a
protobuf message: ModelProto.graph (field 7) holds GraphProto.initializer (field 5), each a
TensorProto with dims (1), data_type (2), name (8) and raw_data (9). ModelProto.metadata_props
(field 14) holds pairs of key (1) and value (2).
"""

import json
from collections import defaultdict
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from fedkeep.core.errors import DataError, optional_import
from fedkeep.core.protocols import TrainingJob
from fedkeep.core.types import AnyArray, Batch, LocalTraining, Scores, Vector
from fedkeep.learn.backends import Layout, TracedMeasurements
from fedkeep.learn.dense_learner import DenseLearner, DenseTrace
from fedkeep.learn.losses import CROSS_ENTROPY, CrossEntropy, Loss, NumberLoss

LAYOUT_KEY = "fedkeep.layout"
INPUTS = ("x", "y", "weight", "bias")
OUTPUTS = ("values", "activations", "logits")
PICKLE_STARTS = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
"""First bytes of files that may run code when opened: `torch.save`'s archives, and pickles."""
_CHUNK = 256
_FLOAT32 = np.dtype(np.float32)
_FLOAT = 1
_FIXED = {1: 8, 5: 4}
_Fields: TypeAlias = dict[int, list[tuple[int, int, int]]]
"""The fields of a message by number: of each its value and where its bytes begin and end."""


class OnnxMeasurements(TracedMeasurements):
    """What a last linear layer sees in a batch, by its closed form; the session runs once.

    Asked for projections first, the session gives them with the rest: for a single sample a few
    calls into numpy would cost more than the network itself.
    """

    def __init__(self, probe: "OnnxGradientProbe", batch: Batch) -> None:
        # Nothing more: this is done for every single sample.
        self._probe, self._batch, self._n, self._c = probe, batch, len(batch.y), 0
        self._seen: list[AnyArray] | None = None

    @cached_property
    def _trace(self) -> DenseTrace:
        """Of the last layer, as one of C models."""
        self._seen = self._seen or self._probe.run(
            self._batch.x, self._batch.y, self._probe.nowhere
        )
        _, activations, logits = self._seen
        y, loss = self._batch.y[None], self._probe.loss
        return DenseTrace(lambda: ([activations[None]], logits[None]), y, loss=loss)

    def projections(self, direction: Vector) -> Scores:
        """Project each sample's gradient on a direction."""
        if self._seen is not None:
            return super().projections(direction)
        self._seen = self._probe.run(self._batch.x, self._batch.y, direction)
        return self._seen[0][:, 0].astype(np.float64)


class OnnxGradientProbe:
    """A frozen model in an ONNX Runtime session."""

    def __init__(
        self, data: bytes, shape: tuple[int, ...], head: Layout, loss: Loss = CROSS_ENTROPY
    ) -> None:
        self._session, self._shape, self.loss = session(data), shape, loss
        self._outputs = head.shapes[-1][0]
        self.head = head  # the layout of the last layer, which alone is valued
        self.nowhere = np.zeros(head.size, dtype=np.float32)
        self._last: tuple[Vector, AnyArray, AnyArray] | None = None

    def measure(self, batch: Batch) -> OnnxMeasurements:
        """Measure a batch under the model."""
        if self.loss is not CROSS_ENTROPY:
            batch = Batch(batch.x, self.loss.targets(batch.y, self._outputs), batch.ids)
        return OnnxMeasurements(self, batch)

    def run(self, x: AnyArray, y: AnyArray, direction: Vector) -> list[AnyArray]:
        """Projections (n, 1), activations (n, d) and logits (n, classes)."""
        last = self._last
        if last is None or last[0] is not direction:
            weight, bias = self.head.views(direction)
            self._last = last = (direction, weight, bias)
        if x.dtype is not _FLOAT32 or x.shape[1:] != self._shape:
            x = np.ascontiguousarray(x, dtype=np.float32).reshape(-1, *self._shape)
        targets = y if y.ndim > 1 else y[:, None]
        feed = {"x": x, "y": targets, "weight": last[1], "bias": last[2]}
        return list(self._session.run(OUTPUTS, feed))


class OnnxLearner:
    """The architecture of an exported file, of which the last layer is measured and trained.

    New models go into the file's own bytes. Its body is never trained here: that needs torch.
    """

    def __init__(self, path: Path, sha256: str | None = None) -> None:
        try:
            self._data = path.read_bytes()
        except OSError as error:
            raise DataError(f"cannot read the model {path}: {error.strerror}") from error
        if sha256 is not None and (found := sha256_of(self._data)) != sha256.lower():
            raise DataError(
                f"the model {path} has the SHA-256 {found}, not {sha256} as [model] sha256 says: "
                "it is damaged or another"
            )
        if not self._data or self._data.startswith(PICKLE_STARTS):
            raise DataError(
                f"{path} is not an ONNX file but a pickle or an archive: "
                "write one by `fedkeep export`"
            )
        notes, tensors = _parsed(self._data)
        if LAYOUT_KEY not in notes:
            raise DataError(
                f"{path} does not give {', '.join(OUTPUTS)}: write it by `fedkeep export`"
            )
        described = json.loads(notes[LAYOUT_KEY])
        self.layout = Layout(
            tuple(described["names"]), tuple(tuple(shape) for shape in described["shapes"])
        )
        self._shape = tuple(described["sample"])
        self._places = []
        for name, part in zip(self.layout.names, self.layout.slices, strict=True):
            kind, start, end = tensors.get(name, (0, 0, 0))
            if kind != _FLOAT or end - start != 4 * (part.stop - part.start):
                raise DataError(
                    f"the ONNX file does not hold the parameter '{name}': "
                    "write it by `fedkeep export`"
                )
            self._places.append((start, end, part))
        outputs, inputs = self.layout.shapes[-2]
        described_loss = described.get("loss")
        self.loss: CrossEntropy | NumberLoss = (
            CROSS_ENTROPY if described_loss is None else NumberLoss(**described_loss)
        )
        """The file's own, as it was exported with."""
        self._head = DenseLearner((inputs, outputs), loss=self.loss)
        self.tail, self.gradient_shapes = self._head.tail, self._head.gradient_shapes
        self.size, self.gradient_size = self.layout.size, self._head.size
        self._loaded: tuple[Vector, OnnxGradientProbe] | None = None

    def initial(self, seed: int) -> Vector:  # noqa: ARG002 - the file holds the first model
        """Give the first model."""
        parts = [np.frombuffer(self._data[start:end], "<f4") for start, end, _ in self._places]
        return np.concatenate(parts).astype(np.float32)

    def file_of(self, model: Vector) -> bytes:
        """Put these parameters into the file instead of its own."""
        data = bytearray(self._data)
        for start, end, part in self._places:
            data[start:end] = np.asarray(model[part], dtype="<f4").tobytes()
        return bytes(data)

    def probe(self, model: Vector) -> OnnxGradientProbe:
        """Freeze a model to measure samples with."""
        if self._loaded is None or self._loaded[0] is not model:
            self._loaded = (
                model,
                OnnxGradientProbe(self.file_of(model), self._shape, self._head.layout, self.loss),
            )
        return self._loaded[1]

    def train(self, model: Vector, job: TrainingJob, local: LocalTraining) -> Vector:
        """Regression on the activations, which do not change while the body does not."""
        body = self.size - self._head.size
        activations = self.probe(model).measure(job.batch).activations()
        seen = replace(job, batch=Batch(activations, job.batch.y, job.batch.ids))
        return np.concatenate([model[:body], self._head.train(model[body:], seen, local)])

    def logits(self, model: Vector, x: AnyArray) -> AnyArray:
        """Compute the file's outputs, (n, outputs)."""
        probe, nobody = self.probe(model), np.zeros(len(x), dtype=np.int64)
        if self.loss is not CROSS_ENTROPY:
            nobody = np.zeros((len(x), self.layout.shapes[-1][0]), dtype=np.float32)
        parts = [slice(start, start + _CHUNK) for start in range(0, len(x), _CHUNK)]
        found = [probe.run(x[part], nobody[part], probe.nowhere)[2] for part in parts]
        return np.concatenate([np.empty((0, self.layout.shapes[-1][0]), dtype=np.float32), *found])


def sha256_of(data: bytes) -> str:
    """Return the checksum as `sha256sum` prints it."""
    from hashlib import sha256

    return sha256(data).hexdigest()


def session(data: bytes) -> Any:
    """Open a session of one thread that gives memory back: the device has other work."""
    with optional_import("an ONNX model", "onnx"):
        import onnxruntime
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.enable_cpu_mem_arena = False
    options.log_severity_level = 3
    try:
        return onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    except onnxruntime.capi.onnxruntime_pybind11_state.InvalidProtobuf as error:
        raise DataError(f"this is not an ONNX file: {error}") from error


def _parsed(data: bytes) -> tuple[dict[str, str], dict[str, tuple[int, int, int]]]:
    """Read the notes of a file's writer, and each tensor's data type and place."""

    def text(message: _Fields, number: int) -> str:
        _, start, end = message[number][-1] if number in message else (0, 0, 0)
        return data[start:end].decode()

    try:
        model = _fields(data, 0, len(data))
        pairs = [_fields(data, start, end) for _, start, end in model[14]]
        graphs = [_fields(data, start, end) for _, start, end in model[7]]
        tensors = [_fields(data, start, end) for graph in graphs for _, start, end in graph[5]]
        notes = {text(pair, 1): text(pair, 2) for pair in pairs}
        raw = {text(tensor, 8): tensor for tensor in tensors if 2 in tensor and 9 in tensor}
    except (ValueError, IndexError) as error:
        raise DataError(f"this is not an ONNX file: {error}") from error
    return notes, {name: (tensor[2][-1][0], *tensor[9][-1][1:]) for name, tensor in raw.items()}


def _fields(data: bytes, at: int, end: int) -> _Fields:
    """Read the message between `at` and `end`; wire type 0 is a number, 2 bytes."""
    found: _Fields = defaultdict(list)
    while at < end:
        key, at = _varint(data, at)
        wire, value, start = key & 7, 0, at
        if wire == 0:
            value, at = _varint(data, at)
        elif wire == 2:
            length, start = _varint(data, at)
            at = start + length
        elif wire in _FIXED:
            at += _FIXED[wire]
        else:
            raise ValueError(f"wire type {wire}")
        if at > end:
            raise ValueError("a field runs past its message")
        found[key >> 3].append((value, start, at))
    return found


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Read the number that begins at `at`, seven bits a byte, and where it ends."""
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if not byte & 0x80:
            return value, at
