"""Tasks whose targets are numbers: recognised, asked about, scaled, and divided into intervals."""

from pathlib import Path

import numpy as np
import pytest

from fedkeep.core.errors import ConfigError, DataError
from fedkeep.core.targets import NumberTargets
from fedkeep.core.types import AnyArray
from fedkeep.data import Stream, StreamOptions
from fedkeep.data.custom import Custom

SAMPLES = 120


def saved(folder: Path, y: AnyArray) -> str:
    rng = np.random.default_rng(0)
    path = folder / "meters.npz"
    np.savez(path, x=rng.normal(size=(SAMPLES, 3)), y=y, device=np.arange(SAMPLES) % 4)
    return str(path)


def readings() -> AnyArray:
    return np.random.default_rng(1).gamma(2.0, 30.0, SAMPLES)


def test_fractions_are_numbers_to_predict(tmp_path: Path) -> None:
    y = readings()
    fleet = Custom(path=saved(tmp_path, y)).load(seed=0)
    assert fleet.targets is not None
    assert np.array_equal(fleet.y, y)
    counts = np.bincount(fleet.strata, minlength=4)
    assert counts.tolist() == [30, 30, 30, 30], "quartiles"
    assert fleet.label_names == fleet.targets.names
    assert fleet.label_counts.sum() == len(fleet.train.indices)
    known = y[fleet.train.indices]
    assert fleet.model.options["centre"] == pytest.approx(known.mean(), rel=1e-3)
    assert fleet.model.options["scale"] == pytest.approx(known.std(), rel=1e-3)


def test_many_whole_numbers_are_asked_about_and_either_answer_is_taken(tmp_path: Path) -> None:
    y = np.arange(SAMPLES) % 40
    path = saved(tmp_path, y)
    with pytest.raises(DataError, match="takes 40 different whole numbers, from 0 to 39: say what"):
        Custom(path=path).load(seed=0)
    number = Custom(path=path, target="number").load(seed=0)
    assert number.targets is not None
    assert number.y.dtype == np.float64
    classes = Custom(path=path, target="class").load(seed=0)
    assert classes.targets is None
    assert classes.labels == 40


def test_few_whole_numbers_and_text_stay_classes(tmp_path: Path) -> None:
    assert Custom(path=saved(tmp_path, np.arange(SAMPLES) % 20)).load(0).labels == 20
    names = np.array([f"room {n % 30}" for n in range(SAMPLES)])
    assert Custom(path=saved(tmp_path, names)).load(0).labels == 30


@pytest.mark.parametrize("target", [None, "number"])
def test_csv_cells_become_the_same_numbers(tmp_path: Path, target: str | None) -> None:
    y = readings()
    rows = [f"meter-{n % 4},{value!r},{n}.5" for n, value in enumerate(y.tolist())]
    path = tmp_path / "meters.csv"
    path.write_text("\n".join(["device,label,heat", *rows]))
    fleet = Custom(path=str(path), target=target).load(0)  # type: ignore[arg-type]
    assert fleet.y.tolist() == y.tolist()


def test_edges_are_as_given_and_one_interval_is_no_division(tmp_path: Path) -> None:
    path = saved(tmp_path, readings())
    assert Custom(path=path, edges=(40.0,)).load(0).targets == NumberTargets((40.0,))
    assert Custom(path=path, intervals=1).load(0).label_names == ("all",)


def test_several_numbers_a_sample(tmp_path: Path) -> None:
    y = np.stack([readings(), -readings()], axis=1)
    path = saved(tmp_path, y)
    fleet = Custom(path=path, target="number").load(0)
    assert fleet.targets == NumberTargets(width=2)
    assert fleet.y.shape == (SAMPLES, 2)
    with pytest.raises(ConfigError, match="edges divide one number"):
        Custom(path=path, target="number", edges=(1.0,)).load(0)


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e13])
def test_a_sample_without_its_number_is_named(tmp_path: Path, bad: float) -> None:
    y = readings()
    y[7] = bad
    with pytest.raises(DataError, match=r"sample 7: label .* is no finite number"):
        Custom(path=saved(tmp_path, y), target="number").load(0)


def test_text_is_no_number(tmp_path: Path) -> None:
    path = saved(tmp_path, np.array(["warm"] * SAMPLES))
    with pytest.raises(DataError, match="label is 'warm', which is no number"):
        Custom(path=path, target="number").load(0)


def test_a_shift_of_the_intervals_is_a_label_shift(tmp_path: Path) -> None:
    fleet = Custom(path=saved(tmp_path, readings())).load(0)
    shifted = Stream(fleet, StreamOptions(drift=1.0, rounds_per_pass=10), seed=0)
    early = np.concatenate([fleet.strata[shifted.arrivals(d, 0, 3).ids] for d in range(4)])
    late = np.concatenate([fleet.strata[shifted.arrivals(d, 7, 10).ids] for d in range(4)])
    apart = np.abs(np.bincount(early, minlength=4) - np.bincount(late, minlength=4)).sum()
    assert apart > len(early) / 2
