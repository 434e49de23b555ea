"""Datasets, partitions and streams: what each device of a simulated fleet sees, and when.

>>> from fedkeep.data import TASKS, Stream, StreamOptions
>>> fleet = TASKS["demo"](devices=3).load(seed=0)
>>> stream = Stream(fleet, StreamOptions(rounds_per_pass=100), seed=0)
>>> len(stream.arrivals(0, 0, 10)) == stream.position(0, 10)
True
"""

from fedkeep.core.registry import Registry
from fedkeep.data.cache import Progress
from fedkeep.data.custom import AudioMnist, Custom, UjiIndoor, Westermo
from fedkeep.data.engines import CMapss
from fedkeep.data.fashion_mnist import FashionMnist
from fedkeep.data.federation import Federation, ModelSpec, Ownership, Task
from fedkeep.data.har import Har
from fedkeep.data.partition import PARTITIONS, Partition, partition, partition_from
from fedkeep.data.shakespeare import Shakespeare
from fedkeep.data.streams import Stream, StreamOptions
from fedkeep.data.synthetic import Demo, Synthetic
from fedkeep.data.traffic import Traffic

TASKS: Registry[type[Task]] = Registry(
    "task",
    {
        "audio-mnist": AudioMnist,
        "c-mapss": CMapss,
        "custom": Custom,
        "demo": Demo,
        "fashion-mnist": FashionMnist,
        "har": Har,
        "shakespeare": Shakespeare,
        "synthetic": Synthetic,
        "traffic": Traffic,
        "uji-indoor": UjiIndoor,
        "westermo": Westermo,
    },
    methods=("load",),
)

__all__ = [
    "PARTITIONS", "TASKS", "Federation", "ModelSpec", "Ownership", "Partition", "Progress",
    "Stream", "StreamOptions", "Task", "partition", "partition_from",
]  # fmt: skip
