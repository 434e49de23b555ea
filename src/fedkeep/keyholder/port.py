"""What the server and the key-holder say to each other, and the TLS by which each knows the other.

The messages go over the wire of all messages; both sides show a certificate of the fleet's CA.
"""

import ssl
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import numpy as np

from fedkeep.core.coordination import Greedy
from fedkeep.core.errors import ConfigError, RefusedError
from fedkeep.core.plan import Plan
from fedkeep.core.rounds import Refusal
from fedkeep.core.types import DeviceId
from fedkeep.link.messages import Failed

KEYHOLDER, PLANNER = "fedkeep key-holder", "fedkeep planner"
"""The names in the certificates of the two sides; `fedkeep provision --key-holder` makes both."""


class AskKey(msgspec.Struct, frozen=True, tag=True):
    """The public key, and a fresh nonce for which devices are to seal their profiles. Answered by `PublishedKey`."""


class AskPlan(msgspec.Struct, frozen=True, tag=True):
    """Plan from these profiles, which only the key-holder can read. Answered by `Planned`."""

    nonce: bytes
    labels: int
    profiles: dict[DeviceId, bytes]
    greedy: Greedy
    before: Plan | None = None


class PublishedKey(msgspec.Struct, frozen=True, tag=True):
    key: bytes
    nonce: bytes
    """The only one that counts from now on."""


class Planned(msgspec.Struct, frozen=True, tag=True):
    plan: Plan
    refused: tuple[Refusal, ...]
    """Whose profiles could not be used, and why: they are not in the plan."""


KeyRequest: TypeAlias = AskKey | AskPlan
KeyReply: TypeAlias = PublishedKey | Planned | Failed


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


def secured(credentials: Path, name: str) -> ssl.SSLContext:
    """TLS for the side of this name, "keyholder" or "planner"; each asks for the other's certificate."""
    serves = name == "keyholder"
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if serves else ssl.PROTOCOL_TLS_CLIENT)
    context.verify_mode, context.minimum_version = ssl.CERT_REQUIRED, ssl.TLSVersion.TLSv1_3
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


def peer_name(connection: ssl.SSLSocket) -> str:
    """The common name in the other side's certificate, which TLS has verified."""
    certificate: Any = connection.getpeercert() or {}
    names = [value for part in certificate.get("subject", ()) for key, value in part if key == "commonName"]
    return str(names[0]) if names else ""
