"""How a sample is known: by the exact bytes of its id, in the namespace that its source names."""

import os
from collections.abc import Container, Iterable, Mapping
from contextlib import suppress
from hashlib import blake2b
from typing import Any

import numpy as np

from fedkeep.core.types import ArraySpec, State, StateSpec

_HASHED = 1 << 62
"""Numbers from here on are hashes, so that no whole number that a sender chooses can be
another's hash."""
_LARGEST = 1 << 63
_NAMESPACE_BYTES = 64
"""What a namespace takes at most, as a rule."""


def sample_id(given: Any, content: bytes) -> int:
    """Return the number of an id as stores of the first format have it, whatever its namespace.

    Parameters
    ----------
    given
        A whole number, a text or a float; None where the sample came without an id.
    content
        The sample's bytes, which stand for the id where there is none.

    Returns
    -------
    int
        The whole number itself, or 63 bits of a hash. Decimal digits in a text count as the number.
    """
    if isinstance(given, str) and given.isdecimal() and len(given) <= len(str(_LARGEST)):
        given = int(given)
    if isinstance(given, int) and not isinstance(given, bool):
        if 0 <= given < _LARGEST:
            return given
        # Decimal digits of a hostile number take for ever, or are refused by Python.
        given = hex(given)
    text = content if given is None else repr(given).encode(errors="backslashreplace")
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "little") >> 1


def exact_id(namespace: str, given: Any, content: bytes) -> int:
    """Return a hash of namespace, type and exact bytes of an id: "007", "7", "٧" and 7 all differ.

    >>> len({exact_id("a", 7, b""), exact_id("a", "7", b""), exact_id("a", "007", b"")})
    3
    >>> exact_id("a", 7, b"") == exact_id("b", 7, b"")
    False
    """
    match given:
        case None:
            kind, data = "content", content
        case bool() | float():
            kind, data = type(given).__name__, repr(given).encode()
        case int():
            kind, data = "int", f"{given:x}".encode()
        case bytes():
            kind, data = "bytes", given
        case _:
            kind, data = "str", str(given).encode(errors="surrogatepass")
    # With its length in front, no namespace can run into what follows it.
    named = namespace.encode(errors="surrogatepass")
    head = f"{kind} {len(named)} ".encode() + named
    number = int.from_bytes(blake2b(head + data, digest_size=8).digest(), "little")
    return _HASHED | number >> 2


class SampleIds:
    """The numbers by which one store knows samples.

    One namespace is plain: its whole numbers below 2^62 are their own number, so that exports show
    them as they came. It is that of the first source when the store was made. All other ids are
    hashed with their namespace.

    Parameters
    ----------
    namespaces
        The namespace of each source, by the source's name; a source that is missing has its own.

    Examples
    --------
    >>> ids = SampleIds({"mill": "mill", "spare": "mill", "pump": "pump"})
    >>> ids.number("mill", 7, b""), ids.number("spare", 7, b"")
    (7, 7)
    >>> ids.number("pump", 7, b"") > 2**62, ids.number("mill", "7", b"") > 2**62
    (True, True)
    """

    def __init__(self, namespaces: Mapping[str, str]) -> None:
        self._namespaces = dict(namespaces)
        self.plain = next(iter(self._namespaces.values()), None)
        """The plain namespace; None until the first sample, where no source is configured."""
        self.earlier = False
        """Whether the store was made before ids had namespaces: what it knows keeps its number."""

    def number(self, source: str, given: Any, content: bytes) -> int:
        """Return the number of the sample that came from a source under an id, or without one."""
        return self._number(self.namespace(source), given, content)

    def namespace(self, source: str) -> str:
        """Return the namespace of a source's ids."""
        found = self._namespaces.get(source, source)
        if self.plain is None:
            self.plain = found
        return found

    def before(self, given: Any, content: bytes) -> int | None:
        """Return the number that an earlier version gave.

        None where none has written this store.
        """
        return sample_id(given, content) if self.earlier else None

    def matches(
        self, text: str, sources: Iterable[str] = (), namespace: str | None = None
    ) -> set[int]:
        """Return the numbers of every id that is written like this text.

        Parameters
        ----------
        text
            The id as people write it: `7` is the number 7 and the text "7".
        sources
            Sources beside the configured ones: those of which the store holds samples.
        namespace
            Only ids of this namespace; None: of all that are known.
        """
        known = {self.namespace(source) for source in [*self._namespaces, *sources]}
        known |= set() if self.plain is None else {self.plain}
        chosen = known if namespace is None else {namespace}
        numbers = {
            self._number(space, form, b"") for space in chosen or {""} for form in _forms(text)
        }
        if self.earlier and namespace in (None, self.plain):
            numbers.add(sample_id(text, b""))
        return numbers

    def state_spec(self) -> StateSpec:
        """Describe the arrays of `snapshot`; a namespace may be of any length."""
        return {"plain*": ArraySpec((_NAMESPACE_BYTES,), np.uint8), "known": ArraySpec((2,), bool)}

    def snapshot(self) -> State:
        """Return what the store must know about its ids."""
        plain = "" if self.plain is None else self.plain
        chosen = np.frombuffer(plain.encode(errors="surrogatepass"), np.uint8)
        return {"plain": chosen, "known": np.array([self.plain is not None, self.earlier])}

    def restore(self, state: State) -> None:
        """Go on with the plain namespace that the store was made with."""
        known, self.earlier = (bool(flag) for flag in state["known"].tolist())
        if known:
            self.plain = state["plain"].tobytes().decode(errors="surrogatepass")

    def _number(self, namespace: str, given: Any, content: bytes) -> int:
        if namespace == self.plain and (self.earlier or _is_plain(given)):
            return sample_id(given, content)
        return exact_id(namespace, given, content)


def written_id(given: Any) -> str:
    """Return an id as people write it and `SampleIds.matches` reads it.

    Empty where it has no text.

    >>> written_id(7), written_id("007"), written_id(b"a/7"), written_id(None)
    ('7', '007', 'a/7', '')
    """
    match given:
        case str():
            return given
        case bytes():
            with suppress(UnicodeDecodeError):
                return given.decode()
            return ""
        case int() if given.bit_length() > 128:  # Python refuses to write very long ones
            return hex(given)
        case None:
            return ""
    return repr(given)


def _is_plain(given: Any) -> bool:
    """Whether the first format's number of an id tells it from all other ids of its namespace."""
    if isinstance(given, str):
        return not given.isdecimal() and not given.startswith(("0x", "-0x"))
    if isinstance(given, int):
        return isinstance(given, bool) or 0 <= given < _HASHED
    return not isinstance(given, bytes)


def _forms(text: str) -> list[Any]:
    """Return the ids that are written like this text."""
    forms: list[Any] = [text, text.encode(errors="surrogatepass")]
    if len(text) <= 40 and text.isascii() and text.removeprefix("-").isdigit():
        forms += [int(text)] * (str(int(text)) == text)
    with suppress(ValueError):
        forms += [float(text)] * (repr(float(text)) == text)
    return forms


class DeviceName:
    """A random name for this device, made with its store and kept with it.

    Names of machines are no use here: devices that were set up from one image share them.
    """

    def __init__(self) -> None:
        self.name = os.urandom(6).hex()

    def state_spec(self) -> StateSpec:
        """Describe the arrays of `snapshot`."""
        return {"name*": ArraySpec((12,), "U1")}

    def snapshot(self) -> State:
        """Return the name as an array."""
        return {"name": np.array(self.name)}

    def restore(self, state: State) -> None:
        """Take the name that the store was made with."""
        self.name = str(state["name"])


def recognised(
    ids: SampleIds, source: str, given: Any, content: bytes, stored: Mapping[int, Any]
) -> int:
    """Return a sample's number, or that of an earlier version where the store holds it under that.

    Parameters
    ----------
    ids
        The store's ids.
    source, given, content
        Where the sample came from, under which id, and its bytes.
    stored
        What is known of each stored sample, by number, with its `source`.
    """
    number = ids.number(source, given, content)
    old = ids.before(given, content)
    if old is None or old == number or number in stored or old not in stored:
        return number
    return old if stored[old].source in ("", source) else number


def is_erased(
    ids: SampleIds, number: int, given: Any, content: bytes, erased: Container[int]
) -> bool:
    """Return whether a sample was erased, under its number or under that of an earlier version."""
    old = ids.before(given, content)
    return number in erased or (old is not None and old in erased)
