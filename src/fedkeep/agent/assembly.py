"""From a configuration file to an agent that is ready to run."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

import fedkeep.core.policies
from fedkeep.agent.agent import Agent
from fedkeep.agent.arrivals import Source
from fedkeep.agent.audit import DecisionLog
from fedkeep.agent.disk import FileDisk
from fedkeep.agent.durable_store import DurableStore
from fedkeep.agent.layout import StoreLayout, StoreOptions, least_budget, plan
from fedkeep.agent.ledgers import REMEMBERED, AgeClock
from fedkeep.agent.opening import Opened, carried_over, check_model, identity_of, open_file
from fedkeep.agent.options import AgentOptions, SampleOptions
from fedkeep.agent.record import SampleForm
from fedkeep.agent.sources import make_source
from fedkeep.config import Table, build, merged, read_toml
from fedkeep.core.device import Device, DeviceOptions
from fedkeep.core.errors import ConfigError, RefusedError
from fedkeep.core.gist import GistOptions, packed_bytes
from fedkeep.core.names import did_you_mean
from fedkeep.core.policy import POLICIES, SelectionPolicy
from fedkeep.core.ports import Learner
from fedkeep.core.regions import regions_for
from fedkeep.core.state import take_under
from fedkeep.core.store import AfterUse, MemoryStore
from fedkeep.core.types import State
from fedkeep.core.velocity import VelocityMeter
from fedkeep.core.weighting import UNCOORDINATED, Weighting
from fedkeep.fleet.model import learner_of
from fedkeep.fleet.options import MetricsOptions
from fedkeep.loading import find_component
from fedkeep.presets import DEFAULT, DEFAULT_POLICY, device_tables
from fedkeep.privacy.ledger import REMEMBERED as COSTED
from fedkeep.privacy.ledger import ROW_BYTES as COST_BYTES

if TYPE_CHECKING:
    from fedkeep.privacy.options import PrivacyOptions

assert fedkeep.core.policies  # importing them is what registers them; the whole registry would load all data sets
_TABLES = (
    "preset", "agent", "samples", "model", "policy", "store", "device", "after_use", "weights", "gist", "metrics",
    "privacy", "source",
)  # fmt: skip
_HOUR = 3600.0
_BUCKETS = 12
"""Of the window of velocities; they are written with every commit, so few."""
_BY_LABEL = 11
"""More numbers a label: quota, assigned quota and weight, share, target, declared rate, two windows' counts, and the
three that tell what a gist is made of."""
_LEAST_SECONDS = 10.0
"""A device younger than this says how much it has seen as if it were this old."""


@dataclass(frozen=True)
class AgentConfig:
    """All tables of an agent's configuration file."""

    preset: str
    agent: AgentOptions
    samples: SampleOptions
    store: StoreOptions
    device: DeviceOptions
    after_use: AfterUse
    weights: Weighting
    gist: GistOptions
    metrics: MetricsOptions
    policy_name: str
    policy: SelectionPolicy
    model: Table
    privacy: Table
    sources: tuple[Source, ...]

    @property
    def form(self) -> SampleForm:
        stored, discounts = self.store, self.after_use.name == "discount"
        dtype = np.dtype(self.samples.dtype)
        return SampleForm(dtype, self.samples.shape, stored.encoding, stored.deflate_to, discounts)


def read_config(path: Path) -> AgentConfig:
    """The file, checked; relative paths in it are relative to the working directory."""
    return parse_config(read_toml(path))


def parse_config(table: Table) -> AgentConfig:
    """The tables of a configuration, checked.

    >>> config = parse_config({"samples": {"shape": [2], "labels": 2}, "source": [{"kind": "lines"}]})
    >>> config.policy_name, config.store.budget, config.sources[0].name
    ('draw', 9000000, 'lines')
    """
    for key in table:
        if key not in _TABLES:
            raise ConfigError(f"unknown table '{key}': {did_you_mean(key, _TABLES)}")
    preset, policy_name = str(table.get("preset", DEFAULT)), str(table.get("policy", {}).get("name", DEFAULT_POLICY))
    table = merged(device_tables(preset, policy_name), table)
    samples = build(SampleOptions, table.get("samples", {}), "samples")
    kind = find_component(POLICIES, policy_name)
    policy = build(kind, {k: v for k, v in table["policy"].items() if k != "name"}, "policy")
    if policy.unbounded:
        raise ConfigError(f"policy '{policy_name}' keeps everything, which no budget of bytes can hold")
    sample_bytes = SampleForm(np.dtype(samples.dtype), samples.shape).nbytes
    sources = table.get("source", [])
    if not isinstance(sources, list):
        raise ConfigError("sources are written as [[source]], with two brackets")
    config = AgentConfig(
        preset=preset,
        agent=build(AgentOptions, table.get("agent", {}), "agent"),
        samples=samples,
        store=build(StoreOptions, table.get("store", {}), "store"),
        device=build(DeviceOptions, table["device"], "device"),
        after_use=build(AfterUse, table["after_use"], "after_use"),
        weights=build(Weighting, table["weights"], "weights") if policy.coordinated else UNCOORDINATED,
        gist=build(GistOptions, table["gist"], "gist"),
        metrics=build(MetricsOptions, table.get("metrics", {}), "metrics"),
        policy_name=policy_name,
        policy=policy,
        model=dict(table.get("model", {})),
        privacy=dict(table.get("privacy", {})),
        sources=tuple(make_source(dict(t), i, sample_bytes) for i, t in enumerate(sources)),
    )
    config.form.codec()  # says whether what is asked of it can be
    return config


@dataclass(frozen=True)
class AssembledAgent:
    agent: Agent
    layout: StoreLayout
    disk: FileDisk


def assemble(config: AgentConfig) -> AssembledAgent:
    """The agent with its store open and its state restored; a first model is installed if the file brings one."""
    learner = learner_of(config.model, config.samples.shape, config.samples.labels)
    check_model(learner, config.samples.shape, config.samples.labels)
    privacy = privacy_options(config.privacy, config.device, config.gist)
    layout = plan(config.store, config.form, _state_bytes(learner, config, privacy))
    opened = open_file(config.store, config.form, layout, identity_of(config.model, config.samples.labels))
    try:
        return _around(config, opened, layout, learner, privacy)
    except BaseException:
        opened.disk.close()
        raise


def _around(
    config: AgentConfig, opened: Opened, layout: StoreLayout, learner: Learner, privacy: "PrivacyOptions | None"
) -> AssembledAgent:
    """The agent around an open store."""
    regions, seconds = regions_for(config.policy, config.samples.labels), config.agent.velocity_window_seconds
    none = np.zeros(regions.count, dtype=np.int64)
    index = MemoryStore(none, config.after_use, bends=config.device.quotas == "targets")
    clock = AgeClock(config.store.clock_tolerance_hours * _HOUR)
    log = DecisionLog(config.store.decisions, config.policy_name)
    store = DurableStore(opened.file, index, config.form, log, clock, layout.capacity)
    device = Device(
        learner,
        config.policy,
        capacity=layout.capacity,
        sample_shape=config.samples.shape,
        labels=config.samples.labels,
        regions=regions,
        store=store,
        meter=VelocityMeter(regions.count, seconds, _BUCKETS, least=min(_LEAST_SECONDS, seconds)),
        weighting=config.weights,
        options=config.device,
        gist=config.gist,
        clip=_clip(privacy),
        seed=config.agent.seed,
    )
    agent = Agent(device, store, config.form, layout.reserve, config.agent, config.samples, config.store, config.preset)
    state = carried_over(store.load(opened.contents), opened, learner, regions.count)
    damaged = bool(opened.contents.damage)
    if privacy is not None:
        _guard(agent, privacy, state, damaged=damaged)
    agent.restore(state, damaged=damaged)
    if device.model is None and "path" in config.model:
        device.install(learner.initial(0))
    return AssembledAgent(agent, layout, opened.disk)


def budget_for(config: AgentConfig, samples: int) -> int:
    """The smallest budget in bytes that holds this many samples beside all else."""
    learner = learner_of(config.model, config.samples.shape, config.samples.labels)
    state = _state_bytes(learner, config, None)
    return least_budget(config.store, config.form, state, samples)


def _state_bytes(learner: Learner, config: AgentConfig, privacy: "PrivacyOptions | None") -> int:
    """What is committed besides samples: model, direction, estimator with its pending copy, the guard's two, and two
    of a secure sum's.

    Whatever more a device comes to keep is in its snapshot, and so in every whole commit: with each participation, and
    at most once a minute between two, where only arrays that changed are written. Its bytes must be counted here.
    """
    by_label = (_BUCKETS + _BY_LABEL) * config.samples.labels * 8
    guarded, summed = 8 if config.privacy else 0, 16 if config.privacy.get("secure_sum") else 0
    counted = COSTED * COST_BYTES if privacy is not None and privacy.counts_samples else 0
    kept = config.gist
    gist = packed_bytes(learner.tail(kept.last_layers), kept.encoding, kept.block) if kept.kept else 0
    told = 8 if _clip(privacy) is not None else 0
    vectors = 4 * learner.size + (4 + 8 + 4 + told + guarded + summed) * learner.gradient_size + gist
    return vectors + by_label + counted + 8 * REMEMBERED + 4096


def privacy_options(table: Table, device: DeviceOptions, gist: GistOptions) -> "PrivacyOptions | None":
    """The table `[privacy]`; its libraries are loaded only where there is one, for they are not small."""
    if not table:
        return None
    from fedkeep.privacy.options import PrivacyOptions

    options = build(PrivacyOptions, table, "privacy")
    if options.counts_samples and device.gradient_from == "stored":
        raise ConfigError("device.gradient_from 'stored' sends a sample many times: set privacy.unit = 'device'")
    if options.counts_samples and gist.shared:
        raise ConfigError("a shared gist tells of a sample in many rounds: set privacy.unit = 'device'")
    return options


def _clip(privacy: "PrivacyOptions | None") -> float | None:
    """The length to which each sample's gradient is shortened before it is told, as the noise needs it."""
    return privacy.clip if privacy is not None and privacy.protects("estimator") else None


def _guard(agent: Agent, privacy: "PrivacyOptions", state: State, *, damaged: bool) -> None:
    """Puts the door before the agent; a ledger that is lost is not an empty one: then nothing starts."""
    from fedkeep.keyholder.parties import ProfileSealer
    from fedkeep.privacy.door import Door
    from fedkeep.privacy.ledger import LedgerFile

    file = LedgerFile(agent.ledger_path)
    said = take_under("gate.ledger", state)
    try:
        ledger = file.found(said, damaged=damaged and not said)
    except RefusedError as refusal:
        raise ConfigError(str(refusal)) from None

    def keep(spent: State) -> None:
        try:
            file.commit(spent)
        except OSError as error:
            why = f"the privacy ledger cannot be written ({error.strerror}); nothing was sent"
            raise RefusedError("disk", why) from error

    size = agent.device.learner.gradient_size
    agent.close_door(Door(privacy, size, agent.require_commit, lock=agent.lock, ledger=ledger, keep=keep))
    if privacy.encrypted_profiles:  # a file that is not there, or not the one pinned, is said now
        ProfileSealer(privacy.public_context, privacy.context_digest).public()
