"""The same words mean the same in the simulator, the agent, the Flower app and the Keeper."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Context, RecordDict
from flwr.app.user_config import UserConfig

from fedkeep.agent.assembly import AgentConfig, assemble, parse_config
from fedkeep.agent.service import Service
from fedkeep.config.experiment import Experiment, resolve
from fedkeep.config.presets import DEFAULT_POLICY, PRESETS
from fedkeep.core.errors import ConfigError
from fedkeep.core.types import Profile
from fedkeep.flower import codec
from fedkeep.flower.client_app import app
from fedkeep.flower.keeper import Keeper
from fedkeep.flower.server_app import open_fleet
from fedkeep.protocol.messages import Profiled
from fedkeep.tables import Table
from tests.flower.in_process import InProcessGrid, InProcessNode, make_node

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
    method = real.method
    assert method.policy == simulated.policy
    assert method.weights == simulated.weights
    assert method.gist == simulated.gist
    assert method.storage == simulated.storage
    assert method.storage.device(method.estimator) == simulated.storage.device(simulated.estimator)


def test_nothing_said_is_the_default_preset() -> None:
    said = parse_config({"samples": {"shape": [3], "labels": 2}})
    assert said == agent("default", DEFAULT_POLICY)
    assert said != agent("paper", "ode")


def test_an_agents_own_keys_go_before_the_preset() -> None:
    config = agent(
        "paper", "ode", storage={"after_use": "discount"}, weights={"client_label": 0.25}
    )
    assert config.method.storage.after_use == "discount"
    assert config.method.weights.client_label == 0.25


def test_a_misspelt_preset_is_named() -> None:
    with pytest.raises(ConfigError, match="unknown preset 'papr': did you mean 'paper'"):
        agent("papr", "ode")


def kept_after_two_offers(preset: str) -> set[bytes]:
    """What is left of the first offer's samples after a sync and as many arrivals more."""
    context = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config={})
    softmax = torch.nn.Linear(3, 2)
    rng = np.random.default_rng(0)
    with Keeper.open(context, softmax, 6, policy="balanced-reservoir", preset=preset) as keeper:
        keeper.offer(rng.normal(size=(20, 3)) * 3, np.arange(20) % 2)
        keeper.sync(ArrayRecord(softmax.state_dict()), np.ones(8, dtype=np.float32))
        first = {x.tobytes() for x, _ in keeper.samples()}
        keeper.offer(rng.normal(size=(20, 3)) / 100, np.arange(20) % 2)
        return first & {x.tobytes() for x, _ in keeper.samples()}


def test_a_keeper_follows_the_preset() -> None:
    assert len(kept_after_two_offers("paper")) > 0, (
        "the paper keeps what is worth most, however old"
    )
    assert not kept_after_two_offers("default"), "what was trained on makes way"


@pytest.fixture
def real(tmp_path: Path) -> Iterator[Callable[..., InProcessNode]]:
    """Makes nodes beside real agents, each behind its socket."""
    with ExitStack() as opened:

        def make(number: int, run: UserConfig, **tables: Table) -> InProcessNode:
            socket = str(tmp_path / f"{number}.sock")
            table: Table = {
                "samples": {"shape": [3], "labels": 2},
                "agent": {"socket": socket},
                "store": {"path": str(tmp_path / f"{number}.store"), "budget": 200_000},
                **tables,
            }
            opened.enter_context(closing(Service(assemble(parse_config(table)))))
            node = make_node(number, app, run)
            node.context.node_config["agent-socket"] = socket
            return node

        yield make


RUN: UserConfig = {
    "samples.shape": "[3]",
    "samples.labels": 2,
    "model.name": "softmax",
    "train.participation": 1.0,
    "rounds.deadline": 20.0,
}
"""What the agents' configuration agrees with."""


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"gist": {"mode": "local"}}, "gist.mode is 'local' on the device, 'shared' in the fleet"),
        ({"policy": {"name": "fifo"}}, "regions is '1' on the device, '2' in the fleet"),
        ({"gist": {"mode": "shared", "last_layers": 1}}, "gist.last_layers is '1' on the device"),
        ({"preset": "paper"}, "exchange is 'models' on the device, 'models and gists'"),
    ],
    ids=["gist", "regions", "layout", "preset"],
)
def test_a_device_of_another_method_is_rejected_with_the_difference(
    real: Callable[..., InProcessNode], tables: dict[str, Table], words: str
) -> None:
    strategy = open_fleet(RUN)
    grid = InProcessGrid([real(0, RUN), real(1, RUN, **tables)])
    (outcome,) = strategy.rounds(grid, 1)
    assert outcome.summary.participants == (0,)
    (rejection,) = outcome.rejections
    assert words in rejection.detail


def test_capacity_encodings_local_rules_and_privacy_may_differ(
    real: Callable[..., InProcessNode],
) -> None:
    strategy = open_fleet(RUN)
    other: dict[str, Table] = {
        "storage": {"after_use": "keep", "quotas": "hard", "rescore": False},
        "gist": {"drift_weight": 0.1, "encoding": "int8", "max_ess": 10.0},
        "privacy": {"epsilon": 8.0, "unit": "device", "planned_participations": 9},
    }
    (outcome,) = strategy.rounds(InProcessGrid([real(0, RUN), real(1, RUN, **other)]), 1)
    assert not outcome.rejections
    assert outcome.summary.participants == (0, 1)


class Earlier(msgspec.Struct, frozen=True, tag="Profiled"):
    """`Profiled` as it was before a profile had an agreement with it."""

    profile: Profile
    device: int | None = None
    name: str = ""


def test_an_agent_of_an_earlier_release_still_connects() -> None:
    said = codec.encode(Earlier(Profile(4, np.array([1.0, 2.0])), 3, "hall"))
    assert codec.decode_profile(said, 2, {"gist.mode": "shared"})[1:] == (3, "hall")


def test_an_earlier_server_reads_the_profile_of_a_present_agent() -> None:
    said = codec.encode(Profiled(Profile(4, np.array([1.0, 2.0])), 3, "hall", {"regions": "2"}))
    read = codec.decode(said, Earlier)
    assert (read.device, read.name, read.profile.capacity) == (3, "hall", 4)
