"""A run's records: one JSONL file, written line by line, read back, and summed up."""

from fedkeep.records.lines import DeviceLine, End, Evaluation, Header, Line, Members, Round
from fedkeep.records.measures import Comparison, compare
from fedkeep.records.runs import Recorder, Run, read_run, read_runs
from fedkeep.records.tables import frame

__all__ = [
    "Comparison", "DeviceLine", "End", "Evaluation", "Header", "Line", "Members", "Recorder", "Round", "Run", "compare",
    "frame", "read_run", "read_runs",
]  # fmt: skip
