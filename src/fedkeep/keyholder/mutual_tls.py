"""TLS in which both sides show a certificate of the fleet's CA: the key-holder's port, and the server that asks it."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

from fedkeep.core.errors import ConfigError

KEYHOLDER, PLANNER = "fedkeep key-holder", "fedkeep planner"
"""The names in the certificates of the two sides; `fedkeep provision --key-holder` makes both."""


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
