"""The same words mean the same in the simulator, the agent, the Flower app and the Keeper."""

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Context, RecordDict
from flwr.app.user_config import UserConfig

from fedkeep.agent.assembly import AgentConfig, assemble, parse_config
from fedkeep.agent.service import Service
from fedkeep.config.experiment import Experiment, resolve
from fedkeep.config.presets import DEFAULT_POLICY, PRESETS, device_tables
from fedkeep.core.errors import ConfigError
from fedkeep.flower.client_app import AgentDevice
from fedkeep.flower.device_memory import DeviceMemory
from fedkeep.flower.keeper import Keeper
from fedkeep.learn.models import learner_for
from fedkeep.protocol.messages import AskProfile, Profiled
from fedkeep.tables import Table

POLICIES = ("ode", "fifo", "reservoir", "high-loss")


def experiment(preset: str, policy: str) -> Experiment:
    return resolve({"preset": preset, "policy": {"name": policy}, "task": {"name": "demo"}})


def agent(preset: str, policy: str, **tables: Table) -> AgentConfig:
    samples = {"shape": [3], "labels": 2}
    return parse_config(
        {"preset": preset, "policy": {"name": policy}, "samples": samples, **tables}
    )


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_preset_makes_the_same_device_in_simulator_and_agent(preset: str, policy: str) -> None:
    simulated, real = experiment(preset, policy), agent(preset, policy)
    assert real.policy == simulated.policy
    assert real.weights == simulated.weights
    assert real.after_use == simulated.storage.rule()
    assert real.device == simulated.storage.device(simulated.estimator)


def test_nothing_said_is_the_default_preset() -> None:
    said = parse_config({"samples": {"shape": [3], "labels": 2}})
    assert said == agent("default", DEFAULT_POLICY)
    assert said != agent("paper", "ode")


def test_an_agents_own_keys_go_before_the_preset() -> None:
    config = agent("paper", "ode", after_use={"name": "discount"}, weights={"client_label": 0.25})
    assert config.after_use.name == "discount"
    assert config.weights.client_label == 0.25


def test_a_misspelt_preset_is_named() -> None:
    with pytest.raises(ConfigError, match="unknown preset 'papr': did you mean 'paper'"):
        agent("papr", "ode")


def kept_after_two_offers(preset: str) -> set[bytes]:
    """What is left of the first offer's samples after a sync and as many arrivals more."""
    context = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config={})
    learner = learner_for("softmax", (3,), 2, last_layers=1)
    rng = np.random.default_rng(0)
    with Keeper(learner, DeviceMemory(context), 6, "balanced-reservoir", preset) as keeper:
        keeper.offer(rng.normal(size=(20, 3)) * 3, np.arange(20) % 2)
        keeper.sync(learner.initial(0), np.ones(learner.gradient_size, dtype=np.float32))
        first = {x.tobytes() for x, _ in keeper.samples()}
        keeper.offer(rng.normal(size=(20, 3)) / 100, np.arange(20) % 2)
        return first & {x.tobytes() for x, _ in keeper.samples()}


def test_a_keeper_follows_the_preset() -> None:
    assert device_tables("paper", "ode")["after_use"] == {"name": "keep"}
    assert len(kept_after_two_offers("paper")) > 0, (
        "the paper keeps what is worth most, however old"
    )
    if device_tables("default", "ode")["after_use"]["name"] == "evict_trained_first":
        assert not kept_after_two_offers("default"), "what was trained on makes way"


@pytest.mark.parametrize(
    ("run", "agrees"),
    [({}, True), ({"preset": "default", "policy.name": DEFAULT_POLICY}, True), ({"preset": "paper"}, False),
     ({"policy.name": "fifo"}, False)],
)  # fmt: skip
def test_an_agent_of_another_method_takes_no_part(
    tmp_path: Path, run: UserConfig, agrees: bool
) -> None:
    socket = str(tmp_path / "a.sock")
    table: Table = {
        "samples": {"shape": [3], "labels": 2},
        "agent": {"socket": socket},
        "store": {"path": str(tmp_path / "store"), "budget": 200_000},
    }
    real = assemble(parse_config(table))
    with closing(Service(real)):
        device = AgentDevice(Context(1, 1, {"agent-socket": socket}, RecordDict(), run))
        if agrees:
            said = device.reply(AskProfile())
            assert isinstance(said, Profiled)
            assert said.profile.capacity == real.device.capacity
        else:
            with pytest.raises(ConfigError, match="make the two the same"):
                device.reply(AskProfile())
