"""Rounds whose server sees only sums: the g_hat (Eq. 8) and model (Eq. 2) of one that sees all."""

import numpy as np
import pytest

from fedkeep.core.aggregation import FedAvg
from fedkeep.core.gradients import Estimate, IncrementalEstimator
from fedkeep.core.types import Report

pytest.importorskip("Crypto", reason="needs the privacy extra")
pytest.importorskip("cryptography", reason="needs the privacy extra")

from fedkeep.privacy.secagg.fixed_point import WORD, Differences, FixedPoint, Words
from fedkeep.privacy.secagg.protocol import AggregationSession, MaskingDevice
from tests.privacy.weighting import weighted, weighted_mean

P, DEVICES = 12, 8
RATES = np.linspace(0.2, 1.0, DEVICES)
GRID = FixedPoint(bound=1.0, summands=DEVICES)


def summed(session: bytes, sent: dict[int, Words], dropped: set[int]) -> Words:
    """The sum over those who stayed after the keys were shared; the server sees nothing else."""
    threshold = len(sent) // 2 + 1
    devices = {
        d: MaskingDevice(d, session, threshold, words.tobytes()) for d, words in sent.items()
    }
    server = AggregationSession(session, threshold, P + 1)
    roster = server.open({d: device.keys() for d, device in devices.items()})
    envelopes = server.route({d: device.share(roster.keys) for d, device in devices.items()})
    for d in sent.keys() - dropped:
        server.receive(d, devices[d].mask(envelopes[d].envelopes))
    survivors = server.survivors()
    return server.total({d: devices[d].unmask(survivors) for d in survivors})


def test_the_global_gradient_estimate_is_that_of_eq_8_whoever_drops_out() -> None:
    rng = np.random.default_rng(0)
    plain, running = IncrementalEstimator(), np.zeros(P + 1, WORD)
    senders = {d: Differences(P + 1) for d in range(DEVICES)}
    counted: dict[int, bytes] = {}
    for round_ in range(6):
        present = rng.choice(DEVICES, 5, replace=False).tolist()
        dropped = set(present[:1]) if round_ % 2 else set()
        gradients = {d: rng.uniform(-1, 1, P).astype(np.float32) for d in present}
        session = f"run/{round_}".encode()
        sent = {
            d: senders[d].send(
                GRID.encode(weighted(gradients[d], RATES[d])), session, counted.get(d, b"")
            )
            for d in present
        }
        running = running + summed(session, sent, dropped)
        arrived = [d for d in present if d not in dropped]
        counted |= dict.fromkeys(arrived, session)
        plain.update({d: Estimate(gradients[d], float(RATES[d]), round_) for d in arrived})
        direction, mean = plain.direction(), weighted_mean(GRID.decode(running))
        assert direction is not None
        np.testing.assert_allclose(mean, direction, atol=20 * GRID.step + 1e-6)


def test_the_model_is_that_of_federated_averaging() -> None:
    rng = np.random.default_rng(1)
    model = rng.normal(size=P).astype(np.float32)
    updates = {d: rng.uniform(-0.5, 0.5, P).astype(np.float32) for d in range(5)}
    reports = [
        Report(0, model + u, float(RATES[d]), 1, 1, None) for d, u in updates.items() if d != 2
    ]
    total = summed(
        b"run/0", {d: GRID.encode(weighted(u, RATES[d])) for d, u in updates.items()}, {2}
    )
    mean = weighted_mean(GRID.decode(total))
    np.testing.assert_allclose(model + mean, FedAvg().aggregate(model, reports), atol=1e-6)
