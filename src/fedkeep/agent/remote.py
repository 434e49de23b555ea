"""Settings from afar: signed, only what the device allows, on trial first, and taken back.

A signed text replaces whole tables of the device's own configuration. The agent starts itself anew
with it, in the same process; if it does not stay up, the next start takes the last good settings.
"""

import logging
import threading
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import msgspec

from fedkeep.core.bounds import check_range
from fedkeep.core.errors import ConfigError, RejectedError, optional_import
from fedkeep.files import atomic_write
from fedkeep.protocol.addresses import require_loopback
from fedkeep.tables import Table

if TYPE_CHECKING:
    from fedkeep.agent.agent import Agent
    from fedkeep.agent.assembly import AgentConfig

log = logging.getLogger(__name__)
ALLOWED = ("policy", "rule", "storage", "gist", "weights", "waiting", "model")
"""The tables that may come from afar, where the device says so; consent and keys never do."""
LONGEST = 65_536
_MOST_STARTS = 2
"""Starts that settings on trial get, of which none ended well: a power cut may be one."""
_PREFIX = b"fedkeep settings 1\n"
"""Signed with the text, so that a signature for anything else is none here."""
_PRIVATE = 0o600
_LEAVING_SECONDS = 0.3
"""For the answer to reach whoever sent the settings."""


@dataclass(frozen=True)
class RemoteOptions:
    """The table `[remote]`: who may change settings from afar, and which."""

    key_file: str | None = None
    """The Ed25519 public key of who may, 64 hex digits; None: nobody may."""
    allow: tuple[str, ...] = ()
    """The tables that may come: `policy`, `rule`, `storage`, `gist`, `weights`, `waiting`, \
`model`."""
    url: str | None = None
    """Where signed settings are looked for; None: they come by `fedkeep agent configure`."""
    poll_minutes: float = 60.0
    """How often they are looked for there."""
    trial_seconds: float = 60.0
    """How long the agent must run with new settings before they are good."""
    insecure: bool = False
    """Whether `url` may be `http://` beyond this machine; the signature is checked all the same."""

    def __post_init__(self) -> None:
        check_range(self, "poll_minutes", "trial_seconds", above=0)
        for name in self.allow:
            if name not in ALLOWED:
                raise ValueError(f"allow is of {', '.join(ALLOWED)}, not '{name}'")
        if (self.allow or self.url) and self.key_file is None:
            raise ValueError("settings from afar need the key_file of who may send them")


class RestartError(Exception):
    """The agent is to start itself anew, in the same process."""


class Settings(msgspec.Struct):
    """One set of settings, as it came."""

    version: int
    text: str
    starts: int = 0
    """Starts on trial of which none has ended well yet."""


class Book(msgspec.Struct):
    """What a device knows of settings from afar."""

    good: Settings | None = None
    trying: Settings | None = None
    rejected: int = -1
    """The version that was taken back last."""
    why: str = ""


class SettingsFile:
    """The settings from afar beside a store: the last good ones, and those on trial.

    Parameters
    ----------
    store
        The store's file.
    """

    def __init__(self, store: Path) -> None:
        self._path = store.with_name(store.name + ".settings")
        self.book = Book()
        try:
            self.book = msgspec.json.decode(self._path.read_bytes(), type=Book)
        except FileNotFoundError:
            pass
        except (msgspec.DecodeError, OSError) as error:
            log.warning("%s cannot be read (%s): settings are as configured", self._path, error)

    def _write(self) -> None:
        with atomic_write(self._path, _PRIVATE) as file:
            file.write(msgspec.json.encode(self.book))

    @property
    def newest(self) -> int:
        """The highest version that ever came."""
        known = [one.version for one in (self.book.good, self.book.trying) if one is not None]
        return max([*known, self.book.rejected])

    def begin(self) -> Settings | None:
        """Return the settings to start with, and note the start where they are on trial."""
        trying = self.book.trying
        if trying is not None and trying.starts >= _MOST_STARTS:
            self.reject("the agent did not stay up with them")
            trying = None
        if trying is None:
            return self.book.good
        trying.starts += 1
        self._write()
        return trying

    def propose(self, settings: Settings) -> None:
        """Take settings on trial, from the next start on."""
        self.book.trying = settings
        self._write()

    def reject(self, why: str) -> None:
        """Take settings on trial back: the last good ones count again."""
        if self.book.trying is None:
            return
        log.error("settings version %d are taken back: %s", self.book.trying.version, why)
        self.book.rejected, self.book.why = self.book.trying.version, why[:500]
        self.book.trying = None
        self._write()

    def confirm(self) -> None:
        """Count the settings on trial as good."""
        if self.book.trying is not None:
            log.info("settings version %d are good", self.book.trying.version)
            self.book.good, self.book.trying, self.book.why = self.book.trying, None, ""
            self._write()

    def ended_well(self) -> None:
        """Note that a process on trial was told to stop, and did not fail."""
        if self.book.trying is not None:
            self.book.trying.starts = 0
            self._write()

    def summary(self) -> str:
        """Return which settings count, in a sentence."""
        book = self.book
        parts = ["as configured" if book.good is None else f"version {book.good.version}"]
        if book.trying is not None:
            parts.append(f"version {book.trying.version} on trial")
        if book.why:
            parts.append(f"version {book.rejected} was taken back: {book.why}")
        return "; ".join(parts)


def under_settings(config: "AgentConfig", parse: Callable[[Table], "AgentConfig"]) -> "AgentConfig":
    """Return a configuration with the settings from afar that count over its own.

    Settings on trial that make no configuration are taken back.
    """
    if config.remote.key_file is None:
        return config
    file = SettingsFile(config.store.file)
    while (settings := file.begin()) is not None:
        try:
            return parse(_over(config, settings.text))
        except (ConfigError, RejectedError) as error:
            if settings is not file.book.trying:
                log.error("settings version %d fit no more: %s", settings.version, error)
                break
            file.reject(str(error))
    return config


def _over(config: "AgentConfig", text: str) -> Table:
    """Return the device's own tables with those of a signed text in the place of theirs."""
    _, table = parsed(text)
    for name in table:
        if name not in config.remote.allow:
            raise RejectedError(
                "settings",
                f"this device does not take [{name}] from afar: [remote] allow is "
                f"{list(config.remote.allow)}",
            )
    if "model" in table and not dict(table["model"]).get("sha256"):
        raise RejectedError("settings", "[model] from afar needs the sha256 of its file")
    return {**config.table, **table}


def parsed(text: str) -> tuple[int, Table]:
    """Return the version and the tables of a text of settings."""
    try:
        table = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise RejectedError("settings", f"the settings are not valid TOML: {error}") from None
    version = table.pop("version", None)
    if isinstance(version, bool) or not isinstance(version, int) or not 0 <= version < 1 << 53:
        raise RejectedError("settings", "settings need `version`, a whole number that only rises")
    return version, table


def new_keys() -> tuple[bytes, bytes]:
    """Return a private key and its public key."""
    with optional_import("making keys", "agent"):
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    key = Ed25519PrivateKey.generate()
    return key.private_bytes_raw(), key.public_key().public_bytes_raw()


def sign(text: str, key: bytes) -> bytes:
    """Return a text of settings with its signature before it, by a private key of 32 bytes."""
    with optional_import("signing settings", "agent"):
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    content = text.encode()
    signature = Ed25519PrivateKey.from_private_bytes(key).sign(_PREFIX + content)
    return signature.hex().encode() + b"\n" + content


def verified(signed: bytes, public: bytes) -> str:
    """Return the text of signed settings.

    Raises
    ------
    RejectedError
        If it is too long, or not signed by this key.
    """
    with optional_import("settings from afar", "agent"):
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    if len(signed) > LONGEST:
        raise RejectedError("oversized", f"settings have at most {LONGEST} bytes")
    signature, _, content = signed.partition(b"\n")
    try:
        raw = bytes.fromhex(signature.decode("ascii"))
        Ed25519PublicKey.from_public_bytes(public).verify(raw, _PREFIX + content)
        return content.decode()
    except (ValueError, InvalidSignature):
        raise RejectedError(
            "signature", "the settings are not signed by this device's key"
        ) from None


def read_key(path: str) -> bytes:
    """Return a key of 64 hex digits."""
    try:
        key = bytes.fromhex(Path(path).read_text(encoding="ascii").strip())
    except OSError as error:
        raise ConfigError(f"cannot read the key {path}: {error.strerror}") from error
    except ValueError:
        key = b""
    if len(key) != 32:
        raise ConfigError(f"{path} is no key: it must be 64 hex digits")
    return key


class Remote:
    """Takes settings from afar for one agent, and watches over those on trial."""

    def __init__(
        self, agent: "Agent", parse: Callable[[Table], "AgentConfig"], own: "AgentConfig"
    ) -> None:
        self._agent, self._parse, self._own = agent, parse, own
        self.options = own.remote
        assert self.options.key_file is not None
        self._key = read_key(self.options.key_file)
        if self.options.url is not None:
            _check_url(self.options)
        self.file = SettingsFile(own.store.file)
        self.is_due = threading.Event()
        """Set once the agent is to start anew."""
        self.stop: Callable[[], None] = lambda: None

    def configure(self, signed: bytes) -> str:
        """Take signed settings on trial; returns what counts now.

        Raises
        ------
        RejectedError
            If they are not signed, not newer, not allowed, or make no configuration.
        """
        text = verified(signed, self._key)
        version, _ = parsed(text)
        if version <= self.file.newest:
            raise RejectedError(
                "settings", f"version {version} is not newer than {self.file.newest}"
            )
        try:
            self._parse(_over(self._own, text))
        except ConfigError as error:
            raise RejectedError("settings", str(error)) from error
        try:
            self.file.propose(Settings(version, text))
        except OSError as error:
            raise RejectedError("disk", f"settings cannot be kept ({error.strerror})") from error
        log.info("settings version %d came: the agent starts anew with them", version)
        self.is_due.set()
        threading.Timer(_LEAVING_SECONDS, self.stop).start()
        return self.file.summary()

    def run(self, stopped: threading.Event) -> None:
        """Count settings as good after their trial, and look for new ones, until told to stop."""
        if self.file.book.trying is not None and not stopped.wait(self.options.trial_seconds):
            with self._agent.lock:
                if self._agent.alive() and self._agent.commit():
                    self.file.confirm()
        while self.options.url is not None and not stopped.is_set():
            self._look()
            stopped.wait(60 * self.options.poll_minutes)

    def _look(self) -> None:
        try:
            signed = _fetched(str(self.options.url))
            version, _ = parsed(signed.partition(b"\n")[2].decode())
            if version > self.file.newest:
                self.configure(signed)
        except RejectedError as error:
            log.warning("settings at %s are not taken: %s", self.options.url, error)
        except Exception as error:  # noqa: BLE001 - whatever a server or its library does
            log.warning("no settings from %s: %s", self.options.url, error)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Run in a thread of its own for as long as the block lasts, and note how it ends."""
        stopped = threading.Event()
        name = threading.current_thread().name
        threading.Thread(target=self.run, args=(stopped,), name=name, daemon=True).start()
        try:
            yield
        finally:
            stopped.set()
        if not self.is_due.is_set():
            self.file.ended_well()


def _check_url(options: RemoteOptions) -> None:
    parts = urlsplit(str(options.url))
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"[remote] url must be https://host/path, not {options.url}")
    if parts.scheme == "http":
        require_loopback(parts.hostname, "[remote] url", insecure=options.insecure)


def _fetched(url: str) -> bytes:
    """Return what stands at an address, in bounded length; no redirection is followed."""
    import http.client

    parts = urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(str(parts.hostname), parts.port, timeout=30)
    try:
        connection.request("GET", parts.path or "/")
        answer = connection.getresponse()
        content = answer.read(LONGEST + 1)
    finally:
        connection.close()
    if answer.status != 200:
        raise ConnectionError(f"answered {answer.status}")
    return content
