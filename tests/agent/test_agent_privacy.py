"""What leaves a device is noised and charged first; the ledger survives with the samples."""

import errno
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from fedkeep.agent.arrivals import Arrival
from fedkeep.agent.record import Verdict
from fedkeep.agent.service import Service
from fedkeep.core.errors import ConfigError, FedkeepError, RejectedError
from fedkeep.core.types import Assignment, LocalTraining, TrainOrder
from fedkeep.keyholder.sealing import public_half, unseal
from fedkeep.protocol.client import AgentClient
from fedkeep.protocol.messages import AskProfile, EncryptedProfiled, ProfileRequest
from tests.agent.builders import arrival, make_agent, order

pytest.importorskip("dp_accounting", reason="dp-accounting is not installed")
PRIVACY: dict[str, Any] = {"epsilon": 4.0, "unit": "device", "planned_participations": 2}


def take_part(folder: Path, round_: int, **tables: Any) -> Any:
    assembly = make_agent(folder, privacy=PRIVACY, **tables)
    try:
        for id_ in range(100 * round_, 100 * round_ + 30):
            assembly.agent.intake.offer(arrival(id_), wait=True)
        while assembly.agent.step(0.0):
            pass
        return assembly.agent.participate(order(assembly, round_))
    finally:
        assembly.disk.close()


def test_the_budget_is_spent_over_restarts_and_then_nothing_more_is_told(tmp_path: Path) -> None:
    first, second, third = (take_part(tmp_path, round_) for round_ in range(3))
    assert first.local_gradient is None, "nothing was measured before the first model"
    assert second.local_gradient is not None
    fourth = take_part(tmp_path, 3)
    assert third.local_gradient is not None
    assert fourth.local_gradient is None
    assert fourth.samples == 12


def test_nothing_is_sent_when_the_ledger_cannot_be_written(tmp_path: Path) -> None:
    take_part(tmp_path, 0)
    assembly = make_agent(tmp_path, privacy=PRIVACY)
    for id_ in range(30):
        assembly.agent.intake.offer(arrival(1000 + id_), wait=True)
    while assembly.agent.step(0.0):
        pass

    def full(offset: int, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    write = assembly.disk.write
    assembly.disk.write = full  # type: ignore[method-assign]
    with pytest.raises(RejectedError, match="nothing was sent"):
        assembly.agent.participate(order(assembly, 1))
    assembly.disk.write = write  # type: ignore[method-assign]
    assembly.disk.close()


def spent(folder: Path) -> float:
    assembly = make_agent(folder, privacy=PRIVACY)
    try:
        return assembly.agent.release_pipeline.spending().spent  # type: ignore[union-attr]
    finally:
        assembly.disk.close()


def test_a_lost_or_rolled_back_store_does_not_lower_the_ledger(tmp_path: Path) -> None:
    take_part(tmp_path, 0)
    old = (tmp_path / "a.store").read_bytes()
    take_part(tmp_path, 1)
    before = spent(tmp_path)
    assert before > 0
    (tmp_path / "a.store").write_bytes(old)
    assert spent(tmp_path) == before
    (tmp_path / "a.store").unlink()
    assert spent(tmp_path) == before


def test_a_ledger_that_is_gone_or_older_than_the_store_is_refused(tmp_path: Path) -> None:
    take_part(tmp_path, 0)
    take_part(tmp_path, 1)
    ledger = tmp_path / "a.store.ledger"
    old = ledger.read_bytes()
    take_part(tmp_path, 2)
    ledger.write_bytes(old)
    with pytest.raises(ConfigError, match="lists less than its device has sent"):
        make_agent(tmp_path, privacy=PRIVACY)
    for damaged in (old[:-9], b"\xff\xfe", b""):
        ledger.write_bytes(damaged)
        with pytest.raises(ConfigError, match="fails its checksum"):
            make_agent(tmp_path, privacy=PRIVACY)
    ledger.unlink()
    with pytest.raises(ConfigError, match="is gone, so what was spent is not known"):
        make_agent(tmp_path, privacy=PRIVACY)


def test_another_path_of_the_store_is_no_new_budget(tmp_path: Path) -> None:
    for round_ in range(3):
        take_part(tmp_path, round_)
    other = {"store": {"path": str(tmp_path / "b.store")}}
    with pytest.raises(
        ConfigError, match=r"a\.store\.ledger has been spent from: .* rename it to b\.store\.ledger"
    ):
        take_part(tmp_path, 3, **other)
    (tmp_path / "a.store.ledger").rename(tmp_path / "b.store.ledger")
    reports = [take_part(tmp_path, round_, **other) for round_ in range(3, 6)]
    assert all(report.local_gradient is None for report in reports)


def test_a_sample_sent_in_every_round_costs_every_time(tmp_path: Path) -> None:
    per_sample = {"epsilon": 50.0, "unit": "sample", "retransmissions": 30}
    assembly = make_agent(tmp_path, privacy=per_sample, store={"budget": 1_000_000})
    agent, epsilons = assembly.agent, []
    for round_ in range(12):
        for id_ in [7, *range(1000 * round_ + 1000, 1000 * round_ + 1030)]:
            agent.intake.offer(arrival(id_, label=0), wait=True)
        while agent.step(0.0):
            pass
        told = TrainOrder(**{**vars(order(assembly, round_)), "accepted_round": round_ - 1})
        agent.participate(told)
        epsilons.append(agent.release_pipeline.spending().spent)  # type: ignore[union-attr]
        agent.store.forget([7], Verdict.DROPPED)  # stored, it would change nothing when it comes
    assembly.disk.close()
    assert epsilons[0] == 0.0
    assert all(later > earlier for earlier, later in pairwise(epsilons[1:]))


def test_wrong_privacy_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'epsilon'"):
        make_agent(tmp_path, privacy={"epsilo": 1.0})
    with pytest.raises(FedkeepError, match=r"many times|many rounds"):
        make_agent(tmp_path, privacy={"epsilon": 1.0}, estimator={"name": "stored"})


def test_the_ledger_shows_in_status_and_metrics(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client", reason="prometheus-client is not installed")
    from fedkeep.agent.service import Collector, summarise

    take_part(tmp_path, 0)
    take_part(tmp_path, 1)
    assembly = make_agent(tmp_path, privacy=PRIVACY)
    try:
        status = summarise(assembly.agent)
        gauges = {
            metric.name: metric.samples[0].value
            for metric in Collector(assembly.agent).collect()
            if metric.samples
        }
    finally:
        assembly.disk.close()
    assert status.epsilon_budget == gauges["fedkeep_epsilon_budget"] == 4.0
    assert status.epsilon_spent == gauges["fedkeep_epsilon_spent"]
    assert 0 < gauges["fedkeep_epsilon_spent"] < 4.0


def test_a_profile_is_sealed_to_the_key_it_was_given_and_never_sent_in_the_clear(
    tmp_path: Path,
) -> None:
    secret, nonce = X25519PrivateKey.generate(), bytes(16)
    public = public_half(secret)
    assembly = make_agent(
        tmp_path, privacy={"encrypted_profiles": True, "public_key": public.hex()}
    )
    service = Service(assembly.agent)
    try:
        for id_ in range(30):
            assembly.agent.intake.offer(arrival(id_), wait=True)
        while assembly.agent.step(0.0):
            pass
        with AgentClient(str(tmp_path / "a.sock"), 30) as client:
            with pytest.raises(RejectedError, match=r"in the clear: .*nothing was sent"):
                client.profile()
            with pytest.raises(RejectedError, match=r"another key: .*nothing was sent"):
                client.ask(AskProfile(ProfileRequest(b"the server's", nonce, 7)), EncryptedProfiled)
            answer = client.ask(AskProfile(ProfileRequest(public, nonce, 7)), EncryptedProfiled)
    finally:
        service.close()
        assembly.disk.close()
    profile = unseal(secret, nonce, 7, answer.profile, assembly.agent.device.regions.count)
    assert profile.capacity == assembly.agent.device.capacity
    assert profile.rate > 0


@pytest.mark.parametrize("key", ["", "nothing", "00"])
def test_an_agent_does_not_start_without_the_key_holders_key(tmp_path: Path, key: str) -> None:
    with pytest.raises(ConfigError, match=r"privacy\.public_key"):
        make_agent(tmp_path, privacy={"encrypted_profiles": True, "public_key": key})


def test_a_profile_under_seal_has_the_noise_that_was_paid_for(tmp_path: Path) -> None:
    secret = X25519PrivateKey.generate()
    public = public_half(secret)
    noise = {"epsilon": 1.0, "protect": ["profile"], "profile_bound": 10.0, "unit": "device"}
    sealed = {"encrypted_profiles": True, "public_key": public.hex()}
    assembly = make_agent(tmp_path, privacy=noise | sealed)
    agent, told = assembly.agent, []
    try:
        for id_ in range(30):
            agent.intake.offer(arrival(id_), wait=True)
        while agent.step(0.0):
            pass
        declared = agent.device.profile()
        for nonce in (bytes(16), bytes(range(16))):
            answer = agent.encrypted_profile(ProfileRequest(public, nonce, 7))
            told.append(unseal(secret, nonce, 7, answer, agent.device.regions.count))
        charged = agent.release_pipeline.kept(under_way=False)["gate"].snapshot()["ledger.releases"]
    finally:
        assembly.disk.close()
    assert declared.rate > 0
    assert not np.allclose(told[0].velocity, declared.velocity, rtol=1e-3)
    np.testing.assert_array_equal(
        told[0].velocity, told[1].velocity, "told once, and then repeated"
    )
    assert charged.tolist() == [0, 0, 1]


def test_the_store_has_room_for_what_the_guard_remembers(tmp_path: Path) -> None:
    samples = {"shape": [600], "labels": 10}
    assembly = make_agent(
        tmp_path, privacy={"epsilon": 4.0}, samples=samples, store={"budget": 800_000}
    )
    agent, rng = assembly.agent, np.random.default_rng(0)
    learner = agent.device.learner
    plan = Assignment(np.full(10, agent.device.capacity // 10), np.ones(10), 1.0)
    try:
        for round_ in range(3):
            for id_ in range(300 * round_, 300 * round_ + 300):
                x = rng.standard_normal(600).astype(np.float32)
                agent.intake.offer(Arrival(x, id_ % 10, id_, "test"), wait=True)
            while agent.step(0.0):
                pass
            model = rng.standard_normal(learner.size).astype(np.float32)
            direction = rng.standard_normal(learner.gradient_size).astype(np.float32)
            accepted = round_ - 1 if round_ else None
            report = agent.participate(
                TrainOrder(round_, model, direction, LocalTraining(0.1, 1), accepted, plan)
            )
        agent.require_commit()
        assert report.local_gradient is not None
    finally:
        assembly.disk.close()
