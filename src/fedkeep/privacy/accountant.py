"""The privacy ledger of a device: the cost of every release, charged before it is sent.

Two accounts are kept side by side. In the account of the device all releases compose. In the
account of a sample, model updates and profiles compose, since a stored sample trains many times.
A sample of a real stream enters one gradient estimate only: estimates count by their maximum
(retransmissions included) and not by their sum. Where the caller reports which samples entered
(`see`), a sample that entered several times is charged for each.
"""

import json
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import numpy as np

from fedkeep.core.errors import FedkeepError, RejectedError
from fedkeep.core.types import IntArray, State
from fedkeep.files import atomic_write
from fedkeep.privacy.gaussian import budget_cost, epsilon_spent
from fedkeep.privacy.options import Stream, Unit

REMEMBERED = 2048
"""Ids that are tracked; one that returns after this many others counts as a new sample."""
ROW_BYTES = 40
_COST, _OPEN, _CLOSED, _SENT = range(4)
_ROUNDING = 1e-9
_STREAMS: tuple[Stream, ...] = ("estimator", "model", "profile")
_NO_ROUND = -1.0
_EMPTY = {
    "composed": np.zeros(2),
    "estimator": np.zeros(2),
    "releases": np.zeros(3),
    "last_round": np.full(1, _NO_ROUND),
}
"""`composed`: cost of a sample and of the device. `estimator`: pending and largest cost."""


class BudgetSpentError(FedkeepError):
    """The next release would exceed the privacy budget of the device: nothing is sent."""


@dataclass(frozen=True)
class Charge:
    """The cost of one release, (sensitivity / standard deviation)^2, in both units.

    Parameters
    ----------
    stream : {"estimator", "model", "profile"}
        What is released.
    sample, device : float
        Cost with respect to one sample, and to all samples of the device.
    deviation : float
        Standard deviation of the noise of this release.
    round : int
        Round the release belongs to.
    resends : bool
        Whether the release may contain samples of an earlier estimate whose acceptance has not
        been confirmed.
    """

    stream: Stream
    sample: float
    device: float
    deviation: float = 0.0
    round: int = 0
    resends: bool = False


class PrivacyLedger:
    """The costs charged so far.

    Its snapshot is committed before the release that it was charged for is sent.
    """

    def __init__(self) -> None:
        self._accounts = {name: array.copy() for name, array in _EMPTY.items()}
        self._samples: dict[int, list[float]] = {}
        """By id: the cost, and the count in the open, the closed and the last sent estimate."""

    def see(self, ids: IntArray) -> None:
        """Record that samples have entered the open estimate.

        Parameters
        ----------
        ids : array of int
            One entry a sample; an id may occur more than once.
        """
        for id_ in ids.tolist():
            row = self._samples.pop(id_, [0.0] * 4)
            row[_OPEN] += 1
            self._samples[id_] = row
        while len(self._samples) > REMEMBERED:
            del self._samples[next(iter(self._samples))]

    def close(self) -> None:
        """Close the open estimate; the next charge of an estimator is for it."""
        for row in self._samples.values():
            row[_CLOSED] += row[_OPEN]
            row[_OPEN] = 0.0

    def charge(self, *charges: Charge) -> None:
        """Add the costs of releases that are about to be sent together."""
        accounts = self._accounts
        for charge in charges:
            is_estimator = charge.stream == "estimator"
            accounts["releases"][_STREAMS.index(charge.stream)] += 1
            accounts["composed"] += (0.0 if is_estimator else charge.sample, charge.device)
            if not is_estimator:
                continue
            pending, worst = accounts["estimator"]
            pending = charge.sample + (pending if charge.resends else 0.0)
            for row in self._samples.values():  # a sample that is in it n times costs n^2
                before = row[_SENT] if charge.resends else 0.0
                row[_COST] += charge.sample * (row[_CLOSED] ** 2 + before**2)
                row[_SENT], row[_CLOSED] = max(row[_CLOSED], before), 0.0
            worst = max(worst, pending, *(row[_COST] for row in self._samples.values()))
            accounts["estimator"][:], accounts["last_round"][:] = (pending, worst), charge.round

    def awaits_acceptance(self, accepted_round: int | None) -> bool:
        """Return whether the last estimate sent is newer than the last report accepted."""
        return bool(
            self._accounts["last_round"][0]
            > (_NO_ROUND if accepted_round is None else accepted_round)
        )

    def affords(self, *charges: Charge, unit: Unit, epsilon: float, delta: float) -> bool:
        """Return whether these releases together stay within the budget."""
        after = PrivacyLedger()
        after.restore(self.snapshot())
        after.charge(*charges)
        return after._total(unit) <= budget_cost(epsilon, delta) * (1 + _ROUNDING)

    def epsilon(self, unit: Unit, delta: float) -> float:
        """Return the epsilon spent at `delta`, for one sample or for the device."""
        return epsilon_spent(self._total(unit), delta)

    def snapshot(self) -> State:
        """Return plain arrays, to be committed together with the rest of the device's state."""
        rows = np.array(list(self._samples.values()), dtype=np.float64).reshape(-1, 4)
        samples = {
            "sample_ids": np.array(list(self._samples), dtype=np.int64),
            "sample_costs": rows,
        }
        return {name: array.copy() for name, array in self._accounts.items()} | samples

    def restore(self, state: State) -> None:
        """Restore a snapshot; every cost that is already higher stays, so the ledger never falls.

        Raises
        ------
        RejectedError
            If the snapshot is damaged: a ledger that started anew would under-count.
        """
        arrays = {name: np.array(state.get(name, ()), dtype=np.float64) for name in _EMPTY}
        if any(arrays[name].shape != empty.shape for name, empty in _EMPTY.items()):
            raise RejectedError(
                "damaged privacy ledger", "an account is missing, or not of its size"
            )
        costs = np.array(state.get("sample_costs", ()), dtype=np.float64).reshape(-1, 4)
        if (
            not all((array >= _EMPTY[name].min()).all() for name, array in arrays.items())
            or not (costs >= 0).all()
        ):
            raise RejectedError("damaged privacy ledger", "a cost is negative or not a number")
        self._accounts = {
            name: np.maximum(array, self._accounts[name]) for name, array in arrays.items()
        }
        charged, ids = self._samples, state.get("sample_ids", np.empty(0)).astype(np.int64).tolist()
        self._samples = dict(zip(ids, costs.tolist(), strict=True))
        for id_, row in charged.items():
            kept = self._samples.setdefault(id_, [0.0] * 4)
            kept[_COST] = max(kept[_COST], row[_COST])

    def _total(self, unit: Unit) -> float:
        sample, device = self._accounts["composed"]
        return float(sample + self._accounts["estimator"][1]) if unit == "sample" else float(device)


class LedgerFile:
    """The ledger's file; every commit replaces it atomically.

    Parameters
    ----------
    path : Path
        Where the file is; its folder must exist.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def found(self, reported: State, *, damaged: bool) -> PrivacyLedger:
        """Open the ledger, or create it on the first start of a device.

        Parameters
        ----------
        reported : State
            The ledger's snapshot in the device's store, empty on a first start.
        damaged : bool
            Whether the store was damaged, so that an empty `reported` proves nothing.

        Raises
        ------
        RejectedError
            If the file is missing although the device has released something, if it is older than
            the store, or if another ledger in the same folder has been charged: it may belong to
            this device under an earlier name of its store.
        """
        if not self._path.exists() and not damaged and not np.any(reported.get("releases", 0)):
            if (other := self._spent_beside()) is not None:
                raise RejectedError(
                    "another privacy ledger",
                    f"{other} has been spent from: if it is this device's, rename it to "
                    f"{self._path.name}; if it is another's, set [store] path to a folder of its "
                    "own",
                )
            self.commit(PrivacyLedger().snapshot())
        ledger = self.open()
        known = ledger.snapshot()
        if any(
            (reported[name] > known[name] * (1 + _ROUNDING)).any()
            for name in ("composed", "releases")
            if name in reported
        ):
            raise RejectedError(
                "old privacy ledger",
                f"{self._path} lists less than its device has sent: put the newest one back, or "
                "give this device a new budget by moving both ledger and store away",
            )
        return ledger

    def _spent_beside(self) -> Path | None:
        """Return another ledger of the same folder that was charged; skip unreadable files."""
        for other in sorted(self._path.parent.glob("*.ledger")):
            with suppress(RejectedError, OSError):
                if LedgerFile(other).open().snapshot()["releases"].any():
                    return other
        return None

    def open(self) -> PrivacyLedger:
        """Read the ledger as last committed.

        Raises
        ------
        RejectedError
            If the file is missing or damaged: it never counts as an empty ledger.
        """
        try:
            line = self._path.read_text(errors="replace")
        except FileNotFoundError:
            raise RejectedError(
                "lost privacy ledger",
                f"{self._path} is gone, so what was spent is not known: put it back, or give this "
                "device a new budget by moving its store away",
            ) from None
        body, _, checksum = line.rstrip("\n").rpartition(" ")
        if checksum != _checksum(body):
            raise RejectedError("damaged privacy ledger", f"{self._path} fails its checksum")
        ledger = PrivacyLedger()
        try:
            ledger.restore({name: np.array(values) for name, values in json.loads(body).items()})
        except RejectedError as refusal:
            raise RejectedError(refusal.reason, f"{self._path}: {refusal.detail}") from None
        except Exception:  # noqa: BLE001 - any content may stand before a valid checksum
            raise RejectedError(
                "damaged privacy ledger", f"{self._path} holds something else than a ledger"
            ) from None
        return ledger

    def commit(self, state: State) -> None:
        """Write a snapshot; on return it survives a loss of power."""
        body = json.dumps({name: values.tolist() for name, values in state.items()})
        with atomic_write(self._path) as file:
            file.write(f"{body} {_checksum(body)}\n".encode())


def _checksum(body: str) -> str:
    return blake2b(body.encode(), digest_size=16).hexdigest()
