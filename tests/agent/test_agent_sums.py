"""Agents in secure sums: over the socket's messages, through restarts, and never in the clear."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fedkeep.agent.service import Service
from fedkeep.core.errors import RejectedError
from fedkeep.core.types import TrainOrder
from fedkeep.protocol.messages import Answered, AskSum, Failed, Participate
from fedkeep.protocol.wire import to_bytes
from tests.agent.builders import AssembledAgent, feed, make_agent, order

pytest.importorskip("Crypto", reason="needs the privacy extra")

from fedkeep.privacy.secagg import protocol as told
from tests.privacy.weighting import weighted_mean

SECURE = {"secure_aggregation": True}


def streaming(folder: Path, seed: int, **privacy: object) -> AssembledAgent:
    folder.mkdir(exist_ok=True)
    assembly = make_agent(folder, agent={"seed": 1}, privacy={**SECURE, **privacy})
    feed(assembly.agent, 100 * seed, 20)
    return assembly


def terms(
    assembly: AssembledAgent, device: int, session: bytes, counted: bytes = b""
) -> told.SecureAggregationConfig:
    size = assembly.agent.device.learner.gradient_size
    return told.SecureAggregationConfig(
        session, device, 2, 3, 1e3, 1e3, size, 50.0, 50.0, 0.5, counted
    )


def session(number: int) -> bytes:
    return bytes([number]) * told.SESSION_BYTES


def summed(
    agents: dict[int, AssembledAgent], sent: TrainOrder, number: int, counted: bytes = b""
) -> np.ndarray:
    """What the server learns of one secure round over these agents."""
    agreed = {d: terms(a, d, session(number), counted) for d, a in agents.items()}
    size = len(sent.model) + 2 + agreed[0].gradient_size + 1
    opened = told.AggregationSession(session(number), agreed[0].threshold, size, agreed)
    keys = {
        d: told.decode(a.agent.hold(sent, told.encode(agreed[d])), told.Keys)
        for d, a in agents.items()
    }
    roster = opened.open({d: k.keys for d, k in keys.items()})

    def ask(device: int, question: told.Request) -> bytes:
        return agents[device].agent.answer(told.encode(question))

    sealed = {d: told.decode(ask(d, roster), told.Envelopes) for d in agents}
    for d, envelopes in opened.route(sealed).items():
        masked = told.decode(ask(d, envelopes), told.MaskedWords)
        opened.receive(d, masked)
    survivors = told.Survivors(opened.session, opened.survivors())
    shares = {d: told.decode(ask(d, survivors), told.OpenedShares) for d in agents}
    return opened.total(shares)


def test_three_agents_sum_what_they_would_have_sent(tmp_path: Path) -> None:
    hidden = {d: streaming(tmp_path / f"{d}", d) for d in range(3)}
    clear = {d: streaming(tmp_path / f"clear-{d}", d, secure_aggregation=False) for d in range(3)}
    try:
        installed = order(hidden[0])
        for assembly in [*hidden.values(), *clear.values()]:
            assembly.agent.device.set_model(installed.model)
        for d in range(3):
            feed(hidden[d].agent, 1000 * (d + 1), 20)
            feed(clear[d].agent, 1000 * (d + 1), 20)
        sent = order(hidden[0], 1)
        reports = [assembly.agent.participate(sent) for assembly in clear.values()]
        total, size = summed(hidden, sent, 1), len(sent.model)
    finally:
        for assembly in [*hidden.values(), *clear.values()]:
            assembly.disk.close()
    some = terms(hidden[0], 0, session(1))
    update = weighted_mean(some.update_grid.decode(total[: size + 1]))
    estimate = weighted_mean(some.estimator_grid.decode(total[size + 2 :]))
    weights = np.array([r.weight for r in reports])
    updates = np.stack([r.model.astype(np.float64) - sent.model for r in reports])
    np.testing.assert_allclose(update, weights @ updates / weights.sum(), atol=1e-9)
    np.testing.assert_allclose(
        estimate, np.mean([r.local_gradient for r in reports], axis=0), atol=1e-6
    )


def test_a_restart_is_a_dropout_that_loses_nothing(tmp_path: Path) -> None:
    agents = {d: streaming(tmp_path / f"{d}", d) for d in range(3)}
    first = order(agents[0])
    for d, assembly in agents.items():
        assembly.agent.device.set_model(first.model)
        feed(assembly.agent, 1000 * (d + 1), 20)
    summed(agents, first, 1)
    agents[0].agent.hold(
        replace(first, round=1), told.encode(terms(agents[0], 0, session(2), session(1)))
    )
    agents[0].disk.close()
    agents[0] = make_agent(tmp_path / "0", privacy=SECURE)
    try:
        with pytest.raises(RejectedError, match="another sum"):
            agents[0].agent.answer(told.encode(told.Survivors(session(2), (0, 1, 2))))
        again = agents[0].agent.hold(
            replace(first, round=2), told.encode(terms(agents[0], 0, session(3), session(1)))
        )
        assert not told.decode(again, told.Keys).lost
    finally:
        for assembly in agents.values():
            assembly.disk.close()


def test_an_agent_that_forgot_what_counts_says_so(tmp_path: Path) -> None:
    assembly = streaming(tmp_path, 0)
    try:
        answer = assembly.agent.hold(
            order(assembly), told.encode(terms(assembly, 0, session(2), session(1)))
        )
        assert told.decode(answer, told.Keys).lost
    finally:
        assembly.disk.close()


def test_neither_side_falls_back_to_the_clear(tmp_path: Path) -> None:
    secure, plain = (
        streaming(tmp_path / "secure", 0),
        streaming(tmp_path / "plain", 0, secure_aggregation=False),
    )
    services = [Service(assembly.agent) for assembly in (secure, plain)]
    try:
        asked = order(secure)
        refused = services[0].answer(to_bytes(Participate.of(asked)))
        assert isinstance(refused, Failed)
        assert "secure orders only" in refused.detail
        some = told.encode(terms(secure, 0, session(1)))
        assert isinstance(services[0].answer(to_bytes(Participate.of(asked, some))), Answered)
        for request in (Participate.of(asked, some), AskSum(b"")):
            answer = services[1].answer(to_bytes(request))
            assert isinstance(answer, Failed)
            assert "masks nothing" in answer.detail
    finally:
        for service, assembly in zip(services, (secure, plain), strict=True):
            service.close()
            assembly.disk.close()


@pytest.mark.parametrize(
    "change",
    [
        {"threshold": 1},
        {"threshold": 1, "summands": 1},
        {"session": b"short"},
        {"rate": 2.0},
        {"weight_unit": 0.0},
    ],
)
def test_terms_under_which_a_report_would_show_are_refused(
    tmp_path: Path, change: dict[str, object]
) -> None:
    assembly = streaming(tmp_path, 0)
    before = assembly.agent.device.model
    fields = {
        name: getattr(some, name)
        for some in [terms(assembly, 0, session(1))]
        for name in some.__struct_fields__
    }
    try:
        with pytest.raises(RejectedError):
            assembly.agent.hold(
                order(assembly), told.encode(told.SecureAggregationConfig(**(fields | change)))
            )
        assert assembly.agent.device.model is before
    finally:
        assembly.disk.close()
