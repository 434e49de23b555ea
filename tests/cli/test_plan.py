"""`fedkeep plan` as an operator meets it."""

import json
import sys
from pathlib import Path

import pytest

from fedkeep.cli import main

EXAMPLE = {
    "capacity": [20, 40, 20],
    "velocity": [[400, 200, 300], [200, 300, 200], [300, 0, 400]],
    "clients_per_label": 2,
    "labels_per_client": 2,
}


class Shell:
    """Runs the command in this process and keeps its output."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Path
    ) -> None:
        self._monkeypatch, self._capsys, self._folder = monkeypatch, capsys, folder

    def file(self, name: str, text: str) -> str:
        path = self._folder / name
        path.write_text(text)
        return str(path)

    def plan(self, *arguments: str) -> tuple[int, str, str]:
        self._monkeypatch.setattr(sys, "argv", ["fedkeep", "plan", *arguments])
        with pytest.raises(SystemExit) as stop:
            main()
        printed = self._capsys.readouterr()
        return int(stop.value.code or 0), printed.out, printed.err


@pytest.fixture
def shell(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Shell:
    return Shell(monkeypatch, capsys, tmp_path)


def test_json_in_json_out(shell: Shell) -> None:
    code, out, err = shell.plan(shell.file("fleet.json", json.dumps(EXAMPLE)), "--json")
    found = json.loads(out)
    assert (code, err) == (0, "")
    assert list(found) == ["quotas", "label_weights", "shortfalls"]
    assert found["quotas"] == [[10, 10, 0], [0, 20, 20], [10, 0, 10]]
    assert found["label_weights"] == pytest.approx([36 / 23, 40 / 69, 24 / 23])
    assert found["shortfalls"] == []


def test_a_table_for_people_names_labels_and_devices(shell: Shell) -> None:
    sheet = shell.file(
        "fleet.csv", "device, capacity, walk, run, sit\nanna,20,4,2,0\nbert,1,2,3,0\n"
    )
    code, out, _ = shell.plan(sheet, "--clients-per-label", "2")
    assert code == 0
    for word in ("anna", "bert", "walk", "holders", "weight"):
        assert word in out
    assert "label sit has 0 of 2 holders: no device sees it" in out
    assert "1 of 2 labels fit on device bert" in out


def test_options_go_before_the_file(shell: Shell) -> None:
    file = shell.file("fleet.json", json.dumps(EXAMPLE))
    _, out, _ = shell.plan(file, "--json", "--labels-per-client", "1", "--clients-per-label", "1")
    assert [sum(slots > 0 for slots in row) for row in json.loads(out)["quotas"]] == [1, 1, 1]


def test_a_large_fleet_is_shown_in_part(shell: Shell) -> None:
    fleet = {"capacity": [4] * 60, "velocity": [[1, 2]] * 60}
    _, out, _ = shell.plan(shell.file("fleet.json", json.dumps(fleet)))
    assert "+ 10 more" in out


def test_slots_for_the_most_frequent(shell: Shell) -> None:
    code, out, _ = shell.plan(
        shell.file("fleet.json", json.dumps(EXAMPLE)), "--json", "--quantities", "frequent"
    )
    quotas = json.loads(out)["quotas"]
    assert code == 0
    assert [sum(row) for row in quotas] == [20, 40, 20]
    assert quotas != [[10, 10, 0], [0, 20, 20], [10, 0, 10]]


def test_the_papers_plan_the_optimum_and_ours_of_one_fleet(shell: Shell) -> None:
    """Device 2 sees label 0 alone, which the two faster devices hold already."""
    fleet = {"capacity": [2, 2, 2], "velocity": [[9, 1], [8, 1], [1, 0]], "clients_per_label": 1}
    file = shell.file("fleet.json", json.dumps(fleet))

    def held(*options: str) -> list[list[int]]:
        code, out, _ = shell.plan(file, "--json", "--labels-per-client", "1", *options)
        assert code == 0
        return json.loads(out)["quotas"]

    assert held("--coordinator", "paper-greedy") == [[0, 2], [2, 0], [0, 0]]
    assert held() == held("--coordinator", "greedy")
    assert [sum(row) for row in held()] == [2, 2, 2], "ours leaves nobody idle"
    assert sorted(map(sum, held("--coordinator", "exact"))) == [2, 2, 2]
    mixed = shell.plan(file, "--coordinator", "paper-greedy", "--quantities", "frequent")
    check_refused(mixed, "quantities")


def test_an_experiment_with_capacities_of_its_own_is_planned(shell: Shell) -> None:
    experiment = shell.file(
        "small.toml",
        """
        task = { name = "synthetic", devices = 3 }
        storage = { capacity = [3, 5, 7] }
        policy = { name = "ode" }
        """,
    )
    code, out, _ = shell.plan(experiment, "--json")
    assert code == 0
    assert [sum(row) for row in json.loads(out)["quotas"]] == [3, 5, 7]


def test_an_experiment_is_planned_as_it_would_be_run(shell: Shell) -> None:
    experiment = shell.file(
        "small.toml",
        """
        task = { name = "synthetic", devices = 6 }
        storage = { capacity = 7 }
        coordinator = { name = "greedy", clients_per_label = 1, labels_per_client = 3 }
        [sweep]
        "policy.name" = ["fifo", "ode"]
        """,
    )
    code, out, _ = shell.plan(experiment, "--json")
    quotas = json.loads(out)["quotas"]
    assert code == 0
    assert [sum(row) for row in quotas] == [7] * 6
    assert {sum(slots > 0 for slots in row) for row in quotas} <= {1, 2, 3}
    check_refused(shell.plan(experiment, "--labels-per-client", "1"), "change its [coordinator]")


def test_an_experiment_without_coordination_has_no_plan(shell: Shell) -> None:
    experiment = shell.file(
        "fifo.toml", 'task = { name = "synthetic" }\npolicy = { name = "fifo" }\n'
    )
    check_refused(shell.plan(experiment), "nothing to plan")


BAD = {
    "negative velocity": (
        '{"capacity": [1], "velocity": [[1, -1]]}',
        "device 0: velocities must be finite",
    ),
    "NaN velocity": (
        '{"capacity": [1], "velocity": [[1, NaN]]}',
        "device 0: velocities must be finite",
    ),
    "ragged": (
        '{"capacity": [1, 1], "velocity": [[1, 2], [1]]}',
        "device 1 has 1 velocities, but there are 2 labels",
    ),
    "rows missing": (
        '{"capacity": [1, 1], "velocity": [[1, 2]]}',
        "2 capacities but 1 rows of velocity",
    ),
    "no capacity": (
        '{"capacity": [0], "velocity": [[1, 2]]}',
        "capacity must be a whole number of at least 1, got 0",
    ),
    "part of a sample": ('{"capacity": [1.5], "velocity": [[1, 2]]}', "capacity"),
    "wrong key": ('{"capcity": [1], "velocity": [[1, 2]]}', "capcity"),
    "key missing": ('{"velocity": [[1, 2]]}', "capacity"),
    "bad limit": (
        '{"capacity": [1], "velocity": [[1]], "clients_per_label": 0}',
        "clients_per_label must be 1 or more",
    ),
    "no device": ('{"capacity": [], "velocity": []}', "there is no device in it"),
    "no label": ('{"capacity": [1], "velocity": [[]]}', "there is no label in it"),
    "not JSON": ("{capacity", "is not valid JSON"),
    "not an object": ("[1]", "object"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_json_ends_in_one_sentence(shell: Shell, case: str) -> None:
    text, reason = BAD[case]
    check_refused(shell.plan(shell.file("fleet.json", text), "--json"), reason)


BAD_SHEETS = {
    "header": ("capacity,device,a\n1,1,1\n", "the first line must be 'device,capacity'"),
    "empty": ("", "the first line must be 'device,capacity'"),
    "word": ("device,capacity,a\nx,1,fast\n", "device x: 'fast' is not a number"),
    "ragged": ("device,capacity,a,b\nx,1,2\n", "device x has 1 velocities, but there are 2 labels"),
    "short": ("device,capacity,a\nx\n", "device x has 0 velocities, but there are 1 labels"),
    "twice": ("device,capacity,a\nx,1,2\nx,1,2\n", "device 'x' is there twice"),
    "NaN capacity": ("device,capacity,a\nx,nan,2\n", "device x: capacity must be a whole number"),
    "endless capacity": (
        "device,capacity,a\nx,inf,2\n",
        "device x: capacity must be a whole number",
    ),
}


@pytest.mark.parametrize("case", BAD_SHEETS)
def test_a_bad_sheet_ends_in_one_sentence(shell: Shell, case: str) -> None:
    text, reason = BAD_SHEETS[case]
    check_refused(shell.plan(shell.file("fleet.csv", text)), reason)


def test_other_mistakes_end_in_one_sentence(shell: Shell) -> None:
    good = shell.file("fleet.json", json.dumps(EXAMPLE))
    check_refused(shell.plan(good + ".json"), "No such file")
    check_refused(shell.plan(shell.file("fleet.txt", "")), ".json or .csv file")
    check_refused(
        shell.plan(good, "--labels-per-client", "0"), "labels_per_client must be 1 or more, got 0"
    )


def check_refused(found: tuple[int, str, str], reason: str) -> None:
    code, out, err = found
    assert (code, out) == (2, "")
    assert err.startswith("fedkeep: ")
    assert err.count("\n") == 1
    assert reason in err


def test_what_devices_see_but_do_not_hold_is_reported(shell: Shell) -> None:
    _, out, _ = shell.plan(shell.file("fleet.json", json.dumps(EXAMPLE)))
    assert (
        "21.7% of all arrivals have a label that their device does not hold." in out
    )  # 500 of 2300
