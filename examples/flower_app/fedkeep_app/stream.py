"""A stream for a device's agent: samples of the example's task, in real time.

The agent's configuration names it: `[[source]] kind = "iterator"`, `function = "fedkeep_app.stream:arrivals"`.
Environment: FEDKEEP_DEVICE and FEDKEEP_DEVICES number the device, FEDKEEP_RATE is samples a second.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

from fedkeep.core.types import AnyArray
from fedkeep.data import TASKS, Stream, StreamOptions

_BLOCK = 32


def arrivals() -> Iterator[tuple[AnyArray, int]]:
    """The device's endless stream; after a restart it goes on with new samples, as a sensor would."""
    device, devices = int(os.environ["FEDKEEP_DEVICE"]), int(os.environ["FEDKEEP_DEVICES"])
    pause = 1.0 / float(os.environ.get("FEDKEEP_RATE", "20"))
    data = TASKS["embedded"](devices=devices).load(seed=0)  # type: ignore[call-arg]
    stream = Stream(data, StreamOptions(), seed=int(time.time()))
    position = 0
    while True:
        block = stream.between(device, position, position + _BLOCK)
        for x, y in zip(block.x, block.y.tolist(), strict=True):
            yield x, y
            time.sleep(pause)
        position += _BLOCK
