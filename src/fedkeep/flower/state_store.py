"""The server's durable state: one transaction per round, in SQLite or PostgreSQL.

A round counts as done when its transaction is committed, and never by halves: after `kill -9` at
any point the next server finds the last whole round. Arrays are stored in chunks and only chunks
that changed are written, so a fleet of many kept gradients costs what its participants cost.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import sqlalchemy as sql
from sqlalchemy import event
from sqlalchemy.engine import URL, Engine, make_url
from sqlalchemy.exc import ArgumentError, SQLAlchemyError
from sqlalchemy.pool import NullPool

from fedkeep.core.errors import (
    ConfigError,
    DataError,
    RejectedError,
    RejectionReason,
    optional_import,
)
from fedkeep.core.types import AnyArray, State

_PLAIN_KINDS = "biufSU"
_CHUNK_BYTES = 1 << 18
_ROWS_AT_ONCE = 64
"""Chunks that are written by one statement: 16 MB."""

Chunk: TypeAlias = Mapping[Any, Any]
"""A row of `fedkeep_chunks` by its columns."""

_tables = sql.MetaData()
_runs = sql.Table(
    "fedkeep_runs",
    _tables,
    sql.Column("run", sql.String(200), primary_key=True),
    sql.Column("round", sql.BigInteger, nullable=False),
    sql.Column("chunks", sql.Integer, nullable=False),
)
_chunks = sql.Table(
    "fedkeep_chunks",
    _tables,
    sql.Column("run", sql.String(200), primary_key=True),
    sql.Column("name", sql.String(500), primary_key=True),
    sql.Column("number", sql.Integer, primary_key=True),
    sql.Column("dtype", sql.String(40), nullable=False),
    sql.Column("shape", sql.String(200), nullable=False),
    sql.Column("digest", sql.LargeBinary(16), nullable=False),
    sql.Column("data", sql.LargeBinary, nullable=False),
)


class Saved(NamedTuple):
    """The state after the last round that counts as done."""

    round: int
    state: State


class StateStore:
    """The saved rounds of one run; a second server on the same run is rejected.

    >>> from tempfile import mkdtemp
    >>> url = f"{mkdtemp()}/state.db"
    >>> StateStore(url, "production").commit(3, {"model": np.zeros(2)})
    >>> StateStore(url, "production").load()
    Saved(round=3, state={'model': array([0., 0.])})
    """

    def __init__(self, url: str, run: str) -> None:
        self.run = run
        self._round: int | None = None
        self._digests: dict[tuple[str, int], bytes] = {}
        """Of the chunks that are saved, by their arrays' names and their numbers in them."""
        shown = "given"
        try:
            address = make_url(url) if "://" in url else URL.create("sqlite", database=url)
            shown = url if "://" not in url else address.render_as_string(hide_password=True)
            self._engine = _engine(address)
            _tables.create_all(self._engine)
        except ArgumentError as error:
            form = "use sqlite:///FILE or postgresql://USER@HOST/DATABASE"
            raise ConfigError(f"{shown} is not a state URL: {form}") from error
        except SQLAlchemyError as error:
            why = str(error).strip().splitlines()[0]
            raise ConfigError(f"cannot open the server state {shown}: {why}") from error

    def load(self) -> Saved | None:
        """Return the last committed round with its state, checked by digests; None if new."""
        with self._engine.begin() as connection:
            head = connection.execute(
                sql.select(_runs).where(_runs.c.run == self.run)
            ).one_or_none()
            mine = (
                sql.select(_chunks)
                .where(_chunks.c.run == self.run)
                .order_by(_chunks.c.name, _chunks.c.number)
            )
            rows = connection.execute(mine).all()
        if head is None:
            self._round, self._digests = None, {}
            return None
        if len(rows) != head.chunks:
            raise DataError(
                f"the state of run {self.run!r} has {len(rows)} parts of {head.chunks}: "
                "restore a backup"
            )
        arrays: defaultdict[str, list[Chunk]] = defaultdict(list)
        for row in rows:
            if _digest(row._mapping) != row.digest:
                raise DataError(f"the saved array {row.name!r} is damaged: restore a backup")
            arrays[row.name].append(row._mapping)
        self._round, self._digests = (
            head.round,
            {(row.name, row.number): row.digest for row in rows},
        )
        state = {name: _joined(name, chunks) for name, chunks in arrays.items()}
        return Saved(head.round, state)

    def saved(self, name: str) -> AnyArray | None:
        """Return one array of what was last committed, or None; the others are not read."""
        with self._engine.begin() as connection:
            mine = (
                sql.select(_chunks)
                .where(_chunks.c.run == self.run, _chunks.c.name == name)
                .order_by(_chunks.c.number)
            )
            rows = [row._mapping for row in connection.execute(mine).all()]
        return _joined(name, rows) if rows else None

    def commit(self, round_: int, state: State) -> None:
        """Make `state` the one after `round_`, whole or not at all."""
        # Twice over the arrays, so that no more than a few chunks are held beside them.
        digests = {
            (name, chunk["number"]): _digest(chunk)
            for name, array in state.items()
            for chunk in _cut(name, array)
        }
        changed = {key for key, digest in digests.items() if self._digests.get(key) != digest}
        gone = [key for key in self._digests if key not in digests]
        values = {"round": round_, "chunks": len(digests)}
        with self._engine.begin() as connection:
            mine = _runs.c.run == self.run
            if self._round is not None:
                known = sql.update(_runs).where(mine, _runs.c.round == self._round)
                moved = connection.execute(known.values(**values)).rowcount == 1
            elif moved := connection.execute(sql.select(_runs.c.round).where(mine)).first() is None:
                connection.execute(sql.insert(_runs).values(run=self.run, **values))
            if not moved:
                raise RejectedError(
                    RejectionReason.STALE_SERVER,
                    f"another server has continued run {self.run!r}; this one stops",
                )
            if old := [
                {"a_name": n, "a_number": i}
                for n, i in [*changed, *gone]
                if (n, i) in self._digests
            ]:
                named = (_chunks.c.name == sql.bindparam("a_name")) & (
                    _chunks.c.number == sql.bindparam("a_number")
                )
                connection.execute(sql.delete(_chunks).where(_chunks.c.run == self.run, named), old)
            rows: list[dict[str, Any]] = []
            for name, array in state.items():
                if not any((name, number) in changed for number in range(_parts_of(array))):
                    continue
                for chunk in _cut(name, array):
                    key = name, chunk["number"]
                    if key in changed:
                        rows.append({**chunk, "run": self.run, "digest": digests[key]})
                    if len(rows) >= _ROWS_AT_ONCE:
                        connection.execute(sql.insert(_chunks), rows)
                        rows = []
            if rows:
                connection.execute(sql.insert(_chunks), rows)
        self._round, self._digests = round_, digests


def _engine(address: URL) -> Engine:
    """Return an engine for SQLite or PostgreSQL.

    A connection lives for one transaction: a database that restarted between two rounds is not
    noticed.
    """
    if address.drivername == "sqlite":
        Path(address.database or ".").parent.mkdir(parents=True, exist_ok=True)
    elif address.drivername in ("postgresql", "postgres"):
        address = address.set(drivername="postgresql+psycopg")
    else:
        raise ArgumentError(address.drivername)
    with optional_import("server state in PostgreSQL", "postgres"):
        engine = sql.create_engine(address, poolclass=NullPool)

    def make_durable(connection: sql.engine.interfaces.DBAPIConnection, _: object) -> None:
        """Put a commit on disk before it returns, without a -wal file beside the database."""
        cursor = connection.cursor()
        for pragma in ("journal_mode=TRUNCATE", "synchronous=FULL", "busy_timeout=10000"):
            cursor.execute(f"PRAGMA {pragma}")
        cursor.close()

    if address.drivername == "sqlite":
        event.listen(engine, "connect", make_durable)
    return engine


def _cut(name: str, array: AnyArray) -> Iterator[Chunk]:
    if array.dtype.kind not in _PLAIN_KINDS:
        raise DataError(f"only plain arrays can be saved, and {name!r} is of dtype {array.dtype}")
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    form = {"name": name, "dtype": array.dtype.str, "shape": ",".join(map(str, array.shape))}
    for number in range(_parts_of(array)):
        start = number * _CHUNK_BYTES
        yield {**form, "number": number, "data": flat[start : start + _CHUNK_BYTES].tobytes()}


def _parts_of(array: AnyArray) -> int:
    """How many chunks an array takes; one if it is empty."""
    return max(1, -(-array.nbytes // _CHUNK_BYTES))


def _joined(name: str, chunks: Sequence[Chunk]) -> AnyArray:
    """Return the array of which these are the chunks, in order."""
    data = b"".join(chunk["data"] for chunk in chunks)
    shape = [int(part) for part in chunks[0]["shape"].split(",") if part]
    kind = np.dtype(chunks[0]["dtype"])
    if kind.kind not in _PLAIN_KINDS or len(data) != kind.itemsize * prod(shape):
        raise DataError(
            f"the saved array {name!r} does not fit its dtype and shape: restore a backup"
        )
    return np.frombuffer(data, dtype=kind).reshape(shape).copy()


def _digest(chunk: Chunk) -> bytes:
    head = "{name}/{number}/{dtype}/{shape}/".format_map(chunk).encode()
    return blake2b(head + chunk["data"], digest_size=16).digest()
