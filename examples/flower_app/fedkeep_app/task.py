"""The task: an experiment of `fedkeep run`, taken apart for a server and its devices."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from flwr.app import Context
from flwr.app.user_config import UserConfig

from fedkeep.config import Table
from fedkeep.core.types import Vector
from fedkeep.flower.client_app import device_number
from fedkeep.flower.codec import Sizes
from fedkeep.flower.device_memory import ContextMemory, DeviceMemory, FileMemory
from fedkeep.flower.hidden_device import HiddenDevice
from fedkeep.flower.node_device import CatchUpDevice, NodeDevice
from fedkeep.flower.server_app import tables_of
from fedkeep.privacy.options import PrivacyOptions
from fedkeep.privacy.sum_member import SumMember
from fedkeep.sim.assembly import Assembly, assemble
from fedkeep.sim.experiment import Experiment, resolve
from fedkeep.sim.fleet import Fleet

NOT_THE_EXPERIMENT = {"rounds", "state", "state_dir", "keyholder", "output"}


def experiment_of(run_config: UserConfig) -> Experiment:
    """The experiment in the app's run config."""
    table: Table = {key: value for key, value in tables_of(run_config).items() if key not in NOT_THE_EXPERIMENT}
    return resolve(table)


def server_parts(run_config: UserConfig) -> tuple[Experiment, Assembly, Sizes]:
    """The server with its first model, and the sizes of every message of this task.

    The simulator's plan is dropped: the devices that come are planned for, by the profiles they declare.
    """
    experiment = experiment_of(run_config)
    parts = assemble(experiment)
    sizes = Sizes(len(parts.server.model), parts.learner.gradient_size, _regions(parts))
    parts.server.plan = None
    return experiment, parts, sizes


def simulated_device(context: Context) -> NodeDevice:
    """The node's device, which catches up on its stream when it is woken."""
    number, experiment = device_number(context), experiment_of(context.run_config)
    parts = assemble(experiment)
    if not isinstance(parts.fleet, Fleet):
        raise TypeError("this policy keeps everything: run it in the simulator")
    arrivals = partial(parts.stream.arrivals, number)
    test, memory = parts.data.test_batch(number), _memory(context, number)
    privacy = _privacy(context, experiment)
    device = CatchUpDevice(parts.fleet.device(number), arrivals, test, memory, privacy)
    if not privacy.secure_sum:
        return device
    member = SumMember(privacy, parts.learner.gradient_size)
    return HiddenDevice(device, member, _memory(context, number, "sums"))


def accuracy(parts: Assembly, model: Vector) -> float:
    """The share of all devices' test samples that the model gets right."""
    test = parts.data.pooled_test
    return float(np.mean(np.argmax(parts.learner.logits(model, test.x), axis=1) == test.y))


def _privacy(context: Context, experiment: Experiment) -> PrivacyOptions:
    """The run's, but the key to encrypt profiles under is the node's own to say: the server cannot bring another."""
    keys = context.node_config.get("public-context")
    if keys is None:
        return experiment.privacy
    digest = str(context.node_config.get("context-digest", ""))
    return replace(experiment.privacy, encrypted_profiles=True, public_context=str(keys), context_digest=digest)


def _memory(context: Context, number: int, what: str = "device") -> DeviceMemory:
    """A file if the node or the run has a `state-dir`, so that the device outlives restarts; else Flower's context."""
    directory = context.node_config.get("state-dir") or context.run_config.get("state-dir")
    if not directory:
        return ContextMemory(context, what)
    run = str(context.run_config.get("state.run", "default"))
    return FileMemory(Path(str(directory)) / f"{run}-{what}-{number}.npz")


def _regions(parts: Assembly) -> int:
    """How many regions a profile speaks of."""
    return 0 if parts.server.plan is None else parts.server.plan.quotas.shape[1]
