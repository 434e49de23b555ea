"""What the paper reports, read from one file, so that no number of it is written anywhere else."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedkeep.config import read_toml


@dataclass(frozen=True)
class Paper:
    """The tables of `paper.toml`."""

    tables: dict[str, Any]
    causes: dict[str, str] = field(default_factory=dict)
    """Why a claim did not come out, as far as we found it out."""

    def source(self, table: str) -> str:
        return str(self.tables[table]["source"])

    def of(self, table: str, quantity: str, row: str, column: str) -> float | None:
        """The paper's number in a table's row and column; None where it has none. A table may have a single row."""
        found = self.tables.get(table, {})
        values = found.get(quantity, {})
        values = values.get(row) if isinstance(values, dict) else values
        if values is None or column not in found.get("columns", ()):
            return None
        return float(values[found["columns"].index(column)])

    def claim(self, name: str) -> Any:
        return self.tables["claims"][name]


def read_paper(path: Path) -> Paper:
    """The paper's numbers in `path`, and the causes in `causes.toml` beside it."""
    return Paper(read_toml(path), read_toml(path.with_name("causes.toml")))
