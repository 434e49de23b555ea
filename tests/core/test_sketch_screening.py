"""Sketches that contradict themselves or their update do not count; honest ones do."""

from dataclasses import replace

import numpy as np
import pytest

from fedkeep.config.device import build_device
from fedkeep.config.method import FleetSpec, parse_fleet, parse_method
from fedkeep.core.device import Device
from fedkeep.core.errors import RejectedError
from fedkeep.core.gradients.codec import Encoding, pack, unpack
from fedkeep.core.gradients.layout import sketched_layout
from fedkeep.core.screening import Limits, screen_sketch
from fedkeep.core.server import Server
from fedkeep.core.types import Batch, DeviceId, Report, Vector
from fedkeep.protocol.messages import Reported
from fedkeep.protocol.wire import from_bytes, to_bytes

LABELS, FEATURES, DEVICES = 5, 60, 6
CENTRES = np.random.default_rng(0).standard_normal((LABELS, FEATURES)).astype(np.float32)


def fleet(**tables: object) -> FleetSpec:
    return parse_fleet(
        {
            "samples": {"shape": [FEATURES], "labels": LABELS},
            "model": {"name": "mlp", "hidden": [40], "last_layers": 0},
            "policy": {"name": "balanced-reservoir"},
            "gist": {"mode": "shared", "rank": 4},
            "train": {"learning_rate": 0.05, "epochs": 3},
            **tables,
        }
    )


def devices(spec: FleetSpec, encoding: Encoding) -> dict[DeviceId, Device]:
    gist = {"mode": "shared", "rank": 4, "encoding": encoding}
    method = parse_method({"policy": {"name": "balanced-reservoir"}, "gist": gist})
    return {
        number: build_device(
            method,
            spec.learner,
            capacity=8,
            sample_shape=(FEATURES,),
            labels=LABELS,
            regions=spec.regions,
            seed=number,
        )
        for number in range(DEVICES)
    }


def arrivals(device: int, round_: int) -> Batch:
    rng = np.random.default_rng((device, round_))
    y = rng.integers(0, LABELS, 24)
    x = CENTRES[y] + rng.standard_normal((24, FEATURES)).astype(np.float32)
    return Batch(x, y, 1000 * round_ + np.arange(24))


def played(
    server: Server, fleet: dict[DeviceId, Device], rounds: int, forge: object = None
) -> dict[DeviceId, str]:
    """Play rounds; the last device forges the gradient of its reports. Gives who was rejected."""
    reasons: dict[DeviceId, str] = {}
    for round_ in range(rounds):
        for number, order in server.open_round(fleet).items():
            device = fleet[number]
            if device.model is None:
                device.set_model(server.model)
            device.observe(arrivals(number, round_), float(round_))
            report: Report = device.participate(order)
            if callable(forge) and number == DEVICES - 1 and report.local_gradient is not None:
                report = replace(report, local_gradient=forge(report.local_gradient))
            # Over the wire, so that vectors keep their encoding as on a real network.
            report = from_bytes(to_bytes(Reported(report)), Reported).report
            if (rejected := server.receive(number, report)) is not None:
                reasons[number] = str(rejected.reason)
        server.close_round()
    return reasons


@pytest.mark.parametrize("encoding", ["float32", "float16", "int8", "int4"])
def test_honest_sketches_count_in_every_encoding(encoding: Encoding) -> None:
    spec = fleet()
    server = spec.server()
    assert played(server, devices(spec, encoding), 6) == {}
    assert server.estimator.global_gradient() is not None


def noise(gradient: Vector) -> Vector:
    rng = np.random.default_rng(0)
    made = rng.standard_normal(len(gradient)).astype(np.float32)
    return made * np.float32(np.linalg.norm(gradient) / np.linalg.norm(made))


def half_turned(gradient: Vector) -> Vector:
    forged = np.array(gradient)
    forged[: 4 * FEATURES] *= -1  # Y of the first layer, which would turn the reconstruction
    return forged


def in_few_bits(gradient: Vector) -> Vector:
    return unpack(pack(half_turned(gradient), "int4", seed=0), len(gradient))


@pytest.mark.parametrize("forge", [noise, half_turned, in_few_bits])
def test_a_sketch_that_contradicts_itself_is_rejected_by_name(forge: object) -> None:
    spec = fleet()
    server = spec.server()
    assert played(server, devices(spec, "int8"), 3, forge) == {DEVICES - 1: "estimator-contradicts"}


def test_in_four_bits_a_low_rank_says_nothing() -> None:
    vectors = []
    for rank in (3, 4):
        layout = sketched_layout([(60, 40)], rank)
        made = np.random.default_rng(0).standard_normal(layout.size).astype(np.float32)
        vectors.append((layout, unpack(pack(made, "int4", seed=0), layout.size)))
    (low, one), (high, other) = vectors
    screen_sketch(one, low, Limits())
    with pytest.raises(RejectedError, match="estimator-contradicts"):
        screen_sketch(other, high, Limits())


def test_without_limits_or_under_noise_nothing_is_compared() -> None:
    spec = fleet(limits={"enabled": False}, aggregation={"name": "fedavg"})
    assert played(spec.server(), devices(spec, "int8"), 2, noise) == {}
    private = {"epsilon": 50.0, "unit": "device", "protect": ["estimator"]}
    spec = fleet(privacy=private)
    assert played(spec.server(), devices(spec, "int8"), 2, noise) == {}


def test_the_robust_mean_compares_a_sketch_with_the_sketch_of_the_update() -> None:
    """A reversed gradient asks to climb what its device descends: its sketch agrees with itself."""
    spec = fleet()
    assert type(spec.aggregation).__name__ == "RobustMean"
    honest, reversed_ = spec.server(), spec.server()
    assert played(honest, devices(spec, "float32"), 4) == {}
    assert played(reversed_, devices(spec, "float32"), 4, lambda g: -np.array(g)) == {}
    clean, attacked = (one.estimator.global_gradient() for one in (honest, reversed_))
    assert clean is not None
    assert attacked is not None
    # The mean of the other five: had the reversed one counted, it would be a third shorter.
    assert np.linalg.norm(attacked) > 0.8 * np.linalg.norm(clean)
