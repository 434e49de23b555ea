"""A stream to try an agent with: samples of the embedded task, in real time.

An agent's configuration names it: `[[source]] kind = "iterator"`, `function =
"fedkeep.data.demo_stream:arrivals"`. Environment: FEDKEEP_DEVICE and FEDKEEP_DEVICES number the
device, FEDKEEP_RATE is samples a second.
"""

import os
import time
from collections.abc import Iterator
from itertools import count

from fedkeep.core.types import AnyArray
from fedkeep.data import Stream, StreamOptions
from fedkeep.data.synthetic import Demo

_BLOCK = 32


def arrivals() -> Iterator[tuple[AnyArray, int]]:
    """Yield the device's endless stream of samples.

    After a restart it goes on with new samples, as a sensor would.
    """
    device, devices = int(os.environ["FEDKEEP_DEVICE"]), int(os.environ["FEDKEEP_DEVICES"])
    pause = 1.0 / float(os.environ.get("FEDKEEP_RATE", "20"))
    stream = Stream(Demo(devices=devices).load(seed=0), StreamOptions(), seed=int(time.time()))
    for position in count(step=_BLOCK):
        block = stream.between(device, position, position + _BLOCK)
        for x, y in zip(block.x, block.y.tolist(), strict=True):
            yield x, y
            time.sleep(pause)
