"""What the server and the key-holder say to each other, on the wire of all messages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import msgspec
import numpy as np

from fedkeep.core.errors import RefusedError
from fedkeep.core.plan import Plan
from fedkeep.core.types import IntArray
from fedkeep.link.messages import Failed


@dataclass(frozen=True)
class EncryptedTables:
    """What the server hands to the key-holder: signs and totals under encryption, capacities in the clear."""

    name: bytes
    devices: IntArray
    """Whose row it is; -1 where it is nobody's."""
    labels: int
    signs: tuple[bytes, ...]
    totals: bytes
    capacities: IntArray
    """One per row; 0 where the row is nobody's."""


class AskPublicKeys(msgspec.Struct, frozen=True, tag=True):
    """The public keys with which to compute under encryption. Answered by `PublishedKeys`."""


class AskPlan(msgspec.Struct, frozen=True, tag=True):
    """Plan from these tables, which only the key-holder can read. Answered by `Planned`."""

    tables: EncryptedTables
    quantities: str
    clients_per_label: int | None
    labels_per_client: int | None
    before: Plan | None = None


class PublishedKeys(msgspec.Struct, frozen=True, tag=True):
    packed: bytes
    least_devices: int
    """For fewer the key-holder makes no plan."""


class Planned(msgspec.Struct, frozen=True, tag=True):
    plan: Plan


KeyRequest: TypeAlias = AskPublicKeys | AskPlan
KeyReply: TypeAlias = PublishedKeys | Planned | Failed


def sound_plan(plan: Plan) -> Plan:
    """The plan that was received, if its parts fit each other."""
    devices, quotas, weights = plan.devices, plan.quotas, plan.label_weights
    fits = devices.ndim == weights.ndim == 1 and quotas.shape == (len(devices), len(weights))
    kinds = devices.dtype == np.int64 and quotas.dtype.kind in "iu" and weights.dtype == np.float64
    if not (fits and kinds) or (np.diff(devices) <= 0).any() or (quotas < 0).any():
        raise RefusedError("malformed plan", "its devices, quotas and weights do not fit each other")
    if not (np.isfinite(weights).all() and (weights >= 0).all() and 0 <= plan.mass_per_slot < np.inf):
        raise RefusedError("malformed plan", "its weights are not finite numbers of at least 0")
    return plan
