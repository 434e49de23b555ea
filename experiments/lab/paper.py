"""What the paper reports, read from one file, so that no number of it is written anywhere else."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedkeep.core.errors import DataError


@dataclass(frozen=True)
class Paper:
    """The tables of `paper.toml`."""

    tables: dict[str, Any]
    causes: dict[str, str] = field(default_factory=dict)
    """Why a claim did not come out, as far as we found it out."""

    def source(self, table: str) -> str:
        return str(self.tables[table]["source"])

    def of(self, table: str, quantity: str, row: str, column: str) -> float | None:
        """The paper's number in a table's row and column; None where it has none."""
        columns: Sequence[str] = self.tables[table].get("columns", ())
        values = self.tables[table].get(quantity, {}).get(row)
        if values is None or column not in columns:
            return None
        return float(values[columns.index(column)])

    def claim(self, name: str) -> Any:
        return self.tables["claims"][name]


def read_paper(path: Path) -> Paper:
    """The paper's numbers in `path`, and the causes in `causes.toml` beside it."""
    return Paper(_toml(path), _toml(path.with_name("causes.toml")))


def _toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise DataError(f"cannot read {path}: {error}") from error
