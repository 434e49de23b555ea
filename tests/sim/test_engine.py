"""The simulator: exact although lazy, the same bytes for the same seed, whole after a kill."""

import contextlib
import hashlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from fedkeep.config.experiment import RunSpec, expand, resolve
from fedkeep.core.errors import ConfigError
from fedkeep.records import DeviceLine, HoldingsLine, PlanLine, read_run
from fedkeep.sim.engine import Simulator
from fedkeep.sim.fleet import SimulatedFleet
from fedkeep.sim.runner import play, record_path
from fedkeep.sim.sweep import run_sweep
from fedkeep.tables import Table, merged


def experiment(**tables: object) -> Table:
    base: Table = {
        "task": {"name": "demo", "devices": 12},
        "storage": {"capacity": 8},
        "train": {"rounds": 30, "participation": 0.25, "learning_rate": 0.05},
        "record": {"every": 5, "checkpoint_every": 10},
    }
    return base | tables


def final_model(table: Table, *, eager: bool = False) -> np.ndarray:
    """With `eager`, every device sees its arrivals in every round, as a real one would."""
    simulator = Simulator(resolve(table))
    fleet, everyone = simulator.parts.fleet, range(simulator.parts.data.devices)
    while simulator.server.round < simulator.experiment.train.rounds:
        if eager and isinstance(fleet, SimulatedFleet):
            fleet.catch_up(everyone, simulator.server.round + 1)
        simulator.play_round(evaluated=False)
    return simulator.server.model


@pytest.mark.parametrize("policy", ["ode", "fifo", "reservoir", "high-loss", "sld", "fedbalancer"])
def test_catching_up_late_equals_seeing_every_sample_as_it_comes(policy: str) -> None:
    table = experiment(policy={"name": policy})
    np.testing.assert_allclose(
        final_model(table), final_model(table, eager=True), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize(
    "tables",
    [
        {"gist": {"mode": "local"}},
        {"gist": {"mode": "shared"}},
        {"gist": {"mode": "shared"}, "policy": {"name": "ode"}, "weights": {"client_label": 1.0}},
        {"gist": {"mode": "local", "label_matching": False}, "policy": {"name": "fifo"}},
        {
            "gist": {"mode": "shared"},
            "aggregation": {"name": "fednova"},
            "train": {
                "rounds": 30,
                "participation": 0.25,
                "learning_rate": 0.05,
                "batch_size": 3,
                "proximal": 0.1,
            },
        },
    ],
    ids=["local", "shared", "ode", "unmatched", "fednova-mini-batches-fedprox"],
)
def test_a_gist_that_catches_up_late_is_the_one_that_saw_every_sample_as_it_came(
    tables: Table,
) -> None:
    table = experiment(**tables)
    np.testing.assert_allclose(
        final_model(table), final_model(table, eager=True), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("policy", ["ode", "fifo"])
def test_measuring_the_rates_does_not_make_the_fleet_see_more(policy: str) -> None:
    table = experiment(policy={"name": policy}, profile={"measured": True, "every": 7})
    np.testing.assert_allclose(
        final_model(table), final_model(table, eager=True), rtol=1e-4, atol=1e-5
    )


def test_devices_declare_what_they_counted_and_weigh_themselves_by_it() -> None:
    """All arrive at known rates, so after a whole pass the counted shares are the true ones."""
    stream = {"rounds_per_pass": 10}
    simulator = Simulator(
        resolve(experiment(profile={"measured": True, "every": 10, "window": 10.0}, stream=stream))
    )
    for _ in simulator.run(21):
        pass
    truth, fleet = simulator.parts.velocities, simulator.parts.fleet
    assert isinstance(fleet, SimulatedFleet)
    for device in range(simulator.parts.data.devices):
        declared = fleet.device(device).profile().velocity
        np.testing.assert_allclose(declared.sum(), truth[device].sum(), rtol=0.1)
        assert np.corrcoef(declared, truth[device])[0, 1] > 0.9


def test_declared_velocities_are_wrong_by_the_share_that_is_asked_for() -> None:
    """Figure 16 of the journal: the plan and the weights rest on them, the arrivals do not."""

    def declared(error: float) -> np.ndarray:
        table = experiment(task={"name": "demo", "devices": 300}, profile={"velocity_error": error})
        return Simulator(resolve(table)).parts.velocities

    truth, wrong = declared(0.0), declared(0.2)
    seen = truth > 0
    errors = wrong[seen] / truth[seen] - 1
    assert abs(errors.mean()) < 0.02
    assert errors.std() == pytest.approx(0.2, rel=0.1)
    assert (wrong[~seen] == 0).all()
    assert declared(3.0).min() == 0, "nobody declares less than nothing"
    with pytest.raises(ConfigError, match="leave it out with measured"):
        resolve(experiment(profile={"velocity_error": 0.5, "measured": True}))


def test_unlimited_storage_so_far_begins_small_and_ends_as_all_there_is() -> None:
    def trained(so_far: bool, rounds: int) -> list[int]:
        table = experiment(
            policy={"name": "full-data", "so_far": so_far}, stream={"rounds_per_pass": 20}
        )
        simulator, counts = Simulator(resolve(table)), [0]
        for _ in simulator.run(rounds):
            counts.append(simulator.tally["samples_trained"])
        return np.diff(counts).tolist()

    so_far, all_of_it = trained(True, 30), trained(False, 30)
    assert so_far[0] <= all_of_it[0] / 10
    assert so_far[:19] < all_of_it[:19]
    assert so_far[19:] == all_of_it[19:]


def test_prequential_accuracy_is_that_of_the_model_before_it_trains(tmp_path: Path) -> None:
    """One round can be computed by hand: the untrained model on the first round's arrivals."""
    table = experiment(
        record={"every": 1, "prequential": True}, train={"rounds": 3, "learning_rate": 0.05}
    )
    fresh = Simulator(resolve(table))
    batches = [fresh.parts.stream.arrivals(d, 0, 1) for d in range(fresh.parts.data.devices)]
    x, y = np.concatenate([b.x for b in batches]), np.concatenate([b.y for b in batches])
    by_hand = float((fresh.parts.learner.logits(fresh.server.model, x).argmax(axis=1) == y).mean())
    evaluations = read_run(play(expand(table)[0], tmp_path)).evaluations
    assert evaluations[0].prequential is None
    assert evaluations[1].prequential == pytest.approx(by_hand)


def test_the_worst_devices_and_the_rarest_labels_are_measured() -> None:
    simulator = Simulator(resolve(experiment()))
    found = simulator.evaluate()
    ranked = np.sort(found.device_accuracy[~np.isnan(found.device_accuracy)])
    assert found.worst_tenth == ranked[0], "one device of twelve"
    rarest = np.argsort(simulator.parts.data.label_counts.sum(axis=0), kind="stable")
    known = [found.label_recall[y] for y in rarest if not np.isnan(found.label_recall[y])]
    assert found.rare_recall == pytest.approx(np.mean(known[: round(len(known) / 4)]))
    counts = np.bincount(simulator.parts.data.pooled_test.y, minlength=simulator.parts.data.labels)
    assert np.nansum(found.label_recall * counts) / counts.sum() == pytest.approx(found.accuracy)


@pytest.mark.parametrize("policy", ["ode", "fifo", "full-data", "central"])
def test_learns(policy: str) -> None:
    table = experiment(
        policy={"name": policy}, train={"rounds": 60, "participation": 0.25, "learning_rate": 0.05}
    )
    simulator = Simulator(resolve(table))
    before = simulator.evaluate().accuracy
    for _ in simulator.run():
        pass
    after = simulator.evaluate()
    assert after.accuracy > before + 0.2
    assert after.device_accuracy.shape == (simulator.parts.data.devices,)


@pytest.mark.parametrize(
    "tables",
    [
        {"estimator": {"name": "round-mean"}},
        {"estimator": {"name": "exact", "exact_samples": 100}},
        {"estimator": {"name": "stored"}},
        {"estimator": {"cold_start": "exact"}},
        {"storage": {"capacity": 8, "after_use": "evict_trained_first"}},
        {"storage": {"capacity": 8, "after_use": "discount", "discount": 2}},
        {"storage": {"capacity": 8, "rescore": False, "max_age": 50}},
        {"weights": {"client_label": 0.5}},
        {"aggregation": {"name": "fednova"}},
        {"preset": "paper"},
        {"preset": "authors"},
        {"policy": {"name": "fifo"}, "coordinator": {"name": "greedy", "applies_to": "all"}},
        {"regions": {"name": "k-means", "count": 4}},
        {
            "regions": {
                "name": "hierarchical",
                "count": 3,
                "space": "activations",
            }
        },
        {"coordinator": {"name": "exact", "clients_per_label": 2}},
        {"coordinator": {"quantities": "frequent"}},
        {"stream": {"label_noise": 0.2, "drift": 0.5}},
        {"stream": {"burst": 10.0}},
        {"profile": {"measured": True, "every": 7}},
        {"profile": {"velocity_error": 0.5}},
        {"stream": {"current": False}},
        {"storage": {"capacity": 8, "capacity_spread": 0.7}},
        {"estimator": {"name": "incremental", "normalise": False}},
        {"coordinator": {"name": "paper-greedy", "unassigned": "fill"}},
        {"correction": {"name": "momentum"}},
        {"correction": {"name": "fedvarp"}},
        {"correction": {"name": "scaffold"}},
        {"policy": {"name": "full-data", "so_far": True}},
        {"train": {"rounds": 30, "dropout": 0.5, "batch_size": 3, "proximal": 0.1}},
    ],
    ids=str,
)
def test_every_option_runs_and_repeats(tables: Table) -> None:
    table = experiment(**tables)
    np.testing.assert_array_equal(final_model(table), final_model(table))


def test_simplified_values_come_from_the_last_layer_alone() -> None:
    table = experiment(model={"name": "mlp", "hidden": [7], "last_layers": 1})
    simulator = Simulator(resolve(table))
    assert simulator.parts.learner.gradient_size == (7 + 1) * simulator.parts.data.labels
    for record in simulator.run(10):
        assert not record.summary.rejections


def test_dropouts_are_counted_and_stall_nothing() -> None:
    simulator = Simulator(
        resolve(experiment(train={"rounds": 30, "participation": 0.5, "dropout": 0.5}))
    )
    missing = [len(record.summary.missing) for record in simulator.run()]
    assert len(missing) == 30
    assert 30 < sum(missing) < 150


def cells() -> list[RunSpec]:
    table = experiment(
        methods={"ode": {"policy": {"name": "ode"}}, "fifo": {"policy": {"name": "fifo"}}}
    )
    return expand(table | {"sweep": {"seed": [0, 1]}})


def digests(directory: Path) -> dict[str, str]:
    files = [p for p in sorted(directory.glob("*.jsonl")) if not p.name.endswith(".timing.jsonl")]
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def test_the_same_seed_gives_the_same_bytes_whatever_the_number_of_workers(tmp_path: Path) -> None:
    for jobs in (1, 2):
        run_sweep(cells(), tmp_path / str(jobs), jobs=jobs, resume=False, listen=lambda *_: None)
    assert len(digests(tmp_path / "1")) == 4
    assert digests(tmp_path / "1") == digests(tmp_path / "2")


def test_a_run_stopped_anywhere_resumes_to_the_same_bytes(tmp_path: Path) -> None:
    cell = cells()[0]
    play(cell, tmp_path / "whole")

    class StopError(Exception):
        pass

    def stop_at(limit: int) -> None:
        def progress(round_: int, accuracy: float | None) -> None:
            if round_ == limit:
                raise StopError

        with pytest.raises(StopError):
            play(cell, tmp_path / "parts", resume=True, progress=progress)

    for limit in (3, 11, 17, 29):
        stop_at(limit)
    play(cell, tmp_path / "parts", resume=True)
    assert digests(tmp_path / "whole") == digests(tmp_path / "parts")


def test_a_run_whose_record_is_gone_starts_anew_though_its_checkpoint_is_there(
    tmp_path: Path,
) -> None:
    cell = cells()[0]
    play(cell, tmp_path / "whole")

    def stop(round_: int, accuracy: float | None) -> None:
        if round_ == 21:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        play(cell, tmp_path / "parts", progress=stop)
    assert list((tmp_path / "parts").glob("*.checkpoint"))
    record_path(cell, tmp_path / "parts").unlink()
    play(cell, tmp_path / "parts", resume=True)
    assert digests(tmp_path / "whole") == digests(tmp_path / "parts")


@pytest.mark.parametrize("finished", [True, False])
def test_a_flipped_bit_is_noticed_on_resume(tmp_path: Path, finished: bool) -> None:
    cell = cells()[0]
    play(cell, tmp_path / "whole")

    def stop(round_: int, accuracy: float | None) -> None:
        if round_ == 21 and not finished:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) if not finished else contextlib.nullcontext():
        play(cell, tmp_path / "parts", progress=stop)
    path = record_path(cell, tmp_path / "parts")
    raw = bytearray(path.read_bytes())
    raw[raw.index(b'"accuracy":0.') + len('"accuracy":0.')] ^= (
        1  # another digit: still a number, and JSON
    )
    path.write_bytes(raw)
    play(cell, tmp_path / "parts", resume=True)
    assert digests(tmp_path / "whole") == digests(tmp_path / "parts")


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc to see processes")
def test_workers_end_with_a_parent_that_was_killed(tmp_path: Path) -> None:
    file = tmp_path / "long.toml"
    file.write_text(
        'task = { name = "demo", devices = 12 }\n'
        'policy = { name = "fifo" }\n'
        "record = { every = 5 }\n"
        "train = { rounds = 100000, participation = 0.5 }\nsweep = { seed = [0, 1] }\n"
    )
    command = [
        sys.executable,
        "-m",
        "fedkeep",
        "run",
        str(file),
        "--jobs",
        "2",
        "--out",
        str(tmp_path / "out"),
    ]
    parent = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while len(records := list((tmp_path / "out").glob("*seed?.jsonl"))) < 2:
        assert parent.poll() is None
        time.sleep(0.05)
    workers = children_of(parent.pid)
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 120
    while any(Path(f"/proc/{worker}").exists() for worker in workers):
        assert time.monotonic() < deadline, "a worker outlived its parent"
        time.sleep(0.05)
    assert workers
    assert records


def children_of(pid: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(stat.read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(stat.parent.name))
    return found


def test_a_run_killed_outright_resumes_to_the_same_bytes(tmp_path: Path) -> None:
    file = tmp_path / "kill.toml"
    file.write_text(
        'task = { name = "demo", devices = 12 }\n'
        "record = { every = 5, checkpoint_every = 5 }\n"
        'policy = { name = "ode" }\n'
        "train = { rounds = 200, participation = 0.5, learning_rate = 0.05 }\n"
    )
    command = [
        sys.executable,
        "-m",
        "fedkeep",
        "run",
        str(file),
        "--jobs",
        "1",
        "--resume",
        "--out",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [*command, str(tmp_path / "whole")], check=True, env=environment, capture_output=True
    )
    for kill in range(3):
        process = subprocess.Popen(
            [*command, str(tmp_path / "killed")],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        checkpoint = tmp_path / "killed" / "ode-seed0.checkpoint"
        seen = checkpoint.stat().st_mtime_ns if checkpoint.exists() else 0
        while process.poll() is None and (
            not checkpoint.exists() or checkpoint.stat().st_mtime_ns == seen
        ):
            time.sleep(0.01)
        time.sleep(0.02 * kill)
        process.send_signal(signal.SIGKILL)
        process.wait()
    subprocess.run(
        [*command, str(tmp_path / "killed")], check=True, env=environment, capture_output=True
    )
    assert digests(tmp_path / "killed") == digests(tmp_path / "whole")
    assert not list((tmp_path / "killed").glob("*.checkpoint"))


def test_a_changed_experiment_is_not_taken_for_the_old_one(tmp_path: Path) -> None:
    old, new = cells()[0], expand(experiment(policy={"name": "ode", "value": "cosine"}))[0]
    play(old, tmp_path)
    before = digests(tmp_path)
    assert record_path(old, tmp_path) == record_path(new, tmp_path)
    play(new, tmp_path, resume=True)
    assert digests(tmp_path) != before


def test_the_record_tells_the_score_that_each_sample_came_with(tmp_path: Path) -> None:
    """FIFO's score is the arrival's number, so scores rise along the list of comings and goings."""
    run = read_run(play(expand(experiment(policy={"name": "fifo"}))[0], tmp_path))
    recorded = [
        [change.score for change in line.changes] for line in run.of(DeviceLine) if line.changes
    ]
    assert recorded
    for scores in recorded:
        assert scores == sorted(scores, key=lambda score: -1.0 if score is None else score)
        assert scores[0] is not None


def test_a_refused_report_is_no_dropout(tmp_path: Path) -> None:
    run = read_run(play(expand(experiment(limits={"update_norm": 1e-9}))[0], tmp_path))
    refused = sum(sum(line.refused_reports.values()) for line in run.rounds)
    assert refused > 0
    assert sum(line.dropouts for line in run.rounds) == 0


@pytest.mark.parametrize(
    ("tables", "names"),
    [
        (
            {"regions": {"name": "k-means", "count": 4}},
            tuple(f"cluster {n}" for n in range(4)),
        ),
        ({"coordinator": {"name": "exact", "clients_per_label": 2}}, ()),
    ],
    ids=str,
)
def test_the_record_tells_of_what_the_plan_divides(
    tmp_path: Path, tables: Table, names: tuple[str, ...]
) -> None:
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    fixed = {"policy": {"name": "ode"}, "storage": {"quotas": "hard"}}
    run = read_run(play(expand(merged(experiment(**tables), fixed))[0], tmp_path))
    (plan,) = run.of(PlanLine)
    assert plan.regions == names
    filled = dict(
        zip(run.of(HoldingsLine)[-1].devices, run.of(HoldingsLine)[-1].filled, strict=True)
    )
    for device, quotas in zip(plan.devices, plan.quotas, strict=True):
        assert len(filled.get(device, quotas)) == len(quotas)
        assert all(
            have <= quota for have, quota in zip(filled.get(device, quotas), quotas, strict=True)
        )
