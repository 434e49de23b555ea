"""From a configuration file to an agent that is ready to run."""

import json
import logging
import math
import re
from dataclasses import dataclass, field, fields, is_dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal

import numpy as np

import fedkeep.core.policies
from fedkeep.agent.agent import Agent
from fedkeep.agent.arrivals import Source
from fedkeep.agent.durable_store import COPIES, DurableStore
from fedkeep.agent.pacing import CommitPacer
from fedkeep.agent.payloads import PayloadDecoder
from fedkeep.agent.record import (
    CounterBook,
    DecisionLog,
    ModelVersion,
    SampleForm,
    SampleMetadata,
)
from fedkeep.agent.remote import RemoteOptions
from fedkeep.agent.retention import AgeClock, ErasedIds
from fedkeep.agent.sample_ids import DeviceName, SampleIds
from fedkeep.agent.sources import check_names, make_source
from fedkeep.agent.store_file import (
    EXTRA_BYTES,
    NAME_BYTES,
    Opened,
    StoreLayout,
    StoreOptions,
    as_found,
    least_budget,
    open_file,
    plan,
)
from fedkeep.agent.stream_watch import DriftOptions
from fedkeep.agent.uploads import UploadOptions, Uploads
from fedkeep.config.aliases import current
from fedkeep.config.device import build_device, build_memory_store, build_rules
from fedkeep.config.method import (
    DEVICE_TABLES,
    MethodConfig,
    deployed_regions,
    division_of,
    parse_method,
    table_of,
)
from fedkeep.config.options import MetricsOptions, RegionOptions, learner_of
from fedkeep.config.presets import DEFAULT
from fedkeep.core.bounds import check_range
from fedkeep.core.device import Device
from fedkeep.core.errors import ConfigError, FedkeepError, RejectedError
from fedkeep.core.protocols import DescribedState, Learner, Store
from fedkeep.core.regions import Regions, regions_for
from fedkeep.core.registry import did_you_mean
from fedkeep.core.rules.book import RuleBook
from fedkeep.core.seeds import child_seed
from fedkeep.core.state import (
    drop_learned,
    drop_misfits,
    find_spec,
    spec_bytes,
    spec_parts,
    strip_prefix,
)
from fedkeep.core.store import MemoryStore
from fedkeep.core.targets import NumberTargets, targets_of
from fedkeep.core.types import State, StateSpec
from fedkeep.core.velocity import VelocityMeter
from fedkeep.privacy import accountant as ledger
from fedkeep.privacy.options import PrivacyOptions
from fedkeep.privacy.release import ReleasePipeline, release_state_spec
from fedkeep.tables import Table, build, read_toml

assert (
    fedkeep.core.policies
)  # importing them is what registers them; the whole registry would load all data sets
log = logging.getLogger(__name__)
_HOUR = 3600.0
_BUCKETS = 12
"""Of the last hour's velocities; they are written with every commit, so few."""
_ARRAY_HEAD_BYTES = 48
"""What the file writes of an array beside its numbers, on average."""
_RULE_BYTES = 2048
"""For the names of rules, as samples say which of them hold them."""
_POLICY_BYTES = 1024
"""Left for past measurements that a policy asks for, whose number is not known beforehand."""
_LARGEST_PAYLOAD = 1 << 26
_MOST_NUMBERS, _MOST_LABELS = 1 << 28, 1 << 24
"""Far beyond any device; a slip of the pen beyond them would end in a lack of memory."""


@dataclass(frozen=True)
class AgentOptions:
    """The table `[agent]`."""

    socket: str = "fedkeep.sock"
    """The Unix socket of the local API; only its owner may use it."""
    nice: int = 10
    """The process's nice level: 19 yields to everything else."""
    cpu_cap: float = 1.0
    """The share of one core that valuation may take."""
    during_training: Literal["continue", "pause"] = "continue"
    """Whether arrivals are valued while the device trains, or wait in the queue until it has."""
    held_out: str | None = None
    """An npz file with `x` and `y` on which models are evaluated; None: on what is stored."""
    queue: int | None = None
    """Samples that may wait to be valued; None: those of 4 MB, at least 64 and at most 4,096."""
    seed: int = 0
    """Of random keys and training; 0: a store draws its keys under a secret of its own, which no \
sender can aim at."""

    def __post_init__(self) -> None:
        check_range(self, "queue", least=1, most=1 << 20)
        check_range(self, "cpu_cap", above=0, most=1)
        check_range(self, "nice", least=0, most=19)
        check_range(self, "seed", least=0, most=(1 << 63) - 1)


@dataclass(frozen=True)
class SampleOptions:
    """The table `[samples]`: what every sample looks like."""

    shape: tuple[int, ...]
    labels: int | None = None
    """How many there are; of numbers to predict, leave it out."""
    targets: Literal["class", "number"] = "class"
    """Whether `y` is a label, or a number to predict."""
    edges: tuple[float, ...] = ()
    """Where one interval of the numbers ends and the next begins: slots are divided among intervals
    as among labels. The same on all devices of a fleet; empty: not divided."""
    width: int = 1
    """How many numbers the `y` of a sample has, where they are numbers."""
    dtype: Literal["float32", "float64", "uint8", "int8", "int16", "float16"] = "float32"
    """How they are stored; the models get float32."""
    limit: float = 1e6
    """A sample with a larger number, either sign, is refused as `huge`: one would outweigh all \
others for ever."""
    decoder: str | None = None
    """What makes numbers of samples that are files, kept byte for byte: `image` (JPEG, PNG), \
`audio` (WAV, FLAC), `npy`, or `module:function` from bytes to an array; None: they are numbers."""
    payload_bytes: int = 65_536
    """The longest such file; a longer one is refused as `oversized`."""
    decoded_numbers: int = 16_000_000
    """One that would decode to more numbers, such as pixels times colours, is refused before it \
is decoded."""
    latest_days: float = 7.0
    """How much later than its own time a sample may come; one that says more, or that it is of \
the future, has a wrong clock: its age counts from its arrival."""
    names: tuple[str, ...] = ()
    """Of the labels: a source may then give a label by its name, such as `"y": "ok"`."""
    outlier: float = 0.0
    """Given, so is one whose largest number is that many times the usual; 0: what is unusual is \
kept like the rest."""

    def __post_init__(self) -> None:
        check_range(self, "limit", above=0)
        check_range(self, "outlier", "latest_days", least=0)
        check_range(self, "payload_bytes", least=64, most=_LARGEST_PAYLOAD)
        check_range(self, "decoded_numbers", least=1, most=_MOST_NUMBERS)
        if self.decoder is not None and self.dtype != "float32":
            raise ValueError(
                "dtype is of numbers, and with a decoder the files are stored: leave it out"
            )
        check_range(self, "labels", least=1, most=_MOST_LABELS)
        count, _ = targets_of(self.targets, self.labels, self.edges, self.width)
        if not self.shape or min(self.shape) < 1:
            raise ValueError(f"shape must be one or more positive numbers, got {list(self.shape)}")
        if self.names and self.targets == "number":
            raise ValueError("names are of labels, and targets are numbers: leave names out")
        if not all(self.names):
            raise ValueError("names must not hold an empty one")
        if self.names and len(set(self.names)) != count:
            raise ValueError(
                f"names must be {count} different ones, one for each label, got "
                f"{len(set(self.names))}"
            )
        if math.prod(self.shape) > _MOST_NUMBERS:
            raise ValueError(
                f"shape must make at most {_MOST_NUMBERS} numbers, got {list(self.shape)}"
            )

    @property
    def count(self) -> int:
        """The number of labels, or of the intervals of numbers."""
        return targets_of(self.targets, self.labels, self.edges, self.width)[0]

    @property
    def numbers(self) -> NumberTargets | None:
        """What targets look like that are numbers; None: they are labels."""
        return targets_of(self.targets, self.labels, self.edges, self.width)[1]


@dataclass(frozen=True)
class AgentConfig:
    """All tables of an agent's configuration file."""

    preset: str
    agent: AgentOptions
    samples: SampleOptions
    store: StoreOptions
    metrics: MetricsOptions
    upload: UploadOptions
    remote: RemoteOptions
    drift: DriftOptions
    method: MethodConfig
    """What is stored, how it counts and what is sent: the same tables as an experiment's."""
    model: Table
    accounted: bool
    """Whether the file has a table `[privacy]`: what is sent passes the guard then."""
    sources: tuple[Source, ...]
    division: RegionOptions | Regions
    """How samples are divided: by label, or around centroids that all devices share."""
    stream: str = ""
    """What this stream is called among several of one process; empty where it is the only one."""
    table: Table = field(default_factory=dict, repr=False, compare=False)
    """The tables of which it was made."""

    @property
    def regions(self) -> Regions:
        """What store and plan divide."""
        samples = self.samples
        own = regions_for(self.method.policy, samples.count, samples.numbers)
        return deployed_regions(self.division, own, samples.shape)

    @property
    def form(self) -> SampleForm:
        """What every sample looks like, as it arrives and as it is stored."""
        dtype, discounts = np.dtype(self.samples.dtype), self.method.storage.after_use == "discount"
        names = NAME_BYTES if self.store.name_bytes is None else self.store.name_bytes
        store, is_file = self.store, self.samples.decoder is not None
        extra = EXTRA_BYTES * is_file if store.extra_bytes is None else store.extra_bytes
        return SampleForm(
            dtype,
            self.samples.shape,
            store.encoding,
            store.deflate_to,
            discounts,
            names,
            self.samples.numbers,
            extra,
            self.samples.payload_bytes if is_file else None,
            store.typical_bytes,
        )


_OPTIONS: dict[str, Any] = {
    one.name: one.type
    for one in fields(AgentConfig)
    if is_dataclass(one.type) and one.name != "method"
}
_METHOD = ("policy", *(key for key in DEVICE_TABLES if key != "aggregation"))
_TABLES = ("preset", "model", "source", "regions", "rule", *_METHOD, *_OPTIONS)


def read_config(path: Path) -> AgentConfig:
    """Read and check a file; relative paths in it are relative to the working directory."""
    return parse_config(read_toml(path))


def parse_config(table: Table, *, stream: str = "") -> AgentConfig:
    """Check the tables of the configuration of one stream.

    >>> samples = {"shape": [2], "labels": 2}
    >>> config = parse_config({"samples": samples, "source": [{"kind": "lines"}]})
    >>> config.method.policy_name, config.store.budget, config.sources[0].name
    ('balanced-reservoir', 9000000, 'lines')
    """
    table = current(table)
    if "stream" in table:
        raise ConfigError("there are several streams in this file, where one is wanted")
    for key in table:
        if key not in _TABLES:
            raise ConfigError(f"unknown table '{key}': {did_you_mean(key, _TABLES)}")
    _check_device_keys(table)
    own = ("preset", "rule", "samples", *_METHOD)
    method = parse_method({key: table[key] for key in own if key in table})
    if method.policy.unbounded:
        raise ConfigError(
            f"policy '{method.policy_name}' keeps everything, which no budget of bytes can hold"
        )
    options = {name: build(kind, table.get(name, {}), name) for name, kind in _OPTIONS.items()}
    sources = table.get("source", [])
    if not isinstance(sources, list) or not all(isinstance(source, dict) for source in sources):
        raise ConfigError("sources are written as [[source]], with two brackets")
    config = AgentConfig(
        **options,
        preset=str(table.get("preset", DEFAULT)),
        method=method,
        model=dict(table.get("model", {})),
        accounted=bool(table.get("privacy")),
        sources=tuple(make_source(source, number) for number, source in enumerate(sources)),
        division=division_of(table),
        stream=stream,
        table=table,
    )
    _ = config.regions  # what is wrong of them is named before anything starts
    if config.samples.numbers is not None:
        _check_waiting_numbers(config)
    check_names(config.sources)
    _check_payloads(config)
    config.form.codec()  # says whether what is asked of it can be
    return config


def _check_waiting_numbers(config: AgentConfig) -> None:
    """Rejects what a waiting room cannot do where targets are numbers."""
    waiting = config.method.waiting
    if waiting.share and config.samples.width > 1:
        raise ConfigError(
            "[waiting] is for one number a sample, and [samples] width is "
            f"{config.samples.width}: leave [waiting] out, and give each sample with its numbers"
        )
    if waiting.pseudo_labels is not None:
        raise ConfigError(
            "[waiting] pseudo_labels is for labels, and targets are numbers: leave it out"
        )


def _check_payloads(config: AgentConfig) -> None:
    """Rejects options of the store for numbers where samples are files, and the reverse."""
    is_file, store = config.samples.decoder is not None, config.store
    if is_file and (store.encoding is not None or store.deflate_to is not None):
        raise ConfigError(
            "[store] encoding and deflate_to are for numbers: with [samples] decoder the files are "
            "kept as they came"
        )
    if store.typical_bytes is not None and not is_file:
        raise ConfigError(
            "[store] typical_bytes is for files: set [samples] decoder, or leave it out"
        )
    if store.typical_bytes is not None and config.method.waiting.share:
        raise ConfigError(
            "[store] typical_bytes is for stores without a waiting room: leave it out, or set "
            "[waiting] share = 0"
        )
    if (store.typical_bytes or 0) > config.samples.payload_bytes:
        raise ConfigError("[store] typical_bytes must be at most [samples] payload_bytes")


def _check_device_keys(table: Table) -> None:
    """Rejects keys of the method that a device does not read."""
    if "capacity" in table_of(table, "storage"):
        raise ConfigError(
            "'storage.capacity' is an experiment's: an agent keeps what 'store.budget' holds"
        )
    for key in table_of(table, "estimator"):
        if key != "name":
            raise ConfigError(f"'estimator.{key}' is the server's: set it in fleet.toml")


def assemble(config: AgentConfig) -> Agent:
    """Make the agent, with its store open and its state restored.

    A first model is installed if the file brings one.
    """
    shape, labels, targets = config.samples.shape, config.samples.count, config.samples.numbers
    _try_model(config.model, shape)
    learner = learner_of(config.model, shape, labels, targets)
    check_model(learner, shape, labels, targets)
    privacy = config.method.privacy if config.accounted else None

    def layout_of(options: StoreOptions) -> StoreLayout:
        chosen = replace(config, store=options)
        state = _state_bytes(_state_spec(chosen, learner, privacy))
        state += COPIES * _RULE_BYTES * bool(config.method.rules)
        return plan(options, chosen.form, state)

    decode = _decoder(config.samples)
    extra = config.form.extra_bytes
    config = replace(config, store=as_found(config.store, lambda o: layout_of(o).capacity, extra))
    layout, spec = layout_of(config.store), _state_spec(config, learner, privacy)
    opened = open_file(layout, labels, _model_name(config.model), config.samples.names)
    try:
        index = _memory_store(config)
        clock = AgeClock(config.store.tolerance)
        decisions = DecisionLog(config.store.decisions, config.method.policy_name)
        slots = layout.capacity - config.method.waiting.slots(layout.capacity)
        store = DurableStore(
            opened.file,
            index,
            config.form,
            decisions,
            clock,
            slots,
            layout.sample_cells,
            decode,
            config.regions,
        )
        draw_seed = child_seed(config.agent.seed or opened.now["salt"], "keys")
        rules = _rules_over(config, index, store)
        device = _make_device(config, learner, store, layout.capacity, draw_seed, rules)
        agent = Agent(device, store, layout.reserve, config, decode)
        state = _carried_over(store.load(opened.blobs), opened, spec)
        _check_waiting(config, layout, len(store.records))
        damaged = bool(opened.file.damage)
        if privacy is not None:
            _guard(agent, privacy, state, damaged=damaged)
        agent.restore(state, damaged=damaged)
        if rules is not None and rules.store.slots > device.capacity:
            device.selection.divide()  # rules that are new take their slots from the policy's
        if device.model is None and "path" in config.model:
            device.set_model(learner.initial(0))
        if config.upload.enabled:
            agent.uploads = Uploads(agent)
    except BaseException:
        opened.file.disk.close()
        raise
    return agent


def _decoder(samples: SampleOptions) -> PayloadDecoder | None:
    """Return what makes numbers of files, where samples are files."""
    if samples.decoder is None:
        return None
    return PayloadDecoder(samples.decoder, samples.shape, samples.decoded_numbers)


def _check_waiting(config: AgentConfig, layout: StoreLayout, stored: int) -> None:
    """Rejects a waiting room that would take slots in which samples are stored."""
    waiting = config.method.waiting
    if waiting.slots(layout.capacity) + stored > layout.capacity and stored:
        capacity = layout.capacity
        while capacity - waiting.slots(capacity) < stored:
            capacity += 1
        least = least_budget(config.store, config.form, layout.state_bytes, capacity)
        raise ConfigError(
            f"{config.store.path} holds {stored} samples, and [waiting] share = {waiting.share:g} "
            f"leaves {layout.capacity - waiting.slots(layout.capacity)} slots to them: set "
            f"[store] budget to {least} or more, or a smaller share"
        )


def budget_for(config: AgentConfig, count: int) -> int:
    """Return the smallest budget in bytes that holds this many samples beside all else."""
    state = _state_within(config)

    def state_of(options: StoreOptions) -> int:
        """Erased ids are all that a budget changes of it."""
        return state + options.erasure_bytes - config.store.erasure_bytes

    return least_budget(config.store, config.form, state_of, count)


def slots_within(config: AgentConfig) -> int:
    """Return how many samples the budget of a configuration holds; 0 where it holds none."""
    try:
        return plan(config.store, config.form, _state_within(config)).capacity
    except ConfigError:
        return 0


def _state_within(config: AgentConfig) -> int:
    """Return the bytes of what the device commits besides samples."""
    samples = config.samples
    learner = learner_of(config.model, samples.shape, samples.count, samples.numbers)
    privacy = config.method.privacy if config.accounted else None
    state = _state_bytes(_state_spec(config, learner, privacy))
    return state + COPIES * _RULE_BYTES * bool(config.method.rules)


def _memory_store(config: AgentConfig) -> MemoryStore:
    none = np.zeros(config.regions.count, dtype=np.int64)
    return build_memory_store(config.method, none, config.samples.count)


def _rules_over(config: AgentConfig, index: MemoryStore, store: DurableStore) -> RuleBook | None:
    """Make what matches the rules, and let the store know which of its samples they hold."""
    rules = build_rules(config.method, index, config.samples.names)
    if rules is None:
        return None
    numbers = {rule.name: number for number, rule in enumerate(rules.rules)}
    store.log.rules = tuple(numbers)
    store.source_bytes += _RULE_BYTES

    def groups_of(note: SampleMetadata) -> list[tuple[int, int]]:
        held_by = [numbers[name] for name in note.rules if name in numbers]
        return [
            (number, rules.group(rules.rules[number], note.label, note.source, _time_of(note)))
            for number in held_by
        ]

    store.groups_of = groups_of
    return rules


def _time_of(note: SampleMetadata) -> float:
    """Return a sample's own time, or that of its arrival."""
    return note.wall if math.isnan(note.time) else note.time


def _make_device(
    config: AgentConfig,
    learner: Learner,
    store: Store,
    capacity: int,
    draw_seed: int,
    rules: RuleBook | None = None,
) -> Device:
    regions = config.regions
    return build_device(
        config.method,
        learner,
        capacity=capacity,
        sample_shape=config.samples.shape,
        labels=config.samples.count,
        targets=config.samples.numbers,
        regions=regions,
        store=store,
        meter=VelocityMeter(regions.count, _HOUR, _BUCKETS, least=10.0),
        seed=config.agent.seed,
        draw_seed=draw_seed,
        journal=store if isinstance(store, DurableStore) else None,
        rules=rules,
    )


def _state_spec(config: AgentConfig, learner: Learner, privacy: PrivacyOptions | None) -> StateSpec:
    """Describe all that is committed besides samples and decisions.

    It is in every whole commit: with each participation, and at most once a minute between two,
    where only arrays that changed are written.
    """
    device = _make_device(config, learner, _memory_store(config), capacity=1, draw_seed=0)
    parts: dict[str, DescribedState] = {
        "device": device,
        "clock": AgeClock(),
        "counters": CounterBook(),
        "tombstones": ErasedIds(config.store.erasure_bytes),
        "model": ModelVersion(),
        "ids": SampleIds({}),
        "identity": DeviceName(),
        "pacer": CommitPacer(0.0, 0, int),
    }
    return spec_parts(parts) | release_state_spec(privacy, config.method.exchange.size(learner))


def _state_bytes(spec: StateSpec) -> int:
    return spec_bytes(spec) + _ARRAY_HEAD_BYTES * len(spec) + _POLICY_BYTES


def _guard(agent: Agent, privacy: PrivacyOptions, state: State, *, damaged: bool) -> None:
    """Put the release pipeline before the agent.

    A ledger that is lost is not an empty one: then nothing starts.
    """
    # Beside the store, since neither may take the other with it.
    file = ledger.LedgerFile(agent.store_path.with_name(agent.store_path.name + ".ledger"))
    recorded = strip_prefix("gate.ledger", state)
    try:
        spendings = file.found(recorded, damaged=damaged and not recorded)
    except RejectedError as refusal:
        raise ConfigError(str(refusal)) from None

    def keep(spent: State) -> None:
        try:
            file.commit(spent)
        except OSError as error:
            why = f"the privacy ledger cannot be written ({error.strerror}); nothing was sent"
            raise RejectedError("disk", why) from error

    device = agent.device
    agent.release_pipeline = ReleasePipeline(
        privacy,
        device.exchange.size(device.learner),
        agent.require_commit,
        lock=agent.lock,
        ledger=spendings,
        keep=keep,
        encoding="float32" if device.gist is None else device.gist.options.used_encoding,
    )


def _model_name(model: Table) -> str:
    """Name a model by what it is known by: its table, with its file's content where it has one."""
    table = {key: value for key, value in model.items() if key not in ("sha256", "load_seconds")}
    if "path" in model:
        path = Path(str(model["path"]))
        try:
            table["path"] = blake2b(path.read_bytes(), digest_size=16).hexdigest()
        except OSError as error:
            raise ConfigError(f"cannot read the model {path}: {error.strerror}") from error
    return json.dumps(table, sort_keys=True, default=str)[:512]


def _try_model(model: Table, shape: tuple[int, ...]) -> None:
    """Run a model's file once where it can do no harm, before it is loaded here."""
    for key in ("sha256", "load_seconds"):
        if key in model and "path" not in model:
            raise ConfigError(f"[model] {key} is for a model from a file: give its path, too")
    if "path" not in model:
        return
    from fedkeep.agent.model_trial import LOAD_SECONDS, try_model  # a megabyte for processes

    sha256, seconds = model.get("sha256"), model.get("load_seconds", LOAD_SECONDS)
    if sha256 is not None and not re.fullmatch(r"[0-9a-fA-F]{64}", str(sha256)):
        raise ConfigError("[model] sha256 must be 64 hex digits, as sha256sum prints them")
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0:
        raise ConfigError(f"[model] load_seconds must be above 0, got {seconds!r}")
    try_model(Path(str(model["path"])), sha256, shape, float(seconds))


def check_model(
    learner: Learner, shape: tuple[int, ...], labels: int, targets: NumberTargets | None = None
) -> None:
    """Has the model look at one sample of zeros, before anything is written."""
    try:
        model, sample = (np.zeros(size, dtype=np.float32) for size in (learner.size, (1, *shape)))
        outputs = learner.logits(model, sample)
    except FedkeepError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever a runtime raises, the model does not take such samples
        reason = (
            str(error).strip().splitlines()[-1][:200]
            if str(error).strip()
            else type(error).__name__
        )
        raise ConfigError(
            f"[model] does not take samples of [samples] shape = {list(shape)}: {reason}; "
            "set the shape it was made for"
        ) from None
    if targets is not None:
        if outputs.shape != (1, targets.width):
            raise ConfigError(
                f"[model] has {outputs.shape[-1]} outputs, but a target of [samples] has "
                f"{targets.width}: set width to the model's"
            )
    elif outputs.shape != (1, labels):
        raise ConfigError(
            f"[model] has {outputs.shape[-1]} outputs, but [samples] labels = {labels}: "
            "set labels to the model's"
        )


def _carried_over(state: State, opened: Opened, spec: StateSpec) -> State:
    """Keep what of a store's state still means the same; samples always do."""
    before, now = opened.before, opened.now
    _, misfits = drop_misfits(state, spec)
    divided = [name for name in misfits if (form := find_spec(spec, name)) and not form.learned]
    if before.get("edges") != now.get("edges"):
        log.warning(
            "[samples] edges is another than before: samples stay, model, plan and rates begin anew"
        )
    elif before["labels"] != now["labels"]:
        log.warning(
            "[samples] labels was %d and is %d: samples stay, model, plan and rates begin anew",
            before["labels"],
            now["labels"],
        )
    elif divided:
        log.warning(
            "[policy] divides slots otherwise than before: samples stay,"
            " model, plan and rates begin anew"
        )
    elif before["model"] != now["model"]:
        log.warning("[model] is another than before: samples stay, what was learned begins anew")
        return drop_learned(state, spec)
    else:
        return state
    kept = drop_learned(state, spec)
    return {name: array for name, array in kept.items() if not name.startswith("device.")}
