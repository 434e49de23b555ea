"""Data sets with devices and an order of their own, each made ready as one file: voices, network flows, WiFi scans."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from fedkeep.data.cache import Progress, RemoteFile, obtain
from fedkeep.data.federation import Federation
from fedkeep.data.own import Own

_ROUNDS_PER_PASS = 100


def _prepared(dataset: str, name: str, checksum: str, source: str) -> RemoteFile:
    how = f"make it from {source} as docs/own-data.md tells, or name a folder that has it in FEDKEEP_DATA"
    return RemoteFile(dataset, name, None, checksum, how=how)


AUDIO_MNIST = _prepared(
    "audio-mnist",
    "audio_mnist.npz",
    "66933b39e9cff15875ee2fbd953d029238096459058ad95c267ec53313f52042",
    "github.com/soerenab/AudioMNIST",
)
WESTERMO = _prepared(
    "westermo",
    "westermo.npz",
    "bbda1008017bea6983a3ecc8e63f2bf90b845da0b7dcb81d8e1f6c8a7cf1c24f",
    "github.com/westermo/network-traffic-dataset",
)
UJI_INDOOR = _prepared(
    "uji-indoor",
    "uji_indoor.npz",
    "bcfd5277d7404ac3d421a9b69be3b15a88dc1486c3d35837979dccd8c075ec68",
    "archive.ics.uci.edu (UJIIndoorLoc)",
)


@dataclass(frozen=True)
class AudioMnist:
    """Spoken digits of 60 people, log-mel pictures of 32 x 32: devices differ by voice, not by labels."""

    model: str = "mlp"
    """A model by its name, or `module:factory`."""

    def load(self, seed: int, progress: Progress | None = None) -> Federation:
        return _load(AUDIO_MNIST, self.model, "y", seed, progress)


@dataclass(frozen=True)
class Westermo:
    """Flows of an industrial network in the order of time, 31 source addresses: attacks come in bursts."""

    model: str = "softmax"
    """A model by its name, or `module:factory`."""
    label: Literal["y", "y_timing"] = "y"
    """`y`: only traffic from or to the attacker is an attack; `y_timing`: all traffic of that time."""

    def load(self, seed: int, progress: Progress | None = None) -> Federation:
        return _load(WESTERMO, self.model, self.label, seed, progress)


@dataclass(frozen=True)
class UjiIndoor:
    """On which floor is the phone? WiFi scans in the order of time of 29 people with a phone, floor after floor."""

    model: str = "mlp"
    """A model by its name, or `module:factory`."""

    def load(self, seed: int, progress: Progress | None = None) -> Federation:
        return _load(UJI_INDOOR, self.model, "y", seed, progress)


def _load(file: RemoteFile, model: str, label: str, seed: int, progress: Progress | None) -> Federation:
    path = str(obtain(file, progress))
    own = Own(path=path, label=label, model=model, rounds_per_pass=_ROUNDS_PER_PASS)
    return replace(own.load(seed), name=file.dataset)
