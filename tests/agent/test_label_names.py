"""Labels by name, from the line that a device sends to the agent's store."""

import json
from pathlib import Path

import pytest

from fedkeep.agent.arrivals import Arrival
from fedkeep.agent.assembly import parse_config
from fedkeep.agent.label_names import LabelNames
from fedkeep.agent.record_fields import FieldNames
from fedkeep.core.errors import ConfigError

NAMES = ("10", "ok", "worn")


@pytest.mark.parametrize(
    ("label", "number"),
    [("ok", 1), ("worn", 2), ("10", 0), (10, 0), (10.0, 0), (1, -1), ("OK", -1), (True, -1)],
)
def test_a_name_or_its_digits_stand_for_the_label(label: object, number: int) -> None:
    line = FieldNames().parse_json(json.dumps({"x": [1.0], "y": label}).encode())
    assert line is not None
    arrival = Arrival(line.x, line.y, line.id, "pump")
    assert LabelNames(NAMES).numbered(arrival).y == number
    assert LabelNames(()).numbered(arrival) is arrival


def test_names_must_be_one_for_each_label(tmp_path: Path) -> None:
    table = {
        "samples": {"shape": [1], "labels": 3, "names": ["ok", "ok", "worn"]},
        "store": {"path": str(tmp_path / "a.store"), "budget": 200_000},
    }
    with pytest.raises(ConfigError, match="names must be 3 different ones"):
        parse_config(table)
