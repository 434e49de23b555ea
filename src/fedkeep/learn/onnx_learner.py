"""Values of the last layer without torch: ONNX Runtime gives activations and logits, numpy the rest.

With error e = softmax(z) - onehot(y) and activation h, a sample's gradient by the last layer is e (h, 1)^T, so its
projection on a direction (G, b) is e . (G h + b): inference and two small products.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fedkeep.core.errors import DataError, MissingExtraError
from fedkeep.core.ports import Job
from fedkeep.core.types import AnyArray, Batch, LocalTraining, Scores, Vector
from fedkeep.learn.dense import DenseTrace
from fedkeep.learn.dense_learner import DenseLearner
from fedkeep.learn.flat import Layout
from fedkeep.learn.onnx_weights import OnnxWeights, read_metadata
from fedkeep.learn.traced import TracedMeasurements

LAYOUT_KEY = "fedkeep.layout"
INPUTS = ("x", "y", "weight", "bias")
OUTPUTS = ("values", "activations", "logits")
PICKLE_STARTS = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
"""First bytes of files that may run code when they are opened: archives as `torch.save` writes them, and pickles."""
_CHUNK = 256
_FLOAT32 = np.dtype(np.float32)


class OnnxPass:
    """One run of the session over a batch, when it is first asked for; what it gave is kept."""

    def __init__(self, probe: OnnxProbe, batch: Batch) -> None:
        self._probe, self._batch = probe, batch
        self._seen: tuple[AnyArray, AnyArray] | None = None

    def __call__(self) -> tuple[list[AnyArray], AnyArray]:
        """Input and output of the last layer, as those of one of C models."""
        if self._seen is None:
            self._seen = self._probe.infer(self._batch.x)
        activations, logits = self._seen
        return [activations[None]], logits[None]

    def projections(self, direction: Vector) -> Scores | None:
        """The session gives them together with the pass, so only before that."""
        if self._seen is not None:
            return None
        values, *seen = self._probe.run(self._batch.x, self._batch.y, direction)
        self._seen = seen[0], seen[1]
        return values.ravel().astype(np.float64)


class OnnxMeasurements(TracedMeasurements):
    """What a last linear layer sees in a batch, by its closed form; nothing runs before something is asked for.

    Asked for projections first, the session gives them: for a single sample a few calls into numpy would cost more
    than the network itself.
    """

    def __init__(self, probe: OnnxProbe, batch: Batch) -> None:
        self._pass = OnnxPass(probe, batch)
        super().__init__(DenseTrace(self._pass, batch.y[None]), probe.head, len(batch))

    def projections(self, direction: Vector) -> Scores:
        given = self._pass.projections(direction)
        return super().projections(direction) if given is None else given


class OnnxProbe:
    """A frozen model in an ONNX Runtime session."""

    def __init__(self, data: bytes, shape: tuple[int, ...], head: Layout) -> None:
        self.session = session(data)
        self.head = head
        """The layout of the last layer, which alone is valued."""
        self._shape = shape
        self._nowhere = np.zeros(head.size, dtype=np.float32)
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
        _, activations, logits = self.run(x, np.zeros(len(x), dtype=np.int64), self._nowhere)
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
        self._layout, self._shape = _describe(data, path)
        self._weights = OnnxWeights(data, self._layout)
        head = self._layout.shapes[-2]
        self._head = DenseLearner((head[1], head[0]))
        self._loaded: tuple[Vector, OnnxProbe] | None = None

    @property
    def layout(self) -> Layout:
        return self._layout

    @property
    def size(self) -> int:
        return self._layout.size

    @property
    def gradient_size(self) -> int:
        return self._head.size

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
        return np.concatenate(parts) if parts else np.empty((0, self._layout.shapes[-1][0]), dtype=np.float32)


def session(data: bytes) -> Any:
    """A session that uses one thread and gives memory back: the device has other work."""
    try:
        import onnxruntime
    except ImportError:
        raise MissingExtraError("an ONNX model", "onnx") from None
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
    written = read_metadata(data).get(LAYOUT_KEY)
    if written is None:
        raise DataError(f"{path} does not give {', '.join(OUTPUTS)}: write it by `fedkeep export`")
    described = json.loads(written)
    layout = Layout(tuple(described["names"]), tuple(tuple(shape) for shape in described["shapes"]))
    return layout, tuple(described["sample"])
