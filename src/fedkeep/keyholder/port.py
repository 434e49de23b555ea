"""What the server and the key-holder say to each other, and the TLS by which each knows the other.

The messages go over the wire of all messages; both sides show a certificate of the fleet's CA.
"""

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import numpy as np

from fedkeep.core.errors import ConfigError, RefusedError
from fedkeep.core.plan import Plan
from fedkeep.core.types import IntArray
from fedkeep.link.messages import Failed

KEYHOLDER, PLANNER = "fedkeep key-holder", "fedkeep planner"
"""The names in the certificates of the two sides; `fedkeep provision --key-holder` makes both."""


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


def keyholder_side(credentials: Path) -> ssl.SSLContext:
    """For the key-holder: talks only to holders of the planner's certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.verify_mode = ssl.CERT_REQUIRED
    return _loaded(context, credentials, "keyholder")


def planner_side(credentials: Path) -> ssl.SSLContext:
    """For the server: talks only to the host that its certificate names."""
    return _loaded(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), credentials, "planner")


def peer_name(connection: ssl.SSLSocket) -> str:
    """The common name in the other side's certificate, which TLS has verified."""
    certificate: Any = connection.getpeercert() or {}
    names = [value for part in certificate.get("subject", ()) for key, value in part if key == "commonName"]
    return str(names[0]) if names else ""


def _loaded(context: ssl.SSLContext, credentials: Path, name: str) -> ssl.SSLContext:
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    authority, certificate, key = (credentials / file for file in ("ca.crt", f"{name}.crt", f"{name}.key"))
    for path in (authority, certificate, key):
        if not path.exists():
            raise ConfigError(f"{path} is not there: run `fedkeep provision DIR --key-holder HOST` and copy it here")
    try:
        context.load_verify_locations(authority)
        context.load_cert_chain(certificate, key)
    except ssl.SSLError as error:
        raise ConfigError(f"the certificates in {credentials} do not fit each other: {error.reason}") from error
    return context
