"""What the ledger adds up, and what it does not."""

import json
from hashlib import blake2b
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedkeep.core.errors import RejectedError
from fedkeep.privacy.accountant import Charge, LedgerFile, PrivacyLedger
from fedkeep.privacy.gaussian import budget_cost, epsilon_spent

pytest.importorskip("dp_accounting", reason="needs the privacy extra")

DELTA = 1e-5


def estimator(cost: float, round_: int, *, resends: bool = False) -> Charge:
    return Charge("estimator", sample=cost, device=4 * cost, round=round_, resends=resends)


def test_estimators_of_fresh_samples_cost_a_sample_once_and_the_device_each_time() -> None:
    ledger = PrivacyLedger()
    for round_ in range(10):
        ledger.charge(estimator(0.04, round_))
    assert ledger.epsilon("sample", DELTA) == epsilon_spent(0.04, DELTA)
    assert ledger.epsilon("device", DELTA) == pytest.approx(epsilon_spent(1.6, DELTA))


def test_resends_of_a_lost_estimator_compose_until_one_is_accepted() -> None:
    ledger = PrivacyLedger()
    ledger.charge(estimator(0.04, 0))
    ledger.charge(estimator(0.04, 1, resends=True))
    ledger.charge(estimator(0.04, 2, resends=True))
    ledger.charge(estimator(0.04, 3))
    assert ledger.epsilon("sample", DELTA) == pytest.approx(epsilon_spent(0.12, DELTA))


def test_a_sample_that_comes_again_costs_again_and_twice_in_one_estimate_four_times() -> None:
    ledger = PrivacyLedger()
    for round_ in range(200):
        ledger.see(np.array([7, 1000 + round_]))
        ledger.close()
        ledger.see(np.array([9]))  # belongs to the estimate after this one
        ledger.charge(estimator(0.04, round_))
    assert ledger.epsilon("sample", DELTA) == pytest.approx(epsilon_spent(200 * 0.04, DELTA))
    twice = PrivacyLedger()
    twice.see(np.array([7, 7, 8]))
    twice.close()
    assert not twice.affords(
        estimator(0.04, 0), unit="sample", epsilon=epsilon_spent(0.15, DELTA), delta=DELTA
    )
    twice.charge(estimator(0.04, 0))
    assert twice.epsilon("sample", DELTA) == pytest.approx(epsilon_spent(0.16, DELTA))


def test_a_resent_estimate_charges_its_samples_again() -> None:
    ledger = PrivacyLedger()
    ledger.see(np.array([7]))
    ledger.close()
    ledger.charge(estimator(0.04, 0))
    ledger.see(np.array([7]))
    ledger.close()
    ledger.charge(estimator(0.04, 1, resends=True))
    assert ledger.epsilon("sample", DELTA) == pytest.approx(epsilon_spent(0.12, DELTA))


def test_a_ledger_never_falls() -> None:
    ledger, old = PrivacyLedger(), PrivacyLedger().snapshot()
    ledger.see(np.array([7]))
    ledger.close()
    ledger.charge(estimator(0.04, 0))
    ledger.restore(old)
    assert ledger.epsilon("sample", DELTA) == epsilon_spent(0.04, DELTA)
    ledger.see(np.array([7]))
    ledger.close()
    ledger.charge(estimator(0.04, 1))
    assert ledger.epsilon("sample", DELTA) == pytest.approx(epsilon_spent(0.08, DELTA))


def test_model_updates_compose_for_a_sample_too() -> None:
    ledger = PrivacyLedger()
    for _ in range(5):
        ledger.charge(Charge("model", sample=0.1, device=0.1))
    ledger.charge(estimator(0.04, 0))
    assert ledger.epsilon("sample", DELTA) == pytest.approx(epsilon_spent(0.54, DELTA))
    assert ledger.snapshot()["releases"].tolist() == [1, 5, 0]


@pytest.mark.parametrize(
    ("last", "accepted", "awaits"),
    [(None, None, False), (3, None, True), (3, 2, True), (3, 3, False)],
)
def test_an_estimator_waits_until_its_round_is_accepted(
    last: int | None, accepted: int | None, awaits: bool
) -> None:
    ledger = PrivacyLedger()
    if last is not None:
        ledger.charge(estimator(0.04, last))
    assert ledger.awaits_acceptance(accepted) == awaits


def test_the_budget_is_met_exactly_and_not_exceeded() -> None:
    ledger = PrivacyLedger()
    release = Charge("model", sample=budget_cost(1.0, DELTA) / 3, device=0.0)
    for _ in range(3):
        assert ledger.affords(release, unit="sample", epsilon=1.0, delta=DELTA)
        ledger.charge(release)
    assert not ledger.affords(release, unit="sample", epsilon=1.0, delta=DELTA)
    assert ledger.epsilon("sample", DELTA) == pytest.approx(1.0)


charges = st.builds(
    Charge,
    st.sampled_from(["estimator", "model", "profile"]),
    st.floats(0, 10),
    st.floats(0, 10),
    st.integers(0, 5),
    st.booleans(),
)


@settings(deadline=None)
@given(st.lists(charges, max_size=12), st.integers(0, 12))
def test_a_restored_ledger_goes_on_as_if_never_stopped(history: list[Charge], cut: int) -> None:
    whole, first, second = PrivacyLedger(), PrivacyLedger(), PrivacyLedger()
    whole.charge(*history)
    first.charge(*history[:cut])
    second.restore(first.snapshot())
    second.charge(*history[cut:])
    for name, array in whole.snapshot().items():
        np.testing.assert_array_equal(second.snapshot()[name], array)


@settings(deadline=None)
@given(st.lists(charges, min_size=1, max_size=12))
def test_a_charge_never_lowers_an_account(history: list[Charge]) -> None:
    ledger, before = PrivacyLedger(), (0.0, 0.0)
    for charge in history:
        ledger.charge(charge)
        state = ledger.snapshot()
        after = (state["composed"][0] + state["estimator"][1], state["composed"][1])
        assert after[0] >= before[0]
        assert after[1] >= before[1]
        before = after


@pytest.mark.parametrize("damage", ["missing", "shape", "negative", "nan"])
def test_a_damaged_snapshot_is_refused(damage: str) -> None:
    state = PrivacyLedger().snapshot()
    if damage == "missing":
        del state["composed"]
    elif damage == "shape":
        state["composed"] = np.zeros(3)
    else:
        state["composed"] = np.array([0.0, -1.0 if damage == "negative" else np.nan])
    with pytest.raises(RejectedError, match="damaged privacy ledger"):
        PrivacyLedger().restore(state)


def test_a_ledger_file_keeps_what_was_committed(tmp_path: Path) -> None:
    file = LedgerFile(tmp_path / "ledger")
    ledger = file.found({}, damaged=False)
    ledger.charge(estimator(0.1 + 0.2, 7))
    file.commit(ledger.snapshot())
    reopened = LedgerFile(tmp_path / "ledger").open()
    assert reopened.epsilon("device", DELTA) == ledger.epsilon("device", DELTA)
    assert reopened.awaits_acceptance(6)


def test_a_lost_or_damaged_ledger_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    with pytest.raises(RejectedError, match="lost privacy ledger"):
        LedgerFile(path).open()
    with pytest.raises(RejectedError, match="lost privacy ledger"):
        LedgerFile(path).found({}, damaged=True)
    LedgerFile(path).found({}, damaged=False)
    path.write_text(path.read_text().replace("0.0", "0.1", 1))
    with pytest.raises(RejectedError, match="damaged privacy ledger"):
        LedgerFile(path).open()


SOUND = {name: values.tolist() for name, values in PrivacyLedger().snapshot().items()}


@pytest.mark.parametrize(
    "body",
    [
        "",
        "{",
        "[]",
        "7",
        "null",
        "{}",
        "[" * 100_000,
        '{"composed": "all"}',
        *(
            json.dumps({**SOUND, **change})
            for change in (
                {"composed": [[0.0], [0.0, 1.0]]},
                {"composed": ["a", "b"]},
                {"composed": None},
                {"releases": [10**400, 0]},
                {"sample_ids": [1, 2]},
                {"sample_ids": ["x"], "sample_costs": [[0, 0, 0, 0]]},
                {"sample_ids": 7},
                {"sample_ids": [1], "sample_costs": [[1.0, 2.0]]},
                {"sample_ids": [1], "sample_costs": [[-1.0, 0, 0, 0]]},
                {"sample_ids": [1], "sample_costs": [[float("nan"), 0, 0, 0]]},
                {"sample_costs": {"a": 1}},
            )
        ),
    ],
)
def test_a_crafted_ledger_file_with_a_right_checksum_is_refused_in_one_sentence(
    tmp_path: Path, body: str
) -> None:
    path = tmp_path / "ledger"
    path.write_text(f"{body} {blake2b(body.encode(), digest_size=16).hexdigest()}\n")
    with pytest.raises(RejectedError, match=f"^damaged privacy ledger: {path}"):
        LedgerFile(path).open()


def test_a_new_ledger_beside_one_that_was_spent_from_is_refused(tmp_path: Path) -> None:
    (tmp_path / "2024.ledger").write_text("2024-01-01 * bread\n")
    file = LedgerFile(tmp_path / "a.store.ledger")
    ledger = file.found({}, damaged=False)
    LedgerFile(tmp_path / "b.store.ledger").found({}, damaged=False)
    ledger.charge(estimator(0.1, 0))
    file.commit(ledger.snapshot())
    LedgerFile(tmp_path / "b.store.ledger").found({}, damaged=False)
    with pytest.raises(
        RejectedError, match=r"a\.store\.ledger has been spent from.*rename it to c\.store\.ledger"
    ):
        LedgerFile(tmp_path / "c.store.ledger").found({}, damaged=False)
    assert not (tmp_path / "c.store.ledger").exists()
