"""The records of runs: JSONL files, written line by line, read back and compared."""

from fedkeep.records.lines import (
    Change,
    DeviceLine,
    End,
    Evaluation,
    GistLine,
    Header,
    HoldingsLine,
    Line,
    Member,
    Members,
    PlanLine,
    PrivacyLine,
    Round,
    Slot,
    Timing,
)
from fedkeep.records.measures import Comparison, compare
from fedkeep.records.runs import Recorder, Run, read_run, read_runs
from fedkeep.records.tables import frame

__all__ = [
    "Change",
    "Comparison",
    "DeviceLine",
    "End",
    "Evaluation",
    "GistLine",
    "Header",
    "HoldingsLine",
    "Line",
    "Member",
    "Members",
    "PlanLine",
    "PrivacyLine",
    "Recorder",
    "Round",
    "Run",
    "Slot",
    "Timing",
    "compare",
    "frame",
    "read_run",
    "read_runs",
]
