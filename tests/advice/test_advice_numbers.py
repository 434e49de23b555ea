"""`fedkeep advise` and `compare` on a CSV whose label is a number to predict."""

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from fedkeep import compare
from fedkeep.agent.assembly import read_config
from fedkeep.cli.app import app
from fedkeep.config.method import parse_fleet
from fedkeep.core.errors import DataError
from fedkeep.core.targets import NumberTargets
from fedkeep.records import read_runs
from fedkeep.tables import read_toml


def csv_of(folder: Path, *, whole: bool = False) -> Path:
    """Meters whose reading is linear in what is measured; each goes from low to high."""
    rng = np.random.default_rng(0)
    rows = ["device,label,heat,load,noise"]
    for device in range(8):
        for step in range(60):
            heat, load = step / 20 + rng.normal(), rng.normal()
            reading = 50 + 10 * heat - 4 * load + rng.normal()
            shown = f"{reading:.0f}" if whole else f"{reading:.3f}"
            rows.append(f"meter-{device},{shown},{heat:.4f},{load:.4f},{rng.normal():.4f}")
    path = folder / "meters.csv"
    path.write_text("\n".join(rows))
    return path


def test_advice_on_numbers_is_by_r2_and_its_files_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, small in {"_FEWEST_ROUNDS": 20, "_MOST_ROUNDS": 20, "LOOKS": (3,)}.items():
        monkeypatch.setattr(f"fedkeep.advice.trial.{name}", small)
    out = tmp_path / "advice"
    called = ["advise", str(csv_of(tmp_path)), "--out", str(out), "--minutes", "9", "--jobs", "1"]
    found = CliRunner().invoke(app, [*called, "--participation", "0.5"])
    assert found.exit_code == 0, found.output
    assert "a number to predict from" in found.output
    assert "Methods are judged by R2" in found.output
    assert "reached an R2 of" in found.output
    assert "wrong" not in found.output
    runs = read_runs(out / "runs")
    assert {run.header.measure for run in runs} == {"r2"}
    ends = [run.evaluations[-1] for run in runs if run.end is not None]
    assert max(e.accuracy for e in ends if e.accuracy is not None) > 0.8
    assert min(e.rmse for e in ends if e.rmse is not None) < 6
    agent = read_config(out / "agent.toml")
    fleet = parse_fleet(read_toml(out / "fleet.toml"))
    assert agent.samples.numbers == fleet.samples.numbers
    assert len(agent.samples.edges) == 3
    assert agent.model == fleet.model
    assert agent.model["centre"] == pytest.approx(65, abs=5)
    assert "R2" in (out / "advice.html").read_text()


def test_whole_numbers_are_asked_about_by_advise(tmp_path: Path) -> None:
    called = ["advise", str(csv_of(tmp_path, whole=True)), "--out", str(tmp_path / "advice")]
    found = CliRunner().invoke(app, called)
    assert "different whole numbers" in str(found.exception)
    assert 'target = "number"' in str(found.exception)
    wrong = CliRunner().invoke(app, [*called, "--target", "regression"])
    assert "--target takes class or number" in str(wrong.exception)


def test_compare_recognises_numbers_or_asks(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, 3)).astype(np.float32)
    y, device = 5 * x[:, 0] - x[:, 1] + 20, np.arange(300) % 6
    options = {"methods": ("fifo", "gist-local"), "seeds": 1, "rounds": 40, "jobs": 1}
    found = compare(x, y, device, progress=False, out=tmp_path / "a", **options)  # type: ignore[arg-type]
    assert "final R2" in repr(found)
    assert found.frame()["rmse"].iloc[-1] < found.frame()["rmse"].iloc[0]
    with pytest.raises(DataError, match="different whole numbers"):
        compare(x, np.arange(300), device, progress=False, **options)  # type: ignore[arg-type]
    several = compare(
        x, np.stack([y, -y], axis=1), device, target="number", progress=False,
        out=tmp_path / "b", **options,  # type: ignore[arg-type]
    )  # fmt: skip
    config = json.loads(json.dumps(several.runs[0].header.config))
    assert config["task"]["target"] == "number"
    assert several.runs[0].evaluations[-1].accuracy > 0.5  # type: ignore[operator]


def test_the_intervals_stand_for_labels() -> None:
    assert NumberTargets((1.0, 2.0)).names == ("below 1", "1 to 2", "2 and more")
