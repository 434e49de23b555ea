"""From a configuration file to an agent that is ready to run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedkeep.agent.agent import Agent
from fedkeep.agent.arrivals import Source
from fedkeep.agent.audit import DecisionLog
from fedkeep.agent.clock import DAY, AgeClock
from fedkeep.agent.disk import FileDisk
from fedkeep.agent.durable_store import DurableStore
from fedkeep.agent.form import SampleForm
from fedkeep.agent.ledgers import REMEMBERED
from fedkeep.agent.opening import Layout, StoreOptions, open_file, plan
from fedkeep.agent.options import AgentOptions, MetricsOptions, SampleOptions
from fedkeep.agent.privacy import Privacy
from fedkeep.agent.sources import make_source
from fedkeep.config import Table, build, merged, read_toml
from fedkeep.core.device import Device, DeviceOptions
from fedkeep.core.errors import ConfigError
from fedkeep.core.names import did_you_mean
from fedkeep.core.policy import SelectionPolicy
from fedkeep.core.ports import Learner
from fedkeep.core.regions import LabelRegions, Regions, SingleRegion
from fedkeep.core.store import AfterUse, MemoryStore
from fedkeep.core.velocity import VelocityMeter, Window
from fedkeep.core.weighting import UNCOORDINATED, Weighting
from fedkeep.learn.models import learner_for
from fedkeep.presets import DEFAULT, device_tables
from fedkeep.registry import find_policy

_TABLES = (
    "preset", "agent", "samples", "model", "policy", "store", "device", "after_use", "weights", "metrics", "privacy",
    "source",
)  # fmt: skip
_HOUR = 3600.0
_BUCKETS = 12
"""Of the window of velocities; they are written with every commit, so few."""
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
    metrics: MetricsOptions
    policy_name: str
    policy: SelectionPolicy
    model: Table
    privacy: Table
    sources: tuple[Source, ...]

    @property
    def form(self) -> SampleForm:
        return SampleForm(np.dtype(self.samples.dtype), self.samples.shape)


def read_config(path: Path) -> AgentConfig:
    """The file, checked; relative paths in it are relative to the working directory."""
    return parse_config(read_toml(path))


def parse_config(table: Table) -> AgentConfig:
    for key in table:
        if key not in _TABLES:
            raise ConfigError(f"unknown table '{key}': {did_you_mean(key, _TABLES)}")
    preset, policy_name = str(table.get("preset", DEFAULT)), str(table.get("policy", {}).get("name", "ode"))
    table = merged(device_tables(preset, policy_name), table)
    samples = build(SampleOptions, table.get("samples", {}), "samples")
    policy = build(find_policy(policy_name), {k: v for k, v in table["policy"].items() if k != "name"}, "policy")
    if policy.unbounded:
        raise ConfigError(f"policy '{policy_name}' keeps everything, which no budget of bytes can hold")
    sample_bytes = SampleForm(np.dtype(samples.dtype), samples.shape).nbytes
    sources = table.get("source", [])
    if not isinstance(sources, list):
        raise ConfigError("sources are written as [[source]], with two brackets")
    return AgentConfig(
        preset=preset,
        agent=build(AgentOptions, table.get("agent", {}), "agent"),
        samples=samples,
        store=build(StoreOptions, table.get("store", {}), "store"),
        device=build(DeviceOptions, table["device"], "device"),
        after_use=build(AfterUse, table["after_use"], "after_use"),
        weights=build(Weighting, table["weights"], "weights") if policy.coordinated else UNCOORDINATED,
        metrics=build(MetricsOptions, table.get("metrics", {}), "metrics"),
        policy_name=policy_name,
        policy=policy,
        model=dict(table.get("model", {})),
        privacy=dict(table.get("privacy", {})),
        sources=tuple(make_source(dict(t), i, sample_bytes) for i, t in enumerate(sources)),
    )


def build_learner(config: AgentConfig) -> Learner:
    """The model of `[model]`: an exported file by `path`, else one of ours or a torch factory by `name`."""
    options: dict[str, Any] = dict(config.model)
    path = options.pop("path", None)
    name = options.pop("name", "onnx" if path else "softmax")
    if path is None:
        last_layers = options.pop("last_layers", 1)
        return learner_for(
            name, config.samples.shape, config.samples.labels, last_layers=last_layers or None, options=options
        )
    if options:
        raise ConfigError(f"a model from a file has no option '{min(options)}': remove it from [model]")
    from fedkeep.learn.onnx_learner import OnnxLearner

    return OnnxLearner(Path(str(path)))


@dataclass(frozen=True)
class Assembly:
    agent: Agent
    layout: Layout
    disk: FileDisk


def assemble(config: AgentConfig) -> Assembly:
    """The agent with its store open and its state restored; a first model is installed if the file brings one."""
    learner = build_learner(config)
    privacy = Privacy.configured(config.privacy, config.device) if config.privacy else None
    if privacy is not None:
        learner = privacy.clipping(learner)
    layout = plan(config.store, config.form, _state_bytes(learner, config))
    regions: Regions = LabelRegions(config.samples.labels) if config.policy.coordinated else SingleRegion()
    index = MemoryStore(np.zeros(regions.count, dtype=np.int64), config.after_use)
    file, contents, disk = open_file(config.store, config.form, layout.geometry)
    clock = AgeClock(config.store.clock_tolerance_hours * _HOUR)
    log = DecisionLog(config.store.decisions, config.policy_name)
    store = DurableStore(file, index, config.form, log, clock, layout.capacity)
    device = Device(
        learner=learner,
        policy=config.policy,
        store=store,
        regions=regions,
        meter=VelocityMeter(regions.count, _window(config.agent.velocity_window_seconds)),
        capacity=layout.capacity,
        sample_shape=config.samples.shape,
        labels=config.samples.labels,
        weighting=config.weights,
        options=config.device,
        seed=config.agent.seed,
    )
    agent = Agent(
        device, store, config.form, config.samples.labels, config.agent,
        commit_seconds=config.store.commit_ms / 1000, ttl_seconds=config.store.ttl_days * DAY, reserve=layout.reserve,
        store_path=Path(config.store.path), preset=config.preset,
    )  # fmt: skip
    state = store.load(contents)
    if privacy is not None:
        privacy.guard(agent, state, damaged=bool(contents.damage))
    agent.restore(state)
    if device.model is None and "path" in config.model:
        device.install(learner.initial(0))
    return Assembly(agent, layout, disk)


def _window(seconds: float) -> Window:
    return Window(seconds, _BUCKETS, least=min(_LEAST_SECONDS, seconds))


def _state_bytes(learner: Learner, config: AgentConfig) -> int:
    """What is committed besides samples: model, direction, estimator with its pending copy, the guard's two, and two
    of a secure sum's."""
    meter = _BUCKETS * config.samples.labels * 8
    guarded, summed = 8 if config.privacy else 0, 16 if config.privacy.get("secure_sum") else 0
    return 4 * learner.size + (4 + 8 + 4 + guarded + summed) * learner.gradient_size + meter + 8 * REMEMBERED + 4096
