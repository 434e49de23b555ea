"""A device without torch: an agent keeps samples of a stream and its gist, and a server trains.

    python examples/on_device.py

The agent is a separate process, as on a real device. Samples reach it by a socket, orders by
another.
"""

import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import numpy as np

from fedkeep.core.types import LocalTraining, TrainOrder
from fedkeep.protocol.client import AgentClient, AgentUnreachableError
from fedkeep.protocol.framing import receive_frame, send_frame

CONFIG = """
[samples]
shape = [20]
labels = 5

[model]
name = "softmax"

[store]
path = "{folder}/samples.store"
budget = 150_000

[agent]
socket = "{folder}/agent.sock"

[[source]]
kind = "socket"
address = "unix://{folder}/samples.sock"
overload = "wait"
"""
RNG = np.random.default_rng(0)
CENTRES = RNG.standard_normal((5, 20)) * 1.5


def stream(count: int, first: int) -> list[bytes]:
    """Samples around five centres, one of them rare; each a record of bytes, a label and an id."""
    labels = RNG.choice(5, count, p=[0.4, 0.3, 0.2, 0.08, 0.02])
    x = (CENTRES[labels] + RNG.standard_normal((count, 20))).astype("<f4")
    rows = zip(x, labels.tolist(), range(first, first + count), strict=True)
    return [
        msgspec.msgpack.encode({"x": row.tobytes(), "y": label, "id": id_})
        for row, label, id_ in rows
    ]


def connect(path: str) -> AgentClient:
    """Waits for the agent to start."""
    for _ in range(300):
        try:
            return AgentClient(path)
        except AgentUnreachableError:
            time.sleep(0.1)
    raise SystemExit("the agent did not start")


def send(sender: socket.socket, records: list[bytes]) -> dict[str, int]:
    """Sends samples and waits until the fate of each is on the agent's disk."""
    for record in records:
        send_frame(sender, record)
    fates: dict[str, int] = {}
    for _ in records:
        fate = msgspec.msgpack.decode(receive_frame(sender) or b"")["fate"]
        fates[fate] = fates.get(fate, 0) + 1
    return fates


def main(folder: Path) -> None:
    config = folder / "agent.toml"
    config.write_text(CONFIG.format(folder=folder))
    agent = subprocess.Popen(
        [sys.executable, "-m", "fedkeep.agent", str(config)], stderr=subprocess.DEVNULL
    )
    try:
        with connect(f"{folder}/agent.sock") as client, socket.socket(socket.AF_UNIX) as sender:
            sender.connect(f"{folder}/samples.sock")
            train(client, sender)
    finally:
        agent.terminate()
        agent.wait()


def train(client: AgentClient, sender: socket.socket) -> None:
    """Five rounds with one device: the server averages, and sends back the fleet's gist."""
    print("first samples:", send(sender, stream(500, first=0)))
    profile = client.profile()
    print(f"the device can store {profile.capacity} samples")
    print(f"it sees per second: {profile.velocity.round(1)}")
    model, direction = np.zeros(5 * 20 + 5, dtype=np.float32), None
    for round_ in range(5):
        order = TrainOrder(round_, model, direction, LocalTraining(0.1, 5), round_ - 1)
        report = client.participate(order)
        model, direction = report.model, report.local_gradient
        fates = send(sender, stream(400, first=1000 * (round_ + 1)))
        print(f"round {round_}: trained on {report.samples} samples; since then {fates}")
    result = client.evaluate(model)
    print(
        f"on its own {result.samples} {result.data} samples"
        f" the model is right in {result.accuracy:.0%}"
    )
    for row in client.stored().labels:
        print(
            f"label {row.label}: {row.count} samples, values {row.lowest:.3g} .. {row.highest:.3g}"
        )
    decisions = client.why("5399").decisions
    print(
        "why is sample 5399 stored or not?", decisions[-1] if decisions else "no longer remembered"
    )


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        main(Path(name))
