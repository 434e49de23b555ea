"""A plan from profiles ranked under homomorphic encryption: `privacy.profiles = "homomorphic"`.

The greedy plan compares velocities of one label (who sees most of it) and of one device (which
label it sees most often), asks which are above 0, and takes totals per label. Devices encrypt under
CKKS (TenSEAL, 128 bits) such that the sum over all of them holds each difference; the server,
without the key, turns differences into signs by composite polynomials; whoever has the key reads
signs and totals, never a velocity, and plans without local search. The paper has one sentence on
it.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np

from fedkeep.core.errors import ConfigError, RejectedError, optional_import
from fedkeep.core.planning.greedy import Coordinator, Greedy, PaperGreedy
from fedkeep.core.planning.plan import Plan
from fedkeep.core.planning.profiles import FleetProfiles
from fedkeep.core.types import DeviceId, FloatArray, IntArray, Profile

with optional_import("profiles ranked under homomorphic encryption", "homomorphic"):
    import tenseal

Ciphertext: TypeAlias = Any
"""A vector or a context of TenSEAL, which has no types."""
_EXPAND = [4589 / 1024, -16577 / 1024, 25614 / 1024, -12860 / 1024]
"""g_3 of Cheon et al. (Asiacrypt'20): pushes small numbers away from 0."""
_FLATTEN = [35 / 16, -35 / 16, 21 / 16, -5 / 16]
"""f_3 of the same: pulls what is near 1 or -1 closer to it."""
_SLOWEST, _FASTEST = 1e-3, 1e4
_ZERO = -1


@dataclass(frozen=True)
class Scheme:
    """The parameters of CKKS; TenSEAL refuses those with less than 128 bits of security."""

    degree: int = 32768
    scale_bits: int = 40
    expansions: int = 5
    """How often small differences are expanded before their sign is read: each 4.5 times finer, and
    3 levels deep."""

    @cached_property
    def levels(self) -> int:
        """Count the steps of the finest grid on [-1, 1] of which each has a clear sign.

        Returns
        -------
        int
            Every difference of a step or more has a sign of 0.9 or more.
        """
        fine = np.linspace(0.0, 1.0, 200_001)[1:]
        return int(1 / fine[self.sign(fine) < 0.9].max())

    def sign(self, x: Any) -> Any:
        """Give the signs of numbers or of ciphertexts.

        Parameters
        ----------
        x : ndarray or Ciphertext
            Between -1 and 1.

        Returns
        -------
        ndarray or Ciphertext
            By c0 x + c1 x^3 + c2 x^5 + c3 x^7, three multiplications deep, again and again.
        """
        for c in [_EXPAND] * self.expansions + [_FLATTEN]:
            squared = x * x
            upper = ((x * c[3]) * squared + x * c[2]) * (squared * squared)
            x = upper + (x * c[1]) * squared + x * c[0]
        return x

    def new_context(self) -> Ciphertext:
        """Make fresh keys.

        Returns
        -------
        Ciphertext
            A context, the secret key in it.
        """
        bits = [60, *[self.scale_bits] * (3 * (self.expansions + 1)), 60]
        context = tenseal.context(tenseal.SCHEME_TYPE.CKKS, self.degree, coeff_mod_bit_sizes=bits)
        context.global_scale = 2**self.scale_bits
        return context

    def level_of(self, velocity: FloatArray) -> IntArray:
        """Round velocities to levels of equal ratio.

        Parameters
        ----------
        velocity : ndarray of float
            Arrivals in a unit of time.

        Returns
        -------
        ndarray of int
            0 only for what is not seen at all; those of one level are a tie.
        """
        steps = np.log(np.clip(velocity, _SLOWEST, _FASTEST) / _SLOWEST) / math.log(
            _FASTEST / _SLOWEST
        )
        return np.where(velocity > 0, 1 + np.rint(steps * (self.levels - 1)), 0).astype(np.int64)


FINE = Scheme()
"""Some two thousand levels."""
COARSE = Scheme(degree=16384, scale_bits=30, expansions=2)
"""Some thirty levels only, for a fifth of the bytes and a tenth of the time."""
_SUMS = Scheme(degree=8192, scale_bits=40, expansions=-1)
"""For sums alone: no comparison, so a small and fast one."""


@dataclass(frozen=True)
class Comparisons:
    """All comparisons a plan needs.

    Of value `left` with value `right`, or with 0; value row * labels + label is V.
    """

    devices: int
    labels: int

    @cached_property
    def pairs(self) -> tuple[IntArray, IntArray]:
        """The positions to compare, left and right of each comparison."""
        values = np.arange(self.devices * self.labels).reshape(self.devices, self.labels)
        upper, lower = np.triu_indices(self.devices, 1)
        first, second = np.triu_indices(self.labels, 1)
        left = [values[upper].ravel(), values[:, first].ravel(), values.ravel()]
        right = [values[lower].ravel(), values[:, second].ravel(), np.full(values.size, _ZERO)]
        return np.concatenate(left), np.concatenate(right)

    def contribution(self, row: int, values: FloatArray) -> FloatArray:
        """Give what the device in this row adds to each comparison.

        Parameters
        ----------
        row : int
            Which device.
        values : ndarray of float, shape (labels,)
            Its levels.

        Returns
        -------
        ndarray of float
            Summed over all rows, each place holds left minus right.
        """
        everything = np.zeros(self.devices * self.labels + 1)
        everything[row * self.labels : (row + 1) * self.labels] = values
        left, right = self.pairs
        return everything[left] - everything[right]

    def table(self, signs: IntArray) -> IntArray:
        """Find the smallest table of whole numbers that compares like this.

        Parameters
        ----------
        signs : ndarray of int
            Of each comparison: -1, 0 or 1.

        Returns
        -------
        ndarray of int, shape (devices, labels)
            0 where a velocity is 0.

        Raises
        ------
        RejectedError
            If the comparisons contradict each other.
        """
        left, right = self.pairs
        heights = np.zeros(self.devices * self.labels + 1, dtype=np.int64)
        for _ in range(len(heights) + 1):
            before = heights.copy()
            np.maximum.at(heights, left, heights[right] + (signs > 0) - len(heights) * (signs < 0))
            np.maximum.at(heights, right, heights[left] + (signs < 0) - len(heights) * (signs > 0))
            if heights[_ZERO] > 0:
                break
            if np.array_equal(heights, before):
                return heights[:-1].reshape(self.devices, self.labels)
        raise RejectedError(
            "comparisons", "they contradict each other: a device did not follow the protocol"
        )


@dataclass(frozen=True, eq=False)
class OrderedFleet(FleetProfiles):
    """A fleet of which only the order of velocities and the totals per label are known."""

    totals: FloatArray

    @cached_property
    def label_mass(self) -> FloatArray:
        """The total velocity per label, as it was decrypted."""
        return self.totals


class Contexts:
    """The two contexts of a fleet, one to compare in and one to add up in.

    Parameters
    ----------
    scheme : Scheme
        How finely they compare.
    contexts : Ciphertext
        The two, where they are made already.
    """

    def __init__(self, scheme: Scheme, *contexts: Ciphertext) -> None:
        self.scheme = scheme
        self._comparing, self._summing = contexts or (scheme.new_context(), _SUMS.new_context())

    def public(self) -> "Contexts":
        """Give what everybody but the key-holder has.

        Returns
        -------
        Contexts
            Without the secret key.
        """
        packed = (c.serialize(save_secret_key=False) for c in (self._comparing, self._summing))
        return Contexts(self.scheme, *map(tenseal.context_from, packed))

    def encrypt(self, comparisons: Comparisons, row: int, velocity: FloatArray) -> list[bytes]:
        """Encrypt a device's contribution to every comparison, and its velocities for the totals.

        Parameters
        ----------
        comparisons : Comparisons
            Of this fleet.
        row : int
            Which of its devices this is.
        velocity : ndarray of float, shape (labels,)
            Its profile.

        Returns
        -------
        list of bytes
            Ciphertexts.
        """
        levels = self.scheme.level_of(velocity) / self.scheme.levels
        contribution, slots = comparisons.contribution(row, levels), self.scheme.degree // 2
        chunks = [
            contribution[start : start + slots] for start in range(0, len(contribution), slots)
        ]
        parts = [tenseal.ckks_vector(self._comparing, chunk) for chunk in chunks]
        return [part.serialize() for part in (*parts, tenseal.ckks_vector(self._summing, velocity))]

    def compare(self, answers: Iterable[Sequence[bytes]]) -> list[bytes]:
        """Take the signs of all differences, and the totals, without reading any.

        The server's part.

        Parameters
        ----------
        answers : iterable of sequence of bytes
            What `encrypt` gave on each device.

        Returns
        -------
        list of bytes
            Ciphertexts of the signs and, last, of the totals.
        """
        total: list[Ciphertext] = []
        for answer in answers:
            read = self._read(answer)
            total = [a + b for a, b in zip(total, read, strict=True)] if total else read
        return [part.serialize() for part in (*map(self.scheme.sign, total[:-1]), total[-1])]

    def plan(
        self,
        comparisons: Comparisons,
        tables: Sequence[bytes],
        fleet: tuple[IntArray, IntArray],
        coordinator: Coordinator,
    ) -> Plan:
        """Plan from signs and totals: the key-holder's part.

        Parameters
        ----------
        comparisons : Comparisons
            Of this fleet.
        tables : sequence of bytes
            What `compare` gave.
        fleet : tuple of ndarray of int
            The devices of the rows, ascending, and their capacities.
        coordinator : Coordinator
            The greedy, ours or the paper's.

        Returns
        -------
        Plan
            As if made from velocities on the grid.

        Raises
        ------
        RejectedError
            If a comparison has no clear sign; none is guessed.
        """
        numbers = [np.asarray(part.decrypt()) for part in self._read(tables)]
        values, totals = np.concatenate(numbers[:-1]), numbers[-1]
        signs = np.rint(values)
        if not (np.abs(values - signs).max() < 0.25 and np.abs(signs).max() <= 1):
            raise RejectedError(
                "unclear comparison", "the ciphertexts do not hold differences within the grid"
            )
        order = comparisons.table(signs.astype(np.int64))
        totals = np.maximum(
            totals.round(6), 0.0
        )  # or the errors of CKKS would break ties between labels
        totals = np.where((order > 0).any(axis=0), totals, 0.0)
        devices, capacities = fleet
        ordered = OrderedFleet(devices, capacities, order.astype(np.float64), totals)
        return by_order(coordinator).plan(ordered)

    def _read(self, packed: Sequence[bytes]) -> list[Ciphertext]:
        contexts = [self._comparing] * (len(packed) - 1) + [self._summing]
        try:
            return [
                tenseal.ckks_vector_from(c, part) for c, part in zip(contexts, packed, strict=True)
            ]
        except (ValueError, RuntimeError) as error:
            raise RejectedError(
                "unreadable ciphertext", f"{error}: damaged, or of another context"
            ) from error


def by_order(coordinator: Coordinator) -> Coordinator:
    """Give the coordinator as it plans from the order of velocities alone.

    Parameters
    ----------
    coordinator : Coordinator
        The fleet's.

    Returns
    -------
    Coordinator
        Without local search, which needs velocities themselves.

    Raises
    ------
    ConfigError
        If it is none of the two greedy ones.
    """
    if isinstance(coordinator, Greedy):
        return replace(coordinator, improve_up_to=0)
    if isinstance(coordinator, PaperGreedy):
        return coordinator
    raise ConfigError(
        "privacy.profiles = 'homomorphic' tells who is faster and no more: set coordinator.name to "
        "greedy or paper-greedy"
    )


def plan_ranked(
    profiles: Mapping[DeviceId, Profile], coordinator: Coordinator, scheme: Scheme
) -> Plan:
    """Play all parts of the protocol in one process, as the simulator does.

    Parameters
    ----------
    profiles : mapping of DeviceId to Profile
        What devices declare; each is encrypted before anybody else sees it.
    coordinator : Coordinator
        The greedy, ours or the paper's.
    scheme : Scheme
        How finely velocities are compared.

    Returns
    -------
    Plan
        From signs and totals.
    """
    devices = np.array(sorted(profiles), dtype=np.int64)
    own = [profiles[device] for device in devices.tolist()]
    comparisons = Comparisons(len(own), len(own[0].velocity))
    holder = Contexts(scheme)
    public = holder.public()
    answers = (public.encrypt(comparisons, row, p.velocity) for row, p in enumerate(own))
    capacities = np.array([profile.capacity for profile in own], dtype=np.int64)
    return holder.plan(comparisons, public.compare(answers), (devices, capacities), coordinator)
