"""The synthetic task as a Flower simulation on ray, which `simulator.py` compares with its own.

The devices and the server are the same. The loop is as lean as Flower allows: messages are pushed,
and replies pulled every few milliseconds. Each worker loads the task once. `stock` sends by
Flower's own `send_and_receive`.

`run_simulation` is deprecated in favour of `flwr run`, which would put a SuperLink and its database
between the two and make Flower slower. The comparison is with Flower's fastest form for as long as
there is one.
"""

import os
import sys
from collections.abc import Callable, Iterable
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter, sleep
from typing import Any

from flwr.app import Context, Message, MessageType
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fedkeep.config.experiment import resolve
from fedkeep.flower.client_app import device_number, make_client_app
from fedkeep.flower.codec import decode_report, encode_all
from fedkeep.flower.device_memory import DeviceMemory
from fedkeep.protocol.messages import Participate
from fedkeep.sim.assembly import Assembly
from fedkeep.sim.engine import Simulator

APP = str(Path(__file__).resolve().parents[1] / "examples" / "flower_app")
sys.path.append(APP)
from fedkeep_app.catch_up import CatchUpDevice  # noqa: E402

DEVICES, PARTICIPANTS = 20, 10
TABLE: dict[str, Any] = {
    "task": {"name": "synthetic", "devices": DEVICES},
    "policy": {"name": "ode"},
    "train": {"participation": PARTICIPANTS / DEVICES},
}
Exchange = Callable[[Grid, list[Message]], Iterable[Message]]


def simulated(rounds: int) -> list[float]:
    """Seconds a round in the simulator."""
    simulator = Simulator(resolve(TABLE))
    return [_timed(lambda: simulator.play_round(evaluated=False)) for _ in range(rounds)]


def flower(rounds: int, *, stock: bool) -> list[float]:
    """Seconds a round in Flower's simulation after a first one, in which its actors start."""
    with TemporaryDirectory() as home:
        os.environ |= {
            "FLWR_HOME": home,
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
        }
        os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
        os.environ["PYTHONPATH"] = os.pathsep.join([APP, os.environ.get("PYTHONPATH", "")])
        from flwr.simulation import run_simulation

        seconds: list[float] = []
        app = ServerApp()
        exchange = _send_and_receive if stock else _push_and_pull

        @app.main()
        def main(grid: Grid, context: Context) -> None:  # noqa: ARG001
            seconds.extend(_play(grid, rounds, exchange))

        run_simulation(
            app, client_app(), DEVICES, backend_config={"client_resources": {"num_cpus": 1}}
        )
    return seconds


def client_app() -> ClientApp:
    return make_client_app(_device)


@cache
def _parts() -> Assembly:
    return Simulator(resolve(TABLE)).parts


def _device(context: Context) -> CatchUpDevice:
    number, parts = device_number(context), _parts()
    parts.fleet.devices.pop(number, None)  # type: ignore[union-attr]
    device = parts.fleet.device(number)  # type: ignore[union-attr]
    arrivals = partial(parts.stream.arrivals, number)
    return CatchUpDevice(device, arrivals, parts.data.test_batch(number), DeviceMemory(context))


def _play(grid: Grid, rounds: int, exchange: Exchange) -> Iterable[float]:
    parts = Simulator(resolve(TABLE)).parts
    while len(nodes := sorted(grid.get_node_ids())) < DEVICES:
        sleep(0.1)
    return [_timed(lambda: _play_round(grid, parts, nodes, exchange)) for _ in range(1 + rounds)][
        1:
    ]


def _play_round(grid: Grid, parts: Assembly, nodes: list[int], exchange: Exchange) -> None:
    """A round; which node is which device makes no difference to the time it takes."""
    server = parts.server
    orders = server.open_round(server.select(server.round, range(DEVICES), PARTICIPANTS))
    messages = [
        Message(content, nodes[device], MessageType.TRAIN, group_id=str(server.round))
        for device, content in zip(
            orders, encode_all(map(Participate, orders.values())), strict=True
        )
    ]
    parameters = len(server.model) + parts.learner.gradient_size
    devices = {nodes[device]: device for device in orders}
    for reply in exchange(grid, messages):
        server.receive(
            devices[reply.metadata.src_node_id], decode_report(reply.content, parameters)
        )
    if missing := server.close_round().missing:
        raise RuntimeError(f"devices {missing} did not answer")


def _send_and_receive(grid: Grid, messages: list[Message]) -> Iterable[Message]:
    return grid.send_and_receive(messages)


def _push_and_pull(grid: Grid, messages: list[Message]) -> list[Message]:
    waiting, replies = set(grid.push_messages(messages)), []
    while waiting:
        for reply in grid.pull_messages(list(waiting)):
            waiting.discard(reply.metadata.reply_to_message_id)
            replies.append(reply)
        sleep(0.002)
    return replies


def _timed(job: Callable[[], object]) -> float:
    began = perf_counter()
    job()
    return perf_counter() - began
