"""The Keeper: what an existing ClientApp needs to train on kept samples instead of all of them.

A Keeper alone keeps the best samples of its own stream. What the strategy's wrapper `KeeperStrategy` sends with each
model is the direction in which the fleet as a whole would move.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message

from fedkeep.config.device import build_device
from fedkeep.config.method import parse_method
from fedkeep.config.presets import DEFAULT, DEFAULT_POLICY
from fedkeep.core.device import Device
from fedkeep.core.errors import ConfigError
from fedkeep.core.protocols import Learner, OfferResult
from fedkeep.core.regions import LabelRegions
from fedkeep.core.screening import screen_order
from fedkeep.core.state import add_prefix, strip_prefix
from fedkeep.core.types import AnyArray, Batch, LocalTraining, Report, State, TrainOrder, Vector
from fedkeep.flower.device_memory import DeviceMemory
from fedkeep.protocol.wire import from_array, to_array

DIRECTION, KEEPER, ESTIMATE = "fedkeep.direction", "fedkeep.keeper", "fedkeep.estimate"
_STATISTICS = ("running_mean", "running_var")


@dataclass(frozen=True)
class KeeperStatus:
    """What a keeper has done since it was made."""

    offered: int
    stored: int
    capacity: int
    fates: Mapping[str, int]
    """What became of sound samples: `kept`, `replaced`, `refreshed` or `refused`."""
    unsound: Mapping[str, int]
    """Samples that were none, by reason: `label`, `not-finite` or `shape`."""
    labels: Mapping[int, int]
    """How many samples of each label are stored."""


class Keeper:
    """Values what it is offered, keeps the best, and remembers it all between two messages.

    Use it in a `with` block, which saves it at the end: offer what arrived, then sync with the model that came,
    then train on `samples()` and add `records()` to the reply.

    >>> import torch
    >>> from flwr.app import RecordDict
    >>> context = Context(run_id=1, node_id=7, node_config={}, state=RecordDict(), run_config={})
    >>> with Keeper.open(context, lambda: torch.nn.Linear(2, 3), capacity=4) as keeper:
    ...     keeper.offer([[0.5, 1.0], [1.5, 0.0], [float("nan"), 0.0]], [0, 2, 1])
    ...     keeper.sync(ArrayRecord(torch.nn.Linear(2, 3).state_dict()))  # in an app: the message
    >>> keeper.samples("x", "y")[0], keeper.status().unsound
    ({'x': array([0.5, 1. ], dtype=float32), 'y': 0}, {'not-finite': 1})
    >>> keeper.records()["fedkeep.keeper"]["offered"]
    3
    """

    def __init__(
        self,
        learner: Learner,
        memory: DeviceMemory,
        capacity: int,
        policy: str,
        preset: str,
        seed: int = 0,
    ) -> None:
        if not isinstance(capacity, int) or isinstance(capacity, bool) or capacity < 1:
            raise ConfigError(
                f"capacity must be a whole number of samples, 1 or more, got {capacity!r}"
            )
        self._learner, self._memory = learner, memory
        self._capacity, self._policy, self._preset, self._seed = capacity, policy, preset, seed
        self._report: Report | None = None
        self._correction: Vector | None = None
        self._device: Device | None = None
        self._statistics: State = {}
        self._form: State = {}
        self._counts = Counter[str]()
        if state := memory.load():
            self._counts.update(from_array(state["counts"], dict[str, int]))
            self._learn_statistics(strip_prefix("statistics", state))
            self._device = self._make(tuple(state["shape"].tolist()), int(state["labels"]))
            self._device.restore(strip_prefix("device", state))

    @classmethod
    def open(
        cls,
        context: Context,
        module: Callable[[], Any],
        capacity: int,
        *,
        policy: str = DEFAULT_POLICY,
        preset: str = DEFAULT,
        last_layers: int | None = None,
        directory: str | None = None,
    ) -> "Keeper":
        """The keeper of this node, for the torch modules that `module` makes.

        `preset` sets the policy's options as in an experiment: `"paper"` is the paper's choice. In `directory` the
        keeper outlives restarts, else it lives in Flower's context. BatchNorm layers are valued as they are in
        evaluation, by the statistics that come with the model.
        """
        if hasattr(module, "state_dict"):
            raise ConfigError(
                "give the keeper the function that makes the module, not a module: it needs its own"
            )
        from fedkeep.learn.network import with_frozen_norms
        from fedkeep.learn.torch_learner import TorchLearner

        memory = DeviceMemory(
            Path(directory) / f"keeper-{context.node_id}.npz" if directory else context
        )
        learner = TorchLearner(partial(with_frozen_norms, module), last_layers)
        return cls(learner, memory, capacity, policy, preset, context.node_id % 2**62)

    def __enter__(self) -> "Keeper":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None and self._device is not None:
            state = add_prefix("device", self._device.snapshot()) | add_prefix(
                "statistics", self._statistics
            )
            self._memory.save(state | self._form | {"counts": to_array(dict(self._counts))})

    def offer(self, x: Any, y: Any) -> None:
        """Values a batch of arrivals, numpy or torch, under the model last synced; a sample seen before is known.

        Samples with NaN, of another shape or without a class of the model's are not kept, and counted in `status()`.
        """
        samples, labels = _numbers(x, np.float32), _numbers(y)
        if labels.ndim != 1 or samples.shape[:1] != labels.shape:
            forms = f"samples {samples.shape} and labels {labels.shape}"
            raise ConfigError(f"offer takes one class number a sample: got {forms}")
        if not len(labels):
            return
        if labels.dtype.kind == "f" and not (labels == np.floor(labels)).any():
            raise ConfigError(
                "these labels are no class numbers: fedkeep values samples of classifiers, not of regression"
            )
        if labels.dtype.kind not in "iuf":
            raise ConfigError(f"labels must be class numbers, got {labels.dtype}")
        if self._device is None:
            try:
                scores = self._learner.logits(self._learner.initial(0), samples[:1])
            except (ValueError, IndexError, RuntimeError) as error:
                raise ConfigError(
                    f"the model takes no samples of shape {samples.shape[1:]}: {error}"
                ) from error
            if scores.ndim != 2 or scores.shape[1] < 2:
                raise ConfigError(
                    "the model has no two outputs a sample: fedkeep values samples of classifiers only"
                )
            self._device = self._make(samples.shape[1:], scores.shape[1])
        pairs = zip(samples, labels.tolist(), strict=True)
        known_by = [
            blake2b(x.tobytes() + f"{label:g}".encode(), digest_size=8).digest()
            for x, label in pairs
        ]
        ids = (
            np.frombuffer(b"".join(known_by), dtype="<i8").astype(np.int64) >> 1
        )  # a sample is known by its content
        outcome, unsound = self._device.observe(Batch(samples, labels, ids), time=0.0)
        fates = Counter(f"fate.{OfferResult(fate).name.lower()}" for fate in outcome.fates.tolist())
        self._counts.update(
            {"offered": len(labels)} | fates | {f"unsound.{why}": n for why, n in unsound.items()}
        )

    def sync(
        self,
        model: Message | ArrayRecord | Vector,
        direction: Vector | None = None,
        *,
        learning_rate: float = 1.0,
        steps: int = 1,
    ) -> None:
        """Takes the model that came, and the direction beside it in a message, and values what is kept anew.

        Tell it the `learning_rate` and the `steps` of your loop, and corrections count only as long as they hold: that
        matters where a few steps all but fit what is kept.
        """
        order = self._order(model, direction, LocalTraining(learning_rate, steps))
        screen_order(order, self._learner.size, self._learner.gradient_size, 0, self._capacity)
        if self._device is None:
            return
        prepared = self._device.prepare(order)
        job, self._correction = prepared.job, prepared.job.correction
        if (
            self._correction is not None
        ):  # in a user's loop all samples count alike: it mends that difference, too
            measured = self._learner.probe(order.model).measure(job.batch)
            self._correction = self._correction + measured.weighted_gradient(
                job.weights / job.weights.mean() - 1.0
            )
        self._report = self._device.complete(prepared, order.model)

    def correct(self, model: Any) -> None:
        """Mends the gradients of a torch model by the gist of the stream; call it after each `loss.backward()`.

        Under a preset without a gist, and before the first sync, it changes nothing.
        """
        if self._correction is not None:
            from fedkeep.learn.torch_learner import add_to_gradients

            add_to_gradients(model, self._correction)

    def samples(self, x: str | None = None, y: str | None = None) -> list[Any]:
        """The kept samples as pairs (sample, label), oldest first, or as dictionaries with these two keys."""
        if self._device is None:
            return []
        kept = self._device.store.stored().batch
        pairs = list(zip(kept.x, kept.y.tolist(), strict=True))
        return (
            pairs if x is None or y is None else [{x: sample, y: label} for sample, label in pairs]
        )

    def status(self) -> KeeperStatus:
        """What was offered, what became of it, and what is stored."""
        labels = Counter(label for _, label in self.samples())
        fates, unsound = (
            {
                name.removeprefix(kind): count
                for name, count in self._counts.items()
                if name.startswith(kind)
            }
            for kind in ("fate.", "unsound.")
        )
        stored = dict(sorted(labels.items()))
        return KeeperStatus(
            self._counts["offered"], labels.total(), self._capacity, fates, unsound, stored
        )

    def records(self) -> dict[str, ArrayRecord | ConfigRecord]:
        """What the reply tells `KeeperStrategy`: how the keeper is doing, and the mean gradient of what arrived."""
        now, count = self.status(), 0 if self._report is None else self._report.gradient_samples
        told = {
            "samples": count,
            "offered": now.offered,
            "stored": now.stored,
            "labels": len(now.labels),
        }
        about = ConfigRecord({**told, "unsound": sum(now.unsound.values())})
        if (
            self._device is not None
            and self._device.gist is not None
            and (did := self._device.gist.figures())
        ):
            about["gist"] = list(did)
        records: dict[str, ArrayRecord | ConfigRecord] = {KEEPER: about}
        if self._report is not None and self._report.local_gradient is not None:
            records[ESTIMATE] = ArrayRecord({"local_gradient": Array(self._report.local_gradient)})
        return records

    def _make(self, shape: tuple[int, ...], labels: int) -> Device:
        method = parse_method({"preset": self._preset, "policy": {"name": self._policy}})
        self._form = {"shape": np.array(shape, dtype=np.int64), "labels": np.array(labels)}
        return build_device(
            method,
            self._learner,
            capacity=self._capacity,
            sample_shape=shape,
            labels=labels,
            regions=LabelRegions(labels),
            seed=self._seed,
        )

    def _order(
        self, model: Message | ArrayRecord | Vector, direction: Vector | None, local: LocalTraining
    ) -> TrainOrder:
        """The order in what came; running statistics in a state dict go to the layers they belong to."""
        round_, accepted = 0, None
        if isinstance(model, Message):
            content = model.content
            if DIRECTION in content.array_records:
                direction = content.array_records[DIRECTION]["direction"].numpy()
            if KEEPER in content.config_records:
                said = content.config_records[KEEPER]
                round_, accepted = int(str(said["round"])), int(str(said["accepted"]))
            model = next(
                record for name, record in content.array_records.items() if name != DIRECTION
            )
        if isinstance(model, ArrayRecord):
            named = {name: array.numpy() for name, array in model.items()}
            self._learn_statistics(
                {n: a for n, a in named.items() if n.rpartition(".")[2] in _STATISTICS}
            )
            known = getattr(getattr(self._learner, "layout", None), "names", None)
            names = known if known is not None and set(known) <= set(named) else list(named)
            model = np.concatenate([named[name].ravel() for name in names]).astype(np.float32)
        if not isinstance(model, np.ndarray):
            raise ConfigError(
                f"sync takes the message, its ArrayRecord or a vector, not {type(model).__name__}"
            )
        return TrainOrder(round_, model, direction, local, accepted)

    def _learn_statistics(self, named: State) -> None:
        self._statistics = named
        if named:
            self._learner.load_statistics(named)  # type: ignore[attr-defined]


def _numbers(values: Any, dtype: Any = None) -> AnyArray:
    """What was offered as an array; tensors on another device, or part of a graph, are copied out of it."""
    try:
        return np.asarray(values.detach().cpu() if hasattr(values, "detach") else values, dtype)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"offer takes arrays or tensors of numbers: {error}") from error
