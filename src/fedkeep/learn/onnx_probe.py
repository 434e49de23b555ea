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
from fedkeep.learn.onnx_weights import OnnxWeights, read_metadata

LAYOUT_KEY = "fedkeep.layout"
INPUTS = ("x", "y", "weight", "bias")
OUTPUTS = ("values", "activations", "logits")
_CHUNK = 256
_FLOAT32 = np.dtype(np.float32)


class OnnxMeasurements:
    """What a last linear layer sees in a batch; nothing runs before something is asked for.

    Asked for projections first, the session gives them together with activations and logits: for a single sample
    a few calls into numpy would cost more than the network itself. All else is numpy.
    """

    def __init__(self, probe: OnnxProbe, batch: Batch) -> None:
        self._probe, self._batch = probe, batch
        self._seen: tuple[AnyArray, AnyArray] | None = None

    def losses(self) -> Scores:
        return self._softmax[0].astype(np.float64)

    def projections(self, direction: Vector) -> Scores:
        if self._seen is None:
            values, activations, logits = self._probe.run(self._batch.x, self._batch.y, direction)
            self._seen = activations, logits
            return values.ravel().astype(np.float64)
        weight, bias = self._probe.split(direction)
        response = self._activations @ weight.T
        response += bias
        response *= self._softmax[1]
        return np.asarray(response.sum(axis=1), dtype=np.float64)

    def norms(self) -> Scores:
        h, error = self._activations, self._softmax[1]
        squares: Scores = (np.einsum("ni,ni->n", h, h) + 1.0) * np.einsum("no,no->n", error, error)
        return np.sqrt(squares).astype(np.float64)

    def head_norms(self) -> Scores:
        return self.norms()

    def mean_gradient(self) -> Vector:
        return self._mean(self._softmax[1])

    def weighted_gradient(self, weights: Scores) -> Vector:
        return self._mean(self._softmax[1] * weights.astype(np.float32)[:, None])

    def activations(self) -> AnyArray:
        return self._activations.copy()

    @property
    def _activations(self) -> AnyArray:
        return self._outputs()[0]

    @cached_property
    def _softmax(self) -> tuple[AnyArray, AnyArray]:
        """The losses, and the errors softmax(z) - onehot(y)."""
        logits = self._outputs()[1]
        z = logits - logits.max(axis=1, keepdims=True)
        rows, y = np.arange(len(z)), self._batch.y
        of_label = z[rows, y]
        error = np.exp(z)
        total = error.sum(axis=1)
        error /= total[:, None]
        error[rows, y] -= 1.0
        return np.log(total) - of_label, error

    def _mean(self, errors: AnyArray) -> Vector:
        """The mean of the gradients that these errors of the last layer make."""
        gradient = np.concatenate([(errors.T @ self._activations).ravel(), errors.sum(axis=0)])
        gradient /= max(1, len(self._batch))
        return gradient.astype(np.float32, copy=False)

    def _outputs(self) -> tuple[AnyArray, AnyArray]:
        if self._seen is None:
            self._seen = self._probe.infer(self._batch.x)
        return self._seen


class OnnxProbe:
    """A frozen model in an ONNX Runtime session."""

    def __init__(self, data: bytes, shape: tuple[int, ...], head: tuple[int, ...]) -> None:
        self.session = session(data)
        self._shape, self._head = shape, head
        self._nowhere = np.zeros(head[0] * (head[1] + 1), dtype=np.float32)
        self._last: tuple[Vector, AnyArray, AnyArray] | None = None

    def measure(self, batch: Batch) -> OnnxMeasurements:
        return OnnxMeasurements(self, batch)

    def split(self, direction: Vector) -> tuple[AnyArray, AnyArray]:
        """A direction as weight and bias of the last layer."""
        classes = self._head[0]
        return direction[:-classes].reshape(self._head), direction[-classes:]

    def run(self, x: AnyArray, y: AnyArray, direction: Vector) -> list[AnyArray]:
        """Projections (n, 1), activations (n, d) and logits (n, classes)."""
        last = self._last
        if last is None or last[0] is not direction:
            self._last = last = (direction, *self.split(direction))
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
        if not data or data[:2] in (b"PK", b"\x80\x02", b"\x80\x04", b"\x80\x05"):
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

    def initial(self, seed: int) -> Vector:  # noqa: ARG002 - the file holds the first model
        return self._weights.read()

    def probe(self, model: Vector) -> OnnxProbe:
        if self._loaded is None or self._loaded[0] is not model:
            self._loaded = (model, OnnxProbe(self._weights.replaced(model), self._shape, self._layout.shapes[-2]))
        return self._loaded[1]

    def train(self, model: Vector, batch: Batch, weights: FloatArray, local: LocalTraining, seed: int) -> Vector:
        body = self.size - self._head.size
        activations, _ = self.probe(model).infer(batch.x)
        head = self._head.train(model[body:], Batch(activations, batch.y, batch.ids), weights, local, seed)
        return np.concatenate([model[:body], head])

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
