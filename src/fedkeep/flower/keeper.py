"""The Keeper: what an existing ClientApp needs to train on kept samples instead of all of them.

A Keeper alone keeps the best samples of its own stream. What the strategy's wrapper
`KeeperStrategy` sends with each model is the direction in which the fleet as a whole would move.
"""

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message

from fedkeep.config.device import build_device
from fedkeep.config.method import MethodConfig, parse_method
from fedkeep.config.presets import DEFAULT, DEFAULT_POLICY
from fedkeep.core.bounds import check_whole
from fedkeep.core.device import Device
from fedkeep.core.errors import ConfigError, FedkeepError
from fedkeep.core.gist import StoredGradients
from fedkeep.core.participation import Participation
from fedkeep.core.protocols import OfferResult
from fedkeep.core.regions import LabelRegions
from fedkeep.core.state import add_prefix, restore_parts, snapshot_parts, strip_prefix
from fedkeep.core.targets import NumberTargets
from fedkeep.core.types import AnyArray, Batch, LocalTraining, Report, State, TrainOrder, Vector
from fedkeep.core.waiting import LabelResult
from fedkeep.flower.device_memory import MEMORY, DeviceMemory
from fedkeep.flower.keeper_records import (
    KEEPER,
    RANK,
    VERSION,
    VERSION_KEY,
    KeeperOrder,
    check_version,
    gradient_fields,
    read_order,
)
from fedkeep.learn.samples import PoolForm, SamplePool, split, to_array
from fedkeep.privacy.release import ReleasePipeline
from fedkeep.protocol.wire import from_array
from fedkeep.protocol.wire import to_array as packed
from fedkeep.tables import Table

if TYPE_CHECKING:
    from fedkeep.learn.step_correction import StepCorrection
    from fedkeep.learn.user_model import UserModel

log = logging.getLogger("fedkeep.flower")

_CHECKED_SAMPLES = 8
"""Samples whose measured gradients are compared with autograd's, once."""
_MOST_RISES = 3
"""Participations in a row in which the loss rose, before corrections end for good."""


@dataclass(frozen=True)
class KeeperStatus:
    """What a keeper has done since it was made."""

    offered: int
    stored: int
    capacity: int
    fates: Mapping[str, int]
    """What became of valid samples: `kept`, `replaced`, `refreshed` or `refused`."""
    unsound: Mapping[str, int]
    """Samples that were none, by reason: `label`, `not-finite` or `shape`."""
    labels: Mapping[int, int]
    """How many samples of each label are stored; without labels all count as 0."""
    correction: str
    """`on`; `none` without a gist, or before there is one; else why it is off."""
    waiting: Mapping[str, int] = field(default_factory=dict)
    """Samples without labels: `samples` that wait in so many `slots`, and what became of the others
    (`labelled`, `displaced`, `expired`); empty where there is no waiting room."""


@dataclass(frozen=True)
class _Settings:
    """What a keeper was opened with."""

    model: Any
    capacity: int
    loss: Callable[[Any, Any], Any] | None
    output: Callable[[Any], Any] | None
    collate: Callable[[list[Any]], Any] | None
    labels: int | None
    edges: tuple[float, ...]
    policy: str
    preset: str
    method: MethodConfig
    private: bool
    """Whether noise was asked for."""
    last_layers: int | None
    seed: int


@dataclass
class _Stream:
    """What a keeper has from its first sample on."""

    pool: SamplePool
    model: "UserModel"
    device: Device
    labels: int
    """Regions of the store; 1 where it is not divided."""
    example: int
    """The number of a sample that is never forgotten: it shows the form of all."""
    checked: bool = False
    """Whether measured gradients have been compared with autograd's."""
    trained_on: frozenset[int] = frozenset()
    """Numbers of the samples that the last sync gave out: corrections measure them again."""

    @property
    def kept(self) -> set[int]:
        """Numbers of the samples that outlive the process."""
        room = self.device.waiting
        waiting = [] if room is None else room.ids.tolist()
        return {*self.device.store.stored().batch.ids.tolist(), *waiting, self.example}


class Keeper:
    """Scores what it is offered, keeps the best, and remembers it all between two messages.

    Use it in a `with` block, which saves it at the end: offer what arrived, then sync with the
    model that came, then train on `samples()` and add `records()` to the reply. It is made by
    `Keeper.open`.

    Examples
    --------
    >>> import torch
    >>> from flwr.app import RecordDict
    >>> context = Context(
    ...     run_id=1, node_id=7, node_config={}, state=RecordDict(), run_config={}
    ... )
    >>> with Keeper.open(context, lambda: torch.nn.Linear(2, 3), capacity=4) as keeper:
    ...     keeper.offer([[0.5, 1.0], [1.5, 0.0], [float("nan"), 0.0]], [0, 2, 1])
    ...     keeper.sync(ArrayRecord(torch.nn.Linear(2, 3).state_dict()))  # in an app: the message
    >>> keeper.samples("x", "y")[0], keeper.status().unsound
    ({'x': array([0.5, 1. ], dtype=float32), 'y': 0}, {'not-finite': 1})
    >>> keeper.records()["fedkeep.keeper"]["offered"]
    3
    >>> keeper
    Keeper(capacity=4, stored=2, policy='balanced-reservoir', loss=cross-entropy)
    """

    def __init__(self, settings: _Settings, memory: DeviceMemory, context: Context) -> None:
        capacity = settings.capacity
        if not isinstance(capacity, int) or isinstance(capacity, bool) or capacity < 1:
            raise ConfigError(
                f"capacity must be a whole number of samples, 1 or more, got {capacity!r}"
            )
        self._settings, self._memory, self._context = settings, memory, context
        self._report: Report | None = None
        self._steps: StepCorrection | None = None
        self._stream: _Stream | None = None
        self._release = ReleasePipeline()
        self._counts = Counter[str]()
        if state := memory.load():
            self._stream = self._restored(state)
        else:
            from fedkeep.learn.user_model import make_module

            make_module(settings.model)  # a mistake is seen here, and not at the first sample

    @classmethod
    def open(
        cls,
        context: Context,
        model: Any,
        capacity: int,
        *,
        loss: Callable[[Any, Any], Any] | None = None,
        output: Callable[[Any], Any] | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        labels: int | None = None,
        edges: Sequence[float] = (),
        policy: str = DEFAULT_POLICY,
        preset: str = DEFAULT,
        gist: str | Table | None = None,
        privacy: Table | None = None,
        waiting: Table | None = None,
        last_layers: int | None = None,
        directory: str | None = None,
    ) -> "Keeper":
        """Open the keeper of this node.

        Parameters
        ----------
        context
            The ClientApp's. It keeps the name of the keeper's file and nothing else.
        model
            A torch module, its class, or a function that makes one. It is never changed. Parameters
            with `requires_grad=False` are constants.
        capacity
            The most samples that are stored.
        loss
            From outputs and targets of n samples to n losses, as in
            `torch.nn.MSELoss(reduction="none")`. The default is the **cross-entropy** of class
            scores. It must be the loss that you train with.
        output
            From what the module returns to what the loss takes, as in `lambda out: out["logits"]`.
        collate
            From a list of samples to the module's input, for samples of different length. Samples
            are then offered as a list.
        labels
            The number of classes, by which the store is divided, where targets are class numbers
            and the model has not one output for each. The store is not divided where targets are
            floats or vectors and this is left out.
        edges
            Where targets are one number a sample: where an interval ends and the next begins. The
            store is then divided among intervals as among classes; the same on all devices.
        policy, preset
            As in an experiment; `preset="paper"` is the paper's choice.
        gist
            A mode ("none", "local", "shared") or a table of options in place of the preset's.
        privacy
            A table of options; only `protect = ["estimator"]`, for the model is your strategy's.
        waiting
            A table of options, as in `waiting={"share": 0.3}`: samples may then come without
            labels, and take part once `label` brings them.
        last_layers
            How many of the last trainable layers are measured; None: all.
        directory
            Where the keeper's file outlives restarts; None: beside the machine's temporary files.

        Raises
        ------
        ConfigError
            If an option is wrong, or the module cannot be made.
        """
        given: Table = {"preset": preset, "policy": {"name": policy}}
        if gist is not None:
            given["gist"] = {"mode": gist} if isinstance(gist, str) else gist
        if privacy is not None:
            given["privacy"] = privacy
        if waiting is not None:
            given["waiting"] = waiting
        method = parse_method(given)
        if not isinstance(context, Context):
            raise ConfigError(
                f"the keeper takes the ClientApp's Context, got {type(context).__name__}"
            )
        for name, least, value in (("labels", 1, labels), ("last_layers", 1, last_layers)):
            if value is not None:
                check_whole(name, value, least=least)
        for name, function in (("loss", loss), ("output", output), ("collate", collate)):
            if function is not None and not callable(function):
                raise ConfigError(f"{name} must be a function, got {function!r}")
        if not isinstance(directory, str | Path | None) or Path(directory or ".").is_file():
            raise ConfigError(f"directory must be a folder, got {directory!r}")
        path = Path(directory) / f"keeper-{context.node_id}.npz" if directory else None
        _require_possible(method, durable=path is not None)
        settings = _Settings(
            model,
            capacity,
            loss,
            output,
            collate,
            labels,
            _checked_edges(edges, loss, labels),
            policy,
            preset,
            method,
            privacy is not None,
            last_layers,
            context.node_id % 2**62,
        )
        return cls(settings, DeviceMemory(path or context), context)

    def __repr__(self) -> str:
        loss = self._settings.loss
        named = "cross-entropy" if loss is None else getattr(loss, "__name__", type(loss).__name__)
        return (
            f"Keeper(capacity={self._settings.capacity}, stored={self.status().stored}, "
            f"policy={self._settings.policy!r}, loss={named})"
        )

    def __enter__(self) -> "Keeper":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self._save()

    def offer(self, x: Any, y: Any = None, *, ids: Sequence[int | str] | None = None) -> None:
        """Take in a batch of arrivals, numpy or torch, scored under the model last synced.

        A sample seen before is known. Samples with NaN, of another shape or without a class of the
        model's are not kept, and counted in `status()`.

        Parameters
        ----------
        x
            n samples: an array, or a dictionary or tuple of arrays, whose first axis is n; with
            `collate` a list of samples.
        y
            n class numbers; with a loss of your own, n targets of any shape. None: the labels come
            later, by `label`, and the samples wait in the slots of `waiting=`.
        ids
            n names by which their labels can come later, or be corrected; None: samples are known
            by their content.
        """
        targets = self._no_targets(x) if y is None else to_array(y)
        samples, tree, dtypes = self._samples_of(x, targets)
        if ids is not None and len(ids) != len(samples):
            raise ConfigError(f"offer takes one id a sample: got {len(ids)} for {len(samples)}")
        if y is None and (ids is None or not self._settings.method.waiting.share):
            raise ConfigError(
                "samples without labels wait under their ids: give Keeper.open waiting={'share': "
                "0.3}, say, and offer ids="
            )
        if not samples:
            return
        if self._stream is None:
            self._stream = self._begun(samples[0], tree, dtypes, targets)
        stream, pool = self._stream, self._stream.pool
        labels, reasons = _screened(stream, samples, tree, targets, self._settings.edges)
        taken = [place for place, reason in enumerate(reasons) if reason is None]
        named = [None if ids is None else _numbered(ids[place]) for place in taken]
        try:
            numbers = [
                pool.add(samples[place], targets[place], number)
                for place, number in zip(taken, named, strict=True)
            ]
        except TypeError as error:
            raise ConfigError(
                f"samples came as {', '.join(pool.form.dtypes)} before: offer the same kind of "
                f"numbers always ({error})"
            ) from error
        known = np.array(numbers, dtype=np.int64)
        if len(known) and y is None:
            results = stream.device.wait(known[:, None], known, 0.0)
            waits = ("refused", "waiting", "waiting", "refreshed")
            names = (r.name.lower() if stored else waits[r] for r, stored in results)
            self._counts.update(f"fate.{name}" for name in names)
            self._settle_targets(numbers)
        elif len(known):
            batch = Batch(known[:, None], labels[taken], known)
            outcome, _ = stream.device.observe(batch, time=0.0)
            fates = (f"fate.{OfferResult(f).name.lower()}" for f in outcome.results.tolist())
            self._counts.update(fates)
        pool.prune(stream.kept | stream.trained_on)
        self._counts.update(f"unsound.{reason}" for reason in reasons if reason is not None)
        self._counts["offered"] += len(samples)

    def label(self, ids: Sequence[int | str], y: Any) -> None:
        """Bring the labels of samples that were offered under these ids, or correct them.

        A sample that waited counts from now on, under the model last synced. Of a stored one the
        label is replaced; what the gist has learned from it under the former label stays.
        `status()` counts what became of each label: `labelled`, `corrected`, `known`, `early` for
        one that came before its sample, or `unknown`.

        Parameters
        ----------
        ids
            n names, as `offer` got them.
        y
            n class numbers; with a loss of your own, n targets.
        """
        targets, stream = to_array(y), self._stream
        if targets.ndim == 0 or len(ids) != len(targets):
            raise ConfigError(f"label takes one label an id: got {len(ids)} and {targets.shape}")
        if stream is None:
            raise ConfigError("label needs a sample that was offered: none was yet")
        labels, known = _known_labels(stream, targets, self._settings.edges)
        if not known.all():
            self._counts["unsound.label"] += int((~known).sum())
        for place in np.flatnonzero(known).tolist():
            number = _numbered(ids[place])
            self._label(stream, number, labels[place : place + 1], targets[place])
        stream.pool.prune(stream.kept | stream.trained_on)

    def _label(self, stream: _Stream, number: int, label: AnyArray, target: AnyArray) -> None:
        """Bring the label of one sample."""
        device, pool = stream.device, stream.pool
        divided = self._by_class(stream)
        changed = number in pool and not np.array_equal(pool.target(number), target)
        if number in pool:
            pool.set_target(number, target)
        [(result, fate)] = device.label(np.array([number]), label, 0.0)
        name = result.name.lower()
        if result == LabelResult.EARLY and not divided and device.waiting is not None:
            # Only a label of the store is remembered, and this target is none.
            device.waiting.forget(np.array([number]))
            name = "unknown"
        if result == LabelResult.KNOWN and changed and not divided:
            name = "corrected"  # scored anew with all others at the next sync
        self._counts[f"label.{name}"] += 1
        if fate is not None:
            self._counts[f"fate.{fate.name.lower()}"] += 1

    def _no_targets(self, x: Any) -> AnyArray:
        """Make targets that stand for labels to come."""
        count = len(x) if isinstance(x, list) else len(np.atleast_1d(split(x)[0][0]))
        if self._stream is None and self._settings.loss is not None:
            raise ConfigError(
                "with a loss of your own the form of targets is known from the first labelled "
                "sample: offer one with its target first"
            )
        form = ("int64", ()) if self._stream is None else self._stream.pool.form.target
        return np.zeros((count, *form[1]), dtype=form[0])

    def _by_class(self, stream: _Stream) -> bool:
        """Whether the label of a region says all of a sample's target."""
        return stream.labels > 1 and not self._settings.edges

    def _settle_targets(self, numbers: list[int]) -> None:
        """Note the labels by which samples were stored at once: those that came before them."""
        stream = self._stream
        if stream is None or not self._by_class(stream):
            return
        for number in numbers:
            label = stream.device.store.label_of(number)
            if label is not None:
                stream.pool.set_target(number, label)

    def sync(self, model: Message | ArrayRecord | Vector, direction: Vector | None = None) -> None:
        """Take the model that came, and the direction beside it, and score what is stored anew.

        At the first model that samples are stored for, the measured gradients of eight of them are
        compared with autograd's.

        Parameters
        ----------
        model
            The message, the model's ArrayRecord, or the trainable parameters as one vector.
        direction
            The direction, where it is not in the message.

        Raises
        ------
        ConfigError
            If a parameter is missing or of another shape, or its gradient cannot be measured.
        RejectedError
            If the model or the direction is no vector of finite numbers of its length, or the
            server's fedkeep speaks another version.
        """
        came, beside = _content(model)
        if beside.version is not None:
            check_version(beside.version, "the server")
        if beside.preset and beside.preset != self._settings.preset:
            raise ConfigError(
                f"the strategy's preset is '{beside.preset}', this keeper's is "
                f"'{self._settings.preset}': give Keeper.open and KeeperStrategy the same"
            )
        stream = self._stream
        if stream is None:
            return
        order, device = _order(stream.model, came, beside, direction), stream.device
        device.screen(order)
        stored = device.store.stored().batch
        if not stream.checked and len(stored):
            stream.model.check(order.model, stored.take(slice(0, _CHECKED_SAMPLES)))
            stream.checked = True
        stream.trained_on = frozenset(stored.ids.tolist())
        close = self._release.close_estimate
        self._report, correction, gradients = _participate(device, order, close)
        self._steps = self._step_correction(
            stream.model, order.model, stored, correction, gradients
        )
        self._settle_targets(sorted(stream.kept))
        self._report = self._release.release(self._report, order)

    def correct(self, model: Any, optimizer: Any = None) -> None:
        """Correct the steps of a training loop by the gist of the stream.

        Call it before the loop or in it: each step is corrected once from then on, until
        `records()` is called. Without a gist, and before the first sync, nothing is changed;
        docs/flower.md has the rule by which corrections fade and end.

        Parameters
        ----------
        model
            The torch module that is trained.
        optimizer
            Its torch optimizer, of any kind; None: whichever steps the module's parameters.

        Raises
        ------
        ConfigError
            If this is no optimizer, or the module is not the one synced.
        """
        if self._steps is not None and self._recall("rises") < _MOST_RISES:
            self._steps.attach(model, optimizer)

    def samples(self, x: str | None = None, y: str | None = None) -> list[Any]:
        """List the stored samples, oldest first.

        Parameters
        ----------
        x, y
            Two keys; samples are then dictionaries with these, else pairs (sample, target).
        """
        if self._stream is None:
            return []
        pool = self._stream.pool
        numbers = self._stream.device.store.stored().batch.ids.tolist()
        pairs = [(pool.sample(number), _plain(pool.target(number))) for number in numbers]
        if x is None or y is None:
            return pairs
        return [{x: sample, y: target} for sample, target in pairs]

    def status(self) -> KeeperStatus:
        """Say what was offered, what became of it, and what is stored."""
        stream = self._stream
        stored = [] if stream is None else stream.device.store.stored().batch.y.tolist()
        fates, unsound = (
            {
                name.removeprefix(kind): count
                for name, count in self._counts.items()
                if name.startswith(kind)
            }
            for kind in ("fate.", "unsound.")
        )
        labels = dict(sorted(Counter(stored).items()))
        capacity = self._settings.capacity
        correction = self._correction_status()
        room = None if stream is None else stream.device.waiting
        waiting: dict[str, int] = {}
        if room is not None:
            waiting = {"samples": len(room), "slots": room.slots, **room.counts}
        come = {n: c for n, c in self._counts.items() if n.startswith("label.")}
        fates |= come
        return KeeperStatus(
            self._counts["offered"],
            len(stored),
            capacity,
            fates,
            unsound,
            labels,
            correction,
            waiting,
        )

    def records(self) -> dict[str, ConfigRecord]:
        """Make the reply's records for `KeeperStrategy`; call it once training has ended.

        They say how the keeper is doing, and hold the mean gradient of what arrived.
        """
        self._finish_steps()
        now, count = self.status(), 0 if self._report is None else self._report.gradient_samples
        counts = {
            "samples": count,
            "offered": now.offered,
            "stored": now.stored,
            "labels": len(now.labels),
        }
        fates = {name: now.fates.get(name, 0) for name in ("kept", "replaced", "refused")}
        about = ConfigRecord({**counts, **fates, "unsound": sum(now.unsound.values())})
        about[VERSION_KEY] = VERSION
        about["private"] = self._settings.private
        gist = None if self._stream is None else self._stream.device.gist
        if gist is not None and not self._settings.private and (did := gist.figures):
            about["gist"] = list(astuple(did))
        if self._report is not None and self._report.local_gradient is not None:
            about.update(gradient_fields(self._report.local_gradient))
            if gist is not None and not gist.layout.whole:
                about[RANK] = gist.options.used_rank
        return {KEEPER: about}

    def _samples_of(
        self, x: Any, targets: AnyArray
    ) -> tuple[list[list[AnyArray]], Any, list[np.dtype[Any]]]:
        """Each sample's arrays, the form they came in, and their dtypes."""
        if self._settings.collate is not None:
            if not isinstance(x, list | tuple):
                raise ConfigError("with collate=, offer takes a list of samples")
            parts = [split(sample) for sample in x]
            samples, tree = [leaves for leaves, _ in parts], parts[0][1] if parts else None
            if any(form != tree for _, form in parts):
                raise ConfigError("offer takes samples of one form: these have different keys")
            n = len(samples)
        else:
            leaves, tree = split(x)
            n = targets.shape[0] if targets.ndim else 0
            if any(leaf.ndim == 0 or leaf.shape[0] != n for leaf in leaves):
                forms = ", ".join(str(leaf.shape) for leaf in leaves)
                raise ConfigError(
                    f"offer takes one class number a sample: got samples {forms} and labels "
                    f"{targets.shape}"
                )
            samples = [[leaf[i] for leaf in leaves] for i in range(n)]
        own_loss = self._settings.loss is not None
        if (targets.shape[0] if targets.ndim else -1) != n or (targets.ndim != 1 and not own_loss):
            raise ConfigError(
                f"offer takes one class number a sample: got {n} samples and labels "
                f"{targets.shape}; other targets need the loss= that you train with"
            )
        floats = n and not own_loss and targets.dtype.kind == "f"
        if floats and not (targets == np.floor(targets)).any():
            raise ConfigError(
                "these labels are no class numbers, and the loss is the cross-entropy of class "
                "scores: for regression give the loss= that you train with"
            )
        return samples, tree, [leaf.dtype for leaf in samples[0]] if n else []

    def _begun(
        self,
        first: list[AnyArray],
        tree: Any,
        dtypes: list[np.dtype[Any]],
        targets: AnyArray,
    ) -> _Stream:
        """Make model and device for samples of the form of this one."""
        settings = self._settings
        classes = settings.loss is None
        names = tuple(dtype.name for dtype in dtypes)
        shapes = tuple(leaf.shape for leaf in first)
        target = ("int64" if classes else targets.dtype.name, targets.shape[1:])
        form = PoolForm(tree, names, shapes, target, settings.collate is not None)
        pool, model, example = self._opened(form, first)
        if pool.as_float and any(np.dtype(name).itemsize > 2 for name in names):
            # Numbers that were written as integers: the next may not be.
            form = replace(form, dtypes=tuple("float32" for _ in names))
            pool, model, example = self._opened(form, first)
        whole = targets.ndim == 1 and targets.dtype.kind in "iub"
        labels = settings.labels or len(settings.edges) + 1
        if settings.edges:
            if targets.ndim != 1:
                raise ConfigError(
                    f"edges divide one number a sample, and targets have shape {targets.shape}"
                )
        elif settings.labels is None and (classes or (whole and model.scores > 1)):
            labels = model.scores
        return _Stream(pool, model, self._make_device(model, labels), labels, example)

    def _opened(self, form: PoolForm, first: list[AnyArray]) -> tuple[SamplePool, "UserModel", int]:
        """Make a pool with an example of the form, and the model for it."""
        pool = SamplePool(form)
        dtype, shape = form.target
        example = pool.add([np.nan_to_num(leaf) for leaf in first], np.zeros(shape, dtype))
        return pool, self._user_model(pool, example), example

    def _user_model(self, pool: SamplePool, example: int) -> "UserModel":
        from fedkeep.learn.user_model import UserModel

        settings = self._settings
        return UserModel(
            settings.model,
            pool,
            example,
            loss=settings.loss,
            output=settings.output,
            collate=settings.collate,
            last_layers=settings.last_layers,
        )

    def _make_device(self, model: "UserModel", labels: int) -> Device:
        """Make the device: the one place that knows what it is made of."""
        method = self._settings.method
        device = build_device(
            method,
            model.learner,
            capacity=self._settings.capacity,
            sample_shape=(1,),
            labels=labels,
            regions=LabelRegions(labels),
            seed=self._settings.seed,
        )
        if self._settings.private:
            size = device.exchange.size(model.learner)
            encoding = method.gist.used_encoding if method.gist.kept else "float32"
            self._release = ReleasePipeline(method.privacy, size, self._save, encoding=encoding)
        device.entering = self._release.see
        device.logits = model.learner.logits_of
        return device

    def _step_correction(
        self,
        model: "UserModel",
        synced: Vector,
        batch: Batch,
        correction: Vector | None,
        stored: StoredGradients | None,
    ) -> "StepCorrection | None":
        """Make what corrects the steps of a loop in which all stored samples count alike."""
        from fedkeep.learn.step_correction import Progress, StepCorrection, UnitEvidence

        if correction is None or stored is None:
            return None
        learner, before = model.learner, stored.after
        gradient = before.mean_gradient()

        def measure(vector: Vector) -> Progress:
            seen = learner.probe(vector).measure(batch)
            return Progress(stored.noise_regression(seen), float(seen.losses().mean()))

        return StepCorrection(
            learner.layout,
            correction,
            measure,
            gradient,
            variance=float(before.projections(gradient).var()),
            loss=float(before.losses().mean()),
            evidence=UnitEvidence(*map(self._recall, ("along", "expected", "variance"))),
            mixing=lambda: model.mixing_in_training(synced, batch.take(slice(0, _CHECKED_SAMPLES))),
        )

    def _finish_steps(self) -> None:
        """Leaves the optimizer as it was, and remembers how the correction went."""
        steps = self._steps
        if steps is None:
            return
        steps.detach()
        if not steps.steps:
            return
        rises = self._recall("rises") + 1 if steps.rose else 0.0
        evidence = vars(steps.evidence)
        record = self._context.state.config_records.get(MEMORY, ConfigRecord())
        self._context.state[MEMORY] = ConfigRecord({**record, **evidence, "rises": rises})
        if rises == _MOST_RISES:
            log.warning("corrections have ended on this device: %s", steps.stopped)
        steps.steps = 0

    def _recall(self, name: str) -> float:
        """Recall a number of earlier participations from the Context; 0 at first."""
        record = self._context.state.config_records.get(MEMORY, ConfigRecord())
        return float(str(record.get(name, 0.0)))

    def _correction_status(self) -> str:
        if self._recall("rises") >= _MOST_RISES:
            return "off: the loss of the stored samples rose three times while it was used"
        if self._steps is None:
            return "none"
        return "on" if self._steps.stopped is None else f"off: {self._steps.stopped}"

    def _save(self) -> None:
        """Write all that is needed to go on; a direction that no policy asks for is left out."""
        stream = self._stream
        if stream is None:
            return
        state = stream.device.snapshot()
        if not stream.device.policy.uses_global_gradient:
            state.pop("direction", None)
        facts = {
            "labels": stream.labels,
            "example": stream.example,
            "checked": stream.checked,
            "as_float": stream.pool.as_float,
            "sizes": [stream.model.learner.size, stream.model.learner.gradient_size],
        }
        form = stream.pool.form.to_json().encode()
        self._memory.save(
            add_prefix("device", state)
            | add_prefix("pool", stream.pool.snapshot(sorted(stream.kept)))
            | add_prefix("constants", stream.model.changed_constants())
            | snapshot_parts(dict(self._release.kept(under_way=False)))
            | {name: np.array(value) for name, value in facts.items()}
            | {
                "samples": np.frombuffer(form, dtype=np.uint8),
                "counts": packed(dict(self._counts)),
            }
        )

    def _restored(self, state: State) -> _Stream:
        """Make what was saved.

        Raises
        ------
        ConfigError
            If it was saved for another model, or with options that it does not fit.
        """
        try:
            stream = self._read(state)
            learner = stream.model.learner
            saved, now = state.get("sizes"), [learner.size, learner.gradient_size]
            if saved is None or saved.tolist() == now:
                return stream
            why = f"gradients of {saved[1]} of {saved[0]} parameters, now {now[1]} of {now[0]}"
        except (FedkeepError, KeyError, ValueError) as error:
            why = (
                f"state '{error.args[0]}' is not there"
                if isinstance(error, KeyError)
                else str(error)
            )
        raise ConfigError(
            f"what this keeper saved does not fit the model and options it is opened with ({why}): "
            f"give it those of before, delete {self._memory.path} to begin anew, or, if an app has "
            "several keepers, give each a directory= of its own"
        )

    def _read(self, state: State) -> _Stream:
        """Make a stream of what was saved, whose arrays may be of another model."""
        self._counts.update(from_array(state["counts"], dict[str, int]))
        form = PoolForm.from_json(state["samples"].tobytes().decode())
        pool = SamplePool(form, as_float=bool(state["as_float"]))
        pool.restore(strip_prefix("pool", state))
        labels, example = int(state["labels"]), int(state["example"])
        if self._settings.edges and labels != len(self._settings.edges) + 1:
            raise ConfigError(
                f"{labels} intervals or classes, and edges make {len(self._settings.edges) + 1}"
            )
        model = self._user_model(pool, example)
        model.learner.load_constants(strip_prefix("constants", state))
        device = self._make_device(model, labels)
        device.restore(strip_prefix("device", state))
        kept = self._release.kept(under_way=False)
        restore_parts({n: part for n, part in kept.items() if strip_prefix(n, state)}, state)
        return _Stream(pool, model, device, labels, example, bool(state["checked"]))


def _checked_edges(edges: Sequence[float], loss: object, labels: int | None) -> tuple[float, ...]:
    """Return edges that ascend, and go with the other options."""
    found = tuple(float(edge) for edge in edges)
    if found and (loss is None or labels is not None):
        raise ConfigError(
            "edges divide numbers that are predicted: give the loss= that you train with, and "
            "leave labels out"
        )
    try:
        NumberTargets(found)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return found


def _screened(
    stream: _Stream,
    samples: list[list[AnyArray]],
    tree: Any,
    targets: AnyArray,
    edges: tuple[float, ...],
) -> tuple[AnyArray, list[str | None]]:
    """Find the region of each sample, and why one does not count; None where it does."""
    if stream.labels > 1 and not edges and targets.ndim > 1:
        raise ConfigError(
            f"a target has {targets.shape[1]} numbers, and labels={stream.labels} says that it is "
            "one label: leave labels= out, and samples are kept whatever their targets are"
        )
    labels, known = _known_labels(stream, targets, edges)
    reasons: list[str | None] = []
    for leaves, is_known in zip(samples, known.tolist(), strict=True):
        if not stream.pool.form.takes(leaves, tree):
            reasons.append("shape")
        elif not is_known:
            reasons.append("label")
        elif not all(np.isfinite(leaf).all() for leaf in leaves):
            reasons.append("not-finite")
        else:
            reasons.append(None)
    return labels, reasons


def _known_labels(
    stream: _Stream, targets: AnyArray, edges: tuple[float, ...]
) -> tuple[AnyArray, AnyArray]:
    """Find the region of each target, and which of them are valid."""
    labels = np.zeros(len(targets), dtype=np.int64)
    with np.errstate(invalid="ignore"):
        known: AnyArray = np.asarray(np.isfinite(targets.reshape(len(targets), -1)).all(axis=1))
        if edges:
            labels[known] = NumberTargets(edges).assign(targets[known])
        elif stream.labels > 1:
            whole = targets == np.floor(targets)
            known = known & whole & (targets >= 0) & (targets < stream.labels)
            labels[known] = targets[known].astype(np.int64)
    return labels, known


def _numbered(id_: int | str) -> int:
    """Give the number of a sample that its owner named: 7 and "7" differ."""
    name = f"{type(id_).__name__} {id_}".encode(errors="surrogatepass")
    return int.from_bytes(blake2b(name, digest_size=8).digest(), "little") >> 1


def _order(
    own: "UserModel", came: Any, beside: KeeperOrder, direction: Vector | None
) -> TrainOrder:
    """Make an order of what came; what is frozen goes to the layers it belongs to."""
    if isinstance(came, ArrayRecord):
        came = own.vector({name: array.numpy() for name, array in came.items()})
    local = LocalTraining(1.0, 1)  # what is trained, and how, is the user's
    given = beside.direction if direction is None else direction
    return TrainOrder(beside.round, came, given, local, beside.accepted)


def _participate(
    device: Device, order: TrainOrder, closed: Callable[[], None]
) -> tuple[Report, Vector | None, StoredGradients | None]:
    """Take part without training: the report, the first step's correction, and what it is of.

    `closed` is called between what counts for this report and what counts for the next.
    """
    participation = Participation(device, order)
    job = participation.prepare()
    closed()
    report = participation.finish(order.model)
    return report, job.correction, participation.gradients


def _require_possible(method: MethodConfig, *, durable: bool) -> None:
    """Raise if a keeper cannot keep what these options promise."""
    if method.policy.unbounded:
        raise ConfigError(
            f"policy '{method.policy_name}' keeps everything, and a keeper has a capacity"
        )
    options = method.privacy
    others = options.secure_aggregation or options.encrypted_profiles
    if others or options.protect != ("estimator",):
        raise ConfigError(
            "a keeper protects its estimate alone: privacy takes epsilon, delta, unit, clip, "
            "planned_participations and retransmissions; a mod of Flower's protects the model"
        )
    if options.epsilon is not None and not durable:
        raise ConfigError(
            "a privacy budget needs a ledger that outlives a restart: name a directory="
        )


def _content(model: Message | ArrayRecord | Vector) -> tuple[Any, KeeperOrder]:
    """Find the model, and what came with it for a keeper."""
    came: Any = model
    order = KeeperOrder()
    if isinstance(model, Message):
        order = read_order(model.content)
        came = next(iter(model.content.array_records.values()), None)
    if not isinstance(came, ArrayRecord | np.ndarray):
        raise ConfigError(
            f"sync takes the message, its ArrayRecord or a vector, not {type(came).__name__}"
        )
    return came, order


def _plain(target: AnyArray) -> Any:
    """Make a single number Python's own."""
    return target.item() if target.ndim == 0 else target
