"""A real agent against a hostile server: it refuses, goes on, stops when asked, starts again."""

import socket
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from fedkeep.core.errors import FedkeepError, RejectedError
from fedkeep.core.screening import FASTEST_RATE, LARGEST_PARAMETER, LAST_ROUND, MOST_EPOCHS
from fedkeep.core.types import LocalTraining, TrainOrder, Vector
from fedkeep.deploy.credentials import provision
from fedkeep.privacy.secagg.protocol import (
    Keys,
    MaskingDevice,
    PartyKeys,
    SecureAggregationConfig,
    decode,
    encode,
)
from fedkeep.protocol.client import AgentClient
from fedkeep.protocol.framing import receive_frame, send_frame
from fedkeep.protocol.messages import Answered, AskSum, Participate
from tests.agent.test_agent_process import lines, running, write_config

MODEL: Vector = np.linspace(-1, 1, 21, dtype=np.float32)
SOUND = TrainOrder(3, MODEL, None, LocalTraining(0.1, 2))
HOSTILE = [
    ("order-round", replace(SOUND, round=2**31)),
    ("order-epochs", replace(SOUND, local=LocalTraining(0.1, 10**9))),
    *(
        ("order-learning-rate", replace(SOUND, local=LocalTraining(rate, 1)))
        for rate in (-1.0, np.nan, np.inf)
    ),
    ("order-batch-size", replace(SOUND, local=LocalTraining(0.1, 1, batch_size=10**9))),
    ("model-too-large", replace(SOUND, model=np.full_like(MODEL, 1e30))),
]
AT_THE_BOUNDS = replace(
    SOUND,
    round=LAST_ROUND,
    model=np.full_like(MODEL, LARGEST_PARAMETER),
    global_gradient=np.full_like(MODEL, -LARGEST_PARAMETER),
    local=LocalTraining(FASTEST_RATE, MOST_EPOCHS, 1),
)
HOSTILE_TERMS: list[dict[str, Any]] = [
    {"update_norm": 1e308},
    {"gradient_norm": 1e308},
    {"update_norm": np.nan},
    {"weight_unit": 0.0},
    {"rate": 2.0},
    {"summands": 2, "threshold": 2},
    {"threshold": 1},
    {"session": b"short"},
]


def fed(folder: Path, count: int) -> None:
    (folder / "in.jsonl").write_text(lines(count))
    source = f'[[source]]\nkind = "socket"\naddress = "unix://{folder}/in.sock"\n'
    write_config(folder, f'[[source]]\nkind = "lines"\npath = "in.jsonl"\n{source}')


def await_samples(client: AgentClient, count: int) -> None:
    deadline = time.monotonic() + 120
    while client.status().counters.get("seen", 0) < count and time.monotonic() < deadline:
        time.sleep(0.02)
    assert client.status().counters["seen"] >= count


def test_hostile_orders_are_refused_and_the_agent_starts_again(tmp_path: Path) -> None:
    fed(tmp_path, 30)
    with running(tmp_path, "agent.toml"), AgentClient(str(tmp_path / "a.sock")) as client:
        await_samples(client, 30)
        for reason, order in HOSTILE:
            with pytest.raises(RejectedError, match=reason):
                client.participate(order)
        assert client.status().round == -1, "nothing of them is stored"
        assert client.participate(SOUND).samples > 0
        client.participate(AT_THE_BOUNDS)
    with running(tmp_path, "agent.toml"), AgentClient(str(tmp_path / "a.sock")) as client:
        assert np.isfinite(client.participate(replace(SOUND, round=4)).model).all()


def test_a_hostile_sum_gets_no_word_out_of_an_agent(tmp_path: Path) -> None:
    made = provision(tmp_path / "fleet", ["localhost"], ["a", "b", "c"])
    fed(tmp_path, 30)
    members = f'members = "{tmp_path}/fleet/nodes"\nmember_key = "{made.node_key("a")}"\n'
    with (tmp_path / "agent.toml").open("a") as file:
        file.write(f"[privacy]\nsecure_sum = true\n{members}")
    terms = SecureAggregationConfig(bytes(16), 0, 3, 3, 1e3, 1e3, 0, 50.0, 50.0, 0.5)
    with running(tmp_path, "agent.toml"), AgentClient(str(tmp_path / "a.sock")) as client:
        await_samples(client, 30)
        with pytest.raises(RejectedError, match="in the clear"):
            client.participate(SOUND)
        for changed in HOSTILE_TERMS:
            with pytest.raises(RejectedError, match=r"sum-terms|threshold|too few devices"):
                client.ask(
                    Participate.of(SOUND, encode(msgspec.structs.replace(terms, **changed))),
                    Answered,
                )
        assert client.status().round == -1, "nothing of them is stored"
        keys = decode(client.ask(Participate.of(SOUND, encode(terms)), Answered).answer, Keys).keys
        invented = {d: MaskingDevice(d, terms.session, 3).keys() for d in (1, 2)}
        with pytest.raises(RejectedError, match="not a member"):
            client.ask(AskSum(encode(PartyKeys(terms.session, {0: keys, **invented}))), Answered)


def test_a_training_agent_answers_acknowledges_and_stops_before_its_end(tmp_path: Path) -> None:
    fed(tmp_path, 400)
    with (
        running(tmp_path, "agent.toml") as process,
        AgentClient(str(tmp_path / "a.sock")) as client,
    ):
        await_samples(client, 400)
        long = replace(SOUND, local=LocalTraining(0.01, MOST_EPOCHS, 1))
        trained = threading.Event()

        def take_part() -> None:
            with suppress(FedkeepError), AgentClient(str(tmp_path / "a.sock")) as other:
                other.participate(long)
                trained.set()

        taking_part = threading.Thread(target=take_part, daemon=True)
        taking_part.start()
        time.sleep(0.5)
        assert client.status().samples > 100
        sender = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sender.connect(str(tmp_path / "in.sock"))
        send_frame(
            sender, msgspec.msgpack.encode({"x": np.zeros(6, "<f4").tobytes(), "y": 0, "id": 10**6})
        )
        assert msgspec.msgpack.decode(receive_frame(sender) or b"")["fate"]
        assert not trained.is_set(), "all of that happened while it trained"
        process.terminate()
        assert process.wait(120) == 0
        taking_part.join(60)
        assert not trained.is_set(), "it did not train to the end first"
        sender.close()
    with running(tmp_path, "agent.toml"), AgentClient(str(tmp_path / "a.sock")) as client:
        assert client.status().counters["seen"] >= 401
