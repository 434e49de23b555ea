"""Data sets with devices and an order of their own, each made ready as one file: voices, network flows, WiFi scans."""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from fedkeep.data.cache import Progress, RemoteFile, obtain
from fedkeep.data.federation import Federation
from fedkeep.data.own import Own


def _prepared(dataset: str, checksum: str, source: str) -> RemoteFile:
    how = f"make it from {source} as docs/own-data.md tells, or name a folder that has it in FEDKEEP_DATA"
    return RemoteFile(dataset, f"{dataset.replace('-', '_')}.npz", None, checksum, how=how)


@dataclass(frozen=True)
class PreparedSet:
    """Such a set."""

    model: str = "mlp"
    """A model by its name, or `module:factory`."""

    file: ClassVar[RemoteFile]

    def load(self, seed: int, progress: Progress | None = None) -> Federation:
        path, label = str(obtain(self.file, progress)), getattr(self, "label", "y")
        own = Own(path=path, label=label, model=self.model, rounds_per_pass=100)
        return replace(own.load(seed), name=self.file.dataset)


@dataclass(frozen=True)
class AudioMnist(PreparedSet):
    """Spoken digits of 60 people, log-mel pictures of 32 x 32: devices differ by voice, not by labels."""

    file = _prepared(
        "audio-mnist",
        "66933b39e9cff15875ee2fbd953d029238096459058ad95c267ec53313f52042",
        "github.com/soerenab/AudioMNIST",
    )


@dataclass(frozen=True)
class Westermo(PreparedSet):
    """Flows of an industrial network in the order of time, 31 source addresses: attacks come in bursts."""

    model: str = "softmax"
    label: Literal["y", "y_timing"] = "y"
    """`y`: only traffic from or to the attacker is an attack; `y_timing`: all traffic of that time."""

    file = _prepared(
        "westermo",
        "bbda1008017bea6983a3ecc8e63f2bf90b845da0b7dcb81d8e1f6c8a7cf1c24f",
        "github.com/westermo/network-traffic-dataset",
    )


@dataclass(frozen=True)
class UjiIndoor(PreparedSet):
    """On which floor is the phone? WiFi scans in the order of time of 29 people with a phone, floor after floor."""

    file = _prepared(
        "uji-indoor",
        "bcfd5277d7404ac3d421a9b69be3b15a88dc1486c3d35837979dccd8c075ec68",
        "archive.ics.uci.edu (UJIIndoorLoc)",
    )
