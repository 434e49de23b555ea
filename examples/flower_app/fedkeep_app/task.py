"""Simulated devices: each catches up on its own part of a task's stream when it is woken."""

from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path

from flwr.app import Context
from flwr.app.user_config import UserConfig

from fedkeep.config.experiment import Experiment, resolve
from fedkeep.config.method import DEPLOYMENT_KEYS
from fedkeep.flower.client_app import NodeDevice, device_number
from fedkeep.flower.device_memory import DeviceMemory
from fedkeep.flower.server_app import tables_of
from fedkeep.privacy.options import PrivacyOptions
from fedkeep.sim.assembly import SimulationContext, simulation_context
from fedkeep_app.catch_up import CatchUpDevice

NOT_THE_EXPERIMENT = {"samples", "state_dir", "output", *DEPLOYMENT_KEYS}


def experiment_of(run_config: UserConfig) -> Experiment:
    """Resolve the run config's fleet, with the data of its `task`, as `fedkeep run` would."""
    return resolve(
        {
            key: value
            for key, value in tables_of(run_config).items()
            if key not in NOT_THE_EXPERIMENT
        }
    )


def simulated_device(context: Context) -> NodeDevice:
    """Make the node's device, which catches up on its stream when it is woken."""
    number, ground = device_number(context), _ground(tuple(sorted(context.run_config.items())))
    arrivals, test = partial(ground.stream.arrivals, number), ground.data.test_batch(number)
    directory = context.node_config.get("state-dir") or context.run_config.get("state-dir")
    run = str(context.run_config.get("state.run", "default"))
    memory = DeviceMemory(
        Path(str(directory)) / f"{run}-device-{number}.npz" if directory else context
    )
    return CatchUpDevice(
        ground.device(number), arrivals, test, memory, _privacy(context, ground.experiment)
    )


@lru_cache(maxsize=1)
def _ground(run_config: tuple[tuple[str, str | int | float | bool], ...]) -> SimulationContext:
    """Make what devices share, once in a process that serves several."""
    return simulation_context(experiment_of(dict(run_config)))


def _privacy(context: Context, experiment: Experiment) -> PrivacyOptions:
    """Take the run's options; the key to seal profiles to is the node's own to name."""
    key = str(context.node_config.get("public-key", ""))
    privacy = experiment.privacy
    return replace(
        privacy, encrypted_profiles=privacy.encrypted_profiles or bool(key), public_key=key
    )
