"""Sends reports through a mechanism from children that are killed; prints what went and its cost.

Run by test_kills.py as a separate process: `killed_sender.py LEDGER KILLS charge-first|send-first`.
"""

import itertools
import json
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np

from fedkeep.core.types import LocalTraining, Report, State, TrainOrder
from fedkeep.privacy.accountant import LedgerFile
from fedkeep.privacy.mechanism import DPMechanism
from fedkeep.privacy.options import PrivacyOptions

P = 16
OPTIONS = PrivacyOptions(epsilon=1.0, unit="device", planned_participations=1_000_000)


def send_until_killed(path: Path, outbox: int, charge_first: bool) -> None:
    """The device: one report after the other, each a byte in the outbox once it has left."""
    file = LedgerFile(path)
    waiting: list[State] = []
    mechanism = DPMechanism(
        OPTIONS, file.open(), file.commit if charge_first else waiting.append, np.zeros
    )
    order = TrainOrder(0, np.zeros(P, np.float32), None, LocalTraining(0.1, 1))
    for number in itertools.count(1):
        fresh = np.full(P, 0.1 / number, np.float32)
        mechanism.release(Report(0, order.model, 1.0, 1, 1, fresh, 1), order)
        os.write(outbox, b"r")
        while waiting:
            file.commit(waiting.pop())


def sent_by_a_killed_child(path: Path, after: int, delay: float, charge_first: bool) -> int:
    """How many reports left a child that was killed `delay` seconds after its report `after`."""
    inbox, outbox = os.pipe()
    child = os.fork()
    if child == 0:
        send_until_killed(path, outbox, charge_first)
    os.close(outbox)
    for _ in range(after):
        os.read(inbox, 1)
    time.sleep(delay)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with os.fdopen(inbox, "rb") as received:
        return after + len(received.read())


def main(path: Path, kills: int, charge_first: bool) -> None:
    OPTIONS.noise_multiplier()  # loads the accountant once, before the children are forked
    LedgerFile(path).found({}, damaged=False)
    rng = np.random.default_rng(0)
    sent, undercounts = 0, 0
    for _ in range(kills):
        after, delay = int(rng.integers(0, 3)), float(rng.uniform(0.0, 0.005))
        sent += sent_by_a_killed_child(path, after, delay, charge_first)
        undercounts += int(LedgerFile(path).open().snapshot()["releases"][0]) < sent
    charged = int(LedgerFile(path).open().snapshot()["releases"][0])
    sys.stdout.write(json.dumps({"sent": sent, "charged": charged, "undercounts": undercounts}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "charge-first")
