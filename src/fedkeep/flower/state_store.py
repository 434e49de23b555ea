"""The server's memory: one transaction per round, in SQLite or PostgreSQL, as bytes with dtype and shape.

A round counts as done when its transaction is committed, and never by halves: after `kill -9` at any point
the next server finds the last whole round. Only arrays that changed are written, so a fleet of many kept
gradients costs what its participants cost.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import numpy as np
import sqlalchemy as sql
from sqlalchemy import event
from sqlalchemy.engine import URL, Connection, Engine, make_url
from sqlalchemy.exc import ArgumentError, SQLAlchemyError
from sqlalchemy.pool import NullPool

from fedkeep.core.errors import ConfigError, DataError, MissingExtraError, RefusedError
from fedkeep.core.types import AnyArray, State

_PLAIN_KINDS = "biufSU"

_tables = sql.MetaData()
_runs = sql.Table(
    "fedkeep_runs",
    _tables,
    sql.Column("run", sql.String(200), primary_key=True),
    sql.Column("round", sql.BigInteger, nullable=False),
    sql.Column("arrays", sql.Integer, nullable=False),
)
_arrays = sql.Table(
    "fedkeep_arrays",
    _tables,
    sql.Column("run", sql.String(200), primary_key=True),
    sql.Column("name", sql.String(500), primary_key=True),
    sql.Column("dtype", sql.String(40), nullable=False),
    sql.Column("shape", sql.String(200), nullable=False),
    sql.Column("digest", sql.LargeBinary(16), nullable=False),
    sql.Column("data", sql.LargeBinary, nullable=False),
)


@dataclass(frozen=True, eq=False)
class Saved:
    """The state after the last round that counts as done."""

    round: int
    state: State


class StateStore:
    """The saved rounds of one run; a second server that continues the same run is noticed and refused."""

    def __init__(self, url: str, run: str) -> None:
        self.run = run
        self._engine = _engine(url)
        self._round: int | None = None
        self._digests: dict[str, bytes] = {}
        try:
            _tables.create_all(self._engine)
        except SQLAlchemyError as error:
            raise ConfigError(f"cannot open the server state {_shown(url)}: {_first_line(error)}") from error

    def load(self) -> Saved | None:
        """The last committed round with its state, each array checked by its digest; None for a new run."""
        with self._engine.begin() as connection:
            head = connection.execute(sql.select(_runs).where(_runs.c.run == self.run)).one_or_none()
            rows = connection.execute(sql.select(_arrays).where(_arrays.c.run == self.run)).all()
        if head is None:
            self._round, self._digests = None, {}
            return None
        if len(rows) != head.arrays:
            raise DataError(
                f"the state of run {self.run!r} has {len(rows)} arrays of {head.arrays}: restore a backup"
            )
        state = {row.name: _decode(row.name, row.dtype, row.shape, row.data, row.digest) for row in rows}
        self._round, self._digests = head.round, {row.name: row.digest for row in rows}
        return Saved(head.round, state)

    def commit(self, round_: int, state: State) -> None:
        """Makes `state` the one after `round_`, whole or not at all."""
        digests = {name: _digest(array) for name, array in state.items()}
        changed = [name for name, digest in digests.items() if self._digests.get(name) != digest]
        gone = [name for name in self._digests if name not in digests]
        with self._engine.begin() as connection:
            self._advance(connection, round_, len(state))
            self._delete(connection, [*changed, *gone])
            if changed:
                rows = [_row(self.run, name, state[name], digests[name]) for name in changed]
                connection.execute(sql.insert(_arrays), rows)
        self._round, self._digests = round_, digests

    def _advance(self, connection: Connection, round_: int, arrays: int) -> None:
        """Moves the run's head on from the round this server knows, unless another server did."""
        values = {"round": round_, "arrays": arrays}
        if self._round is None:
            taken = connection.execute(sql.select(_runs.c.round).where(_runs.c.run == self.run)).one_or_none()
            moved = taken is None
            if moved:
                connection.execute(sql.insert(_runs).values(run=self.run, **values))
        else:
            mine = (_runs.c.run == self.run) & (_runs.c.round == self._round)
            moved = connection.execute(sql.update(_runs).where(mine).values(**values)).rowcount == 1
        if not moved:
            raise RefusedError(
                "stale server", f"another server has continued run {self.run!r}; this one stops"
            )

    def _delete(self, connection: Connection, names: list[str]) -> None:
        for start in range(0, len(names), 500):
            some = names[start : start + 500]
            connection.execute(
                sql.delete(_arrays).where((_arrays.c.run == self.run) & _arrays.c.name.in_(some))
            )


def _engine(url: str) -> Engine:
    """An engine for `sqlite:///file`, a bare file path or `postgresql://...`.

    A connection lives for one transaction: a database that restarted between two rounds is not noticed.
    """
    address = _address(url)
    try:
        engine = sql.create_engine(address, poolclass=NullPool)
    except ModuleNotFoundError as error:
        raise MissingExtraError("server state in PostgreSQL", "postgres") from error
    if engine.dialect.name == "sqlite":
        event.listen(engine, "connect", _make_durable)
    return engine


def _address(url: str) -> URL:
    refusal = f"{_shown(url)} is not a state URL: use sqlite:///FILE or postgresql://USER@HOST/DATABASE"
    try:
        address = make_url(url) if "://" in url else URL.create("sqlite", database=url)
    except ArgumentError as error:
        raise ConfigError(refusal) from error
    match address.drivername:
        case "sqlite":
            Path(address.database or ".").parent.mkdir(parents=True, exist_ok=True)
            return address
        case "postgresql" | "postgres":
            return address.set(drivername="postgresql+psycopg")
        case _:
            raise ConfigError(refusal)


def _make_durable(connection: sql.engine.interfaces.DBAPIConnection, _: object) -> None:
    """A commit is on disk when it returns; no -wal file grows beside the database."""
    cursor = connection.cursor()
    for pragma in ("journal_mode=TRUNCATE", "synchronous=FULL", "busy_timeout=10000"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _row(run: str, name: str, array: AnyArray, digest: bytes) -> dict[str, str | bytes]:
    shape = ",".join(map(str, array.shape))
    return {
        "run": run,
        "name": name,
        "dtype": array.dtype.str,
        "shape": shape,
        "digest": digest,
        "data": np.ascontiguousarray(array).tobytes(),
    }


def _digest(array: AnyArray) -> bytes:
    if array.dtype.kind not in _PLAIN_KINDS:
        raise DataError(f"only plain arrays can be saved, not dtype {array.dtype}")
    head = f"{array.dtype.str}{array.shape}".encode()
    return blake2b(head + np.ascontiguousarray(array).tobytes(), digest_size=16).digest()


def _decode(name: str, dtype: str, shape: str, data: bytes, digest: bytes) -> AnyArray:
    kind = np.dtype(dtype)
    lengths = tuple(int(part) for part in shape.split(",") if part)
    if kind.kind not in _PLAIN_KINDS or len(data) != kind.itemsize * int(np.prod(lengths, dtype=np.int64)):
        raise DataError(f"the saved array {name!r} does not fit its dtype and shape: restore a backup")
    array = np.frombuffer(data, dtype=kind).reshape(lengths).copy()
    if _digest(array) != digest:
        raise DataError(f"the saved array {name!r} is damaged: restore a backup")
    return array


def _shown(url: str) -> str:
    """The URL without its password."""
    try:
        return make_url(url).render_as_string(hide_password=True) if "://" in url else url
    except ArgumentError:
        return "given"


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]
