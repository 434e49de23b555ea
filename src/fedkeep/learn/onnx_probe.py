"""Values of the last layer without torch: ONNX Runtime gives activations and logits, numpy the rest.

With error e = softmax(z) - onehot(y) and activation h, a sample's gradient by the last layer is e (h, 1)^T, so its
projection on a direction (G, b) is e . (G h + b): inference and two small products.
"""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from fedkeep.core.errors import DataError, MissingExtraError
from fedkeep.core.types import AnyArray, Batch, FloatArray, LocalTraining, Scores, Vector
from fedkeep.learn.dense_learner import DenseLearner
from fedkeep.learn.flat import Layout
from fedkeep.learn.onnx_weights import OnnxWeights

LAYOUT_KEY = "fedkeep.layout"
ACTIVATIONS, LOGITS = "activations", "logits"
_CHUNK = 256


class HeadMeasurements:
    """What a last linear layer sees in a batch."""

    def __init__(self, activations: AnyArray, logits: AnyArray, y: AnyArray) -> None:
        self._h, self._z, self._y = activations, logits, y

    @cached_property
    def _softmax(self) -> tuple[AnyArray, AnyArray]:
        """The losses and the errors."""
        z = self._z - self._z.max(axis=1, keepdims=True)
        rows = np.arange(len(z))
        of_label = z[rows, self._y]
        error = np.exp(z)
        total = error.sum(axis=1)
        error /= total[:, None]
        error[rows, self._y] -= 1.0
        return np.log(total) - of_label, error

    def losses(self) -> Scores:
        return self._softmax[0].astype(np.float64)

    def projections(self, direction: Vector) -> Scores:
        error = self._softmax[1]
        classes = error.shape[1]
        weight, bias = direction[:-classes].reshape(classes, -1), direction[-classes:]
        response = self._h @ weight.T
        response += bias
        response *= error
        values: Scores = response.sum(axis=1).astype(np.float64)
        return values

    def norms(self) -> Scores:
        error = self._softmax[1]
        squares: Scores = (np.einsum("ni,ni->n", self._h, self._h) + 1.0) * np.einsum("no,no->n", error, error)
        return np.sqrt(squares).astype(np.float64)

    def head_norms(self) -> Scores:
        return self.norms()

    def mean_gradient(self) -> Vector:
        error, n = self._softmax[1], max(1, len(self._h))
        gradient = np.concatenate([(error.T @ self._h).ravel(), error.sum(axis=0)])
        gradient /= n
        return gradient.astype(np.float32, copy=False)

    def activations(self) -> AnyArray:
        return self._h.copy()


class OnnxProbe:
    """A frozen model in an ONNX Runtime session."""

    def __init__(self, data: bytes, shape: tuple[int, ...]) -> None:
        self._session = _session(data)
        self._input = self._session.get_inputs()[0].name
        self._shape = shape

    def measure(self, batch: Batch) -> HeadMeasurements:
        activations, logits = self.run(batch.x)
        return HeadMeasurements(activations, logits, batch.y)

    def run(self, x: AnyArray) -> tuple[AnyArray, AnyArray]:
        """Activations and logits, (n, d) and (n, classes)."""
        x = np.ascontiguousarray(x, dtype=np.float32)
        if x.shape[1:] != self._shape:
            x = x.reshape(-1, *self._shape)
        activations, logits = self._session.run((ACTIVATIONS, LOGITS), {self._input: x})
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
        if not data or data[:2] in (b"PK", b"\x80\x02", b"\x80\x04", b"\x80\x05"):
            raise DataError(f"{path} is not an ONNX file but a pickle or an archive: write one by `fedkeep export`")
        self._layout, self._shape = _describe(_session(data), path)
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

    def initial(self, seed: int) -> Vector:  # noqa: ARG002 - the file holds the first model
        return self._weights.read()

    def probe(self, model: Vector) -> OnnxProbe:
        if self._loaded is None or self._loaded[0] is not model:
            self._loaded = (model, OnnxProbe(self._weights.replaced(model), self._shape))
        return self._loaded[1]

    def train(self, model: Vector, batch: Batch, weights: FloatArray, local: LocalTraining, seed: int) -> Vector:
        body = self.size - self._head.size
        activations, _ = self.probe(model).run(batch.x)
        head = self._head.train(model[body:], Batch(activations, batch.y, batch.ids), weights, local, seed)
        return np.concatenate([model[:body], head])

    def logits(self, model: Vector, x: AnyArray) -> AnyArray:
        probe = self.probe(model)
        parts = [probe.run(x[i : i + _CHUNK])[1] for i in range(0, len(x), _CHUNK)]
        return np.concatenate(parts) if parts else np.empty((0, self._layout.shapes[-1][0]), dtype=np.float32)


def _session(data: bytes) -> Any:
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


def _describe(session: Any, path: Path) -> tuple[Layout, tuple[int, ...]]:
    """The layout of the parameters, as `fedkeep export` wrote it down, and the shape of a sample."""
    outputs = [output.name for output in session.get_outputs()]
    written = session.get_modelmeta().custom_metadata_map.get(LAYOUT_KEY)
    if written is None or ACTIVATIONS not in outputs or LOGITS not in outputs:
        raise DataError(f"{path} gives no activations and logits: write it by `fedkeep export`")
    names, shapes = json.loads(written)
    layout = Layout(tuple(names), tuple(tuple(shape) for shape in shapes))
    return layout, tuple(int(side) for side in session.get_inputs()[0].shape[1:])
