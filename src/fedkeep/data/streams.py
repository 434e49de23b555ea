"""Endless streams of arrivals, made from each device's training samples.

A stream is a pure function of (seed, device, position): any stretch of it can be produced without
what came before, so devices made late, resumed runs and any cutting into batches agree to the byte.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from fedkeep.core.bounds import check_range
from fedkeep.core.seeds import child_seed, generator, uniform_keys
from fedkeep.core.types import Batch, BoolArray, FloatArray, IntArray
from fedkeep.data.federation import Federation
from fedkeep.encoding import EncodingName, SampleCodec

_ORDERS_KEPT = 1000
"""Devices whose latest order of samples is kept in memory."""
_FITTED = 10
"""The first samples of a device, from which its codec takes the bounds of each feature."""


@dataclass(frozen=True)
class StreamOptions:
    """Keys of `stream` in an experiment's TOML."""

    rounds_per_pass: int | None = None
    """Rounds in which a device sees each of its samples once; None: what the task says."""
    shuffle: bool = True
    """Whether every pass has an order of its own; False repeats the data's, as the authors' code
    does."""
    current: bool = True
    """Whether what arrives in a round is valued, and may be trained on, before training in that
    round."""
    burst: float = 0.0
    """Label runs: rounds that one label lasts at a device on average; 0: labels come mixed."""
    drift: float = 0.0
    """Label shift over time, 0..1: at 1 labels come one after the other, alike for all devices."""
    drift_passes: int = 1
    """Passes that one cycle of the drift takes."""
    label_noise: float = 0.0
    """Share of training samples with a wrong label; a sample's label stays wrong on every pass."""
    labelled: float = 1.0
    """Share of training samples whose label is ever known; the others stay without one on every
    pass."""
    label_delay: int | Literal["pass"] = 0
    """Rounds between a sample and its label; `pass`: all labels of a pass come at its end, as when
    a machine fails."""
    outliers: float = 0.0
    """Share of training samples whose features are drowned in noise."""
    outlier_scale: float = 10.0
    """Standard deviation of that noise, in standard deviations of the data."""
    encoding: EncodingName = "float32"
    """Samples come as a store in fewer bytes gives them back: valued and trained on as decoded."""
    deflate_to: int | None = None
    """So do those that such a store rounds until they deflate into that many bytes; None: it does
    not deflate."""

    def __post_init__(self) -> None:
        check_range(self, "drift", "label_noise", "outliers", "labelled", least=0, most=1)
        if self.label_delay != "pass":
            check_range(self, "label_delay", least=0)
        check_range(self, "rounds_per_pass", "drift_passes", least=1)
        check_range(self, "burst", "outlier_scale", least=0)
        if self.burst and not self.shuffle:
            raise ValueError("burst makes an order of its own: leave out shuffle = false")


class Stream:
    """What arrives at each device of a federation, and when.

    >>> from fedkeep.data.synthetic import Demo
    >>> data = Demo(devices=4, smallest=100, largest=100).load(seed=0)
    >>> stream = Stream(data, StreamOptions(rounds_per_pass=20), seed=0)
    >>> float(stream.rates[0])  # of its 100 samples 80 are for training
    4.0
    >>> len(stream.arrivals(0, 0, 10))  # what came in the first ten rounds
    40
    """

    def __init__(self, federation: Federation, options: StreamOptions, seed: int) -> None:
        self._data, self._options = federation, options
        self._seed = child_seed(seed, "stream")
        self._rounds_per_pass = options.rounds_per_pass or federation.rounds_per_pass
        self.rates: FloatArray = federation.train.sizes / self._rounds_per_pass
        """v_c, the mean number of arrivals a round, (C,)."""
        self._cycle_passes = options.drift_passes if options.drift else 1
        phases = generator(self._seed, "drift").permutation(federation.labels)
        self._phase: FloatArray = (phases + 0.5) / federation.labels
        spread = federation.train.indices[:: max(1, len(federation.train.indices) // 1000)]
        self._deviation = float(np.std(federation.x[spread])) if options.outliers else 0.0
        """Of all features, from at most some thousand samples spread over the fleet."""
        self._orders: dict[int, tuple[int, IntArray]] = {}
        self._codecs: dict[int, SampleCodec] = {}

    def position(self, device: int, round_: int) -> int:
        """Count the samples that have arrived before this round begins, exactly.

        A pass ends where it should.
        """
        return round_ * int(self._data.train.sizes[device]) // self._rounds_per_pass

    def rounds(self, device: int, start: int, stop: int) -> IntArray:
        """Give the round in which each arrival comes, from number `start` up to, not including.

        `stop`.

        Parameters
        ----------
        device : int
            Whose stream.
        start, stop : int
            Numbers of arrivals.

        Returns
        -------
        ndarray of int
            A round for each.
        """
        arrivals = np.arange(start, stop, dtype=np.int64)
        return ((arrivals + 1) * self._rounds_per_pass - 1) // int(self._data.train.sizes[device])

    def arrivals(self, device: int, first_round: int, last_round: int) -> Batch:
        """Everything that arrives from `first_round` up to, not including, `last_round`.

        In order.
        """
        return self.between(
            device, self.position(device, first_round), self.position(device, last_round)
        )

    @property
    def late(self) -> bool:
        """Whether some labels come after their samples, or never."""
        return bool(self._options.labelled < 1 or self._options.label_delay)

    @property
    def delayed(self) -> bool:
        """Whether labels come after their samples."""
        return self._options.label_delay != 0

    def labelled(self, ids: IntArray) -> BoolArray:
        """Tell which samples get a label at all."""
        return uniform_keys(child_seed(self._seed, "labelled"), ids) < self._options.labelled

    def labels_due(self, device: int, round_: int) -> Batch:
        """Give the samples that came before and whose labels come in this round, in order."""
        delay, size = self._options.label_delay, int(self._data.train.sizes[device])
        if delay == "pass":
            passes = [self.position(device, r) // size for r in (round_, round_ + 1)]
            start, stop = (size * count for count in passes)
        else:
            start, stop = (self.position(device, max(0, r - delay)) for r in (round_, round_ + 1))
        came = self.between(device, start, stop)
        return came.take(self.labelled(came.ids))

    def between(self, device: int, start: int, stop: int) -> Batch:
        """Arrivals number `start` up to, not including, `stop` of the device's stream."""
        owned = self._data.train.of(device)
        cycle_length = len(owned) * self._cycle_passes
        pieces = [np.empty(0, dtype=np.int64)]
        for cycle in range(start // cycle_length, -(-stop // cycle_length)):
            base = cycle * cycle_length
            order = self._order(device, owned, cycle)
            pieces.append(order[max(start - base, 0) : stop - base])
        batch = self._disturbed(owned[np.concatenate(pieces)])
        encoding, deflate_to = self._options.encoding, self._options.deflate_to
        if encoding == "float32" and deflate_to is None:
            return batch
        if (
            device not in self._codecs
        ):  # takes its bounds from the first samples, wherever a run begins
            first = owned[self._order(device, owned, 0)[:_FITTED]]
            self._codecs[device] = SampleCodec(
                self._data.sample_shape, encoding=encoding, deflate_to=deflate_to
            )
            self._codecs[device].fit(self._disturbed(first).x)
        return Batch(self._codecs[device].settled(batch.x), batch.y, batch.ids)

    def training_set(self, device: int) -> Batch:
        """All that the device's stream is made of, each sample once, as it would arrive."""
        return self._disturbed(self._data.train.of(device))

    def seen_before(self, device: int, round_: int) -> Batch:
        """Return what has arrived before this round begins, each sample once."""
        return self.between(
            device, 0, min(self.position(device, round_), len(self._data.train.of(device)))
        )

    def _order(self, device: int, owned: IntArray, cycle: int) -> IntArray:
        """Return the order of one cycle.

        That is one pass or, under drift, some passes mixed so that labels shift.
        """
        passes = range(cycle * self._cycle_passes, (cycle + 1) * self._cycle_passes)
        order = np.concatenate([self._pass_order(device, owned, number) for number in passes])
        if not self._options.drift:
            return order
        time = (np.arange(len(order)) + 0.5) / len(order)
        shift = self._phase[self._data.strata[owned[order]]]
        keys = (1 - self._options.drift) * time + self._options.drift * shift
        return order[np.argsort(keys, kind="stable")]

    def _pass_order(self, device: int, owned: IntArray, number: int) -> IntArray:
        """Return the order of a pass; the latest of each device is cached."""
        if not self._options.shuffle:
            return np.arange(len(owned), dtype=np.int64)
        known = self._orders.get(device)
        if known is None or known[0] != number:
            if len(self._orders) >= _ORDERS_KEPT:
                self._orders.clear()
            order = generator(self._seed, "pass", device, number).permutation(len(owned))
            if self._options.burst:
                # In stretches of geometric length. Two of one label may follow each other, so few
                # labels last longer.
                rng = generator(self._seed, "burst", device, number)
                labels = self._data.strata[owned[order]]
                grouped = np.argsort(labels, kind="stable")
                begins = rng.random(len(labels)) < 1 / max(
                    1.0, self._options.burst * self.rates[device]
                )
                begins |= np.diff(labels[grouped], prepend=-1) != 0
                stretch = np.cumsum(begins) - 1
                order = order[grouped[np.argsort(rng.random(len(labels))[stretch], kind="stable")]]
            known = self._orders[device] = (number, order)
        return known[1]

    def _disturbed(self, ids: IntArray) -> Batch:
        x, y, labels = self._data.x[ids], self._data.y[ids], self._data.labels
        if self._options.label_noise and labels > 1:
            wrong = uniform_keys(child_seed(self._seed, "wrong"), ids) < self._options.label_noise
            shift = uniform_keys(child_seed(self._seed, "shift"), ids) * (labels - 1)
            y = np.where(wrong, (y + 1 + shift.astype(np.int64)) % labels, y)
        if self._options.outliers:
            replaced = uniform_keys(child_seed(self._seed, "outlier"), ids) < self._options.outliers
            for row in np.flatnonzero(replaced):
                noise = generator(self._seed, "outlier", int(ids[row])).standard_normal(
                    x.shape[1:], dtype=np.float32
                )
                x[row] += np.float32(self._options.outlier_scale * self._deviation) * noise
        return Batch(x, y, ids)
