"""What a secure sum costs in CPU seconds and bytes, for a device and for the server.

    python benchmarks/secure_sum.py [--quick] [--json FILE]

Then whole rounds over Flower's messages, in one process, against the same rounds in the clear:
devices, server, codec and serialisation all count. `flower.py --secure` does that over a real
SuperLink.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from flwr.app import Message
from flwr.common.serde import message_to_proto

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "examples" / "flower_app")]

from fedkeep.flower.rounds import RoundOptions  # noqa: E402
from fedkeep.privacy.secagg.fixed_point import WORD  # noqa: E402
from fedkeep.privacy.secagg.protocol import AggregationSession, MaskingDevice  # noqa: E402
from tests.flower.in_process import InProcessGrid  # noqa: E402
from tests.flower.small_fleet import SmallFleet  # noqa: E402

SIZES = ((10, 850), (10, 44_426), (25, 850), (50, 850), (50, 44_426))
ROUNDS = ((10, 30), (10, 1000), (25, 30))
"""Devices, and features of a softmax regression over ten labels."""


def measure(count: int, size: int) -> dict[str, float]:
    """One sum over `count` devices of `size` integers each, checked against the plain sum."""
    threshold, dropped = count * 2 // 3 + 1, count // 10
    words = np.arange(size, dtype=WORD)
    devices = {i: MaskingDevice(i, b"benchmark", threshold, words.tobytes()) for i in range(count)}
    server = AggregationSession(b"benchmark", threshold, size)
    start = time.process_time()
    roster = server.open({i: device.keys() for i, device in devices.items()}).keys
    sent = {i: device.share(roster) for i, device in devices.items()}
    shared = time.process_time()
    envelopes = server.route(sent)
    for i in range(dropped, count):
        server.receive(i, devices[i].mask(envelopes[i].envelopes))
    masked = time.process_time()
    unmaskings = {i: devices[i].unmask(server.survivors()) for i in server.survivors()}
    unmasked = time.process_time()
    total = server.total(unmaskings)
    ended = time.process_time()
    if not np.array_equal(total, words * np.uint64(count - dropped)):
        raise SystemExit("the sum is wrong")
    left = count - dropped
    return {
        "devices": count,
        "words": size,
        "dropped": dropped,
        "device_s": (shared - start) / count
        + (masked - shared) / left
        + (unmasked - masked) / left,
        "device_kB": (sum(map(len, sent[0].envelopes.values())) + WORD.itemsize * size) / 1e3,
        "clear_kB": WORD.itemsize * size / 1e3,
        "server_s": ended - unmasked,
    }


class CountingGrid(InProcessGrid):
    """Counts the bytes of all messages, as Flower serialises them."""

    down = up = 0

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        outgoing = list(messages)
        self.down += sum(message_to_proto(message).ByteSize() for message in outgoing)
        return super().push_messages(outgoing)

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        replies = super().pull_messages(message_ids)
        self.up += sum(message_to_proto(reply).ByteSize() for reply in replies)
        return replies


def play(devices: int, features: int, rounds: int, *, secure: bool) -> dict[str, float]:
    """CPU seconds and bytes a round and device, after a first round."""
    task = {
        "name": "demo",
        "devices": devices,
        "smallest": 60,
        "largest": 120,
        "features": features,
        "labels": 10,
    }
    table = {"task": task, "privacy": {"secure_aggregation": secure}}
    options = RoundOptions(participation=1.0, deadline=600.0, quorum=0.0)
    fleet = SmallFleet(devices=devices, rounds=rounds + 1, options=options, table=table)
    strategy, grid = fleet.strategy(), CountingGrid(fleet.grid().nodes.values())
    playing = strategy.rounds(grid, rounds + 1)
    next(playing)
    grid.down = grid.up = 0
    began = time.process_time()
    for _ in playing:
        pass
    seconds = (time.process_time() - began) / rounds
    share = 1e3 * rounds * devices
    return {"seconds": seconds, "down_kB": grid.down / share, "up_kB": grid.up / share}


def compare(devices: int, features: int, rounds: int) -> dict[str, float]:
    """A round in the clear and by a secure sum, over the same devices and model."""
    clear, secure = (play(devices, features, rounds, secure=secure) for secure in (False, True))
    figures: dict[str, float] = {"devices": devices, "parameters": 10 * (features + 1)}
    for name, value in clear.items():
        figures |= {
            f"clear_{name}": value,
            f"secure_{name}": secure[name],
            f"{name}_ratio": secure[name] / value,
        }
    return figures


def print_rounds(compared: list[dict[str, float]]) -> None:
    print(
        "\ndevices  parameters   CPU s a round: clear   secure  ratio"
        "    kB up: clear  secure  ratio   kB down: ratio"
    )
    for r in compared:
        print(
            f"{r['devices']:7} {r['parameters']:11}"
            f" {r['clear_seconds']:22.3f} {r['secure_seconds']:8.3f} {r['seconds_ratio']:6.1f}"
            f" {r['clear_up_kB']:15.1f} {r['secure_up_kB']:7.1f} {r['up_kB_ratio']:6.2f}"
            f" {r['down_kB_ratio']:16.2f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="ten devices only")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    runs = [measure(count, size) for count, size in (SIZES[:1] if options.quick else SIZES)]
    print("devices  words  dropped  a device: s      kB  in the clear kB  server: s")
    for r in runs:
        print(
            f"{r['devices']:7} {r['words']:6} {r['dropped']:8}"
            f" {r['device_s']:12.3f} {r['device_kB']:7.1f}"
            f" {r['clear_kB']:16.1f} {r['server_s']:10.2f}"
        )
    compared = [
        compare(*size, rounds=2 if options.quick else 5)
        for size in (ROUNDS[:1] if options.quick else ROUNDS)
    ]
    print_rounds(compared)
    if options.json:
        options.json.write_text(json.dumps({"sums": runs, "rounds": compared}, indent=1) + "\n")


if __name__ == "__main__":
    main()
