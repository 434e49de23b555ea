"""Rules: what a condition says, where it is wrong, what rules hold, and that none of it biases."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedkeep.config.device import build_device
from fedkeep.config.experiment import resolve
from fedkeep.config.method import fleet_tables, parse_fleet, parse_method
from fedkeep.core.device import Device
from fedkeep.core.errors import ConfigError
from fedkeep.core.protocols import OfferResult
from fedkeep.core.rules.book import RecordContext, RuleBook
from fedkeep.core.rules.grammar import ConditionError, NumberedColumns, parse
from fedkeep.core.rules.options import Rule
from fedkeep.core.rules.store import RuledStore
from fedkeep.core.types import Batch, LocalTraining, TrainOrder
from fedkeep.learn.dense_learner import DenseLearner

RECORDS: list[dict[str, Any]] = [
    {"speed": 5, "unit": "V", "ok": True, "deep.a": 1},
    {"speed": 2.0, "unit": "A", "ok": False},
    {"speed": "fast"},
    {},
]


def columns() -> NumberedColumns:
    known = {"label": lambda: np.array([0, 1, 2, 1]), "hour": lambda: np.full(4, 13.5)}
    return NumberedColumns(4, RECORDS, known, "door")


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("speed > 3", [1, 0, 0, 0]),
        ("speed <= 5 and speed >= 5", [1, 0, 0, 0]),
        ("2 * speed + 1 == 5", [0, 1, 0, 0]),
        ("-speed < -3", [1, 0, 0, 0]),
        ("speed / 0 > 1", [1, 1, 0, 0]),
        ("10 - speed - 2 == 3", [1, 0, 0, 0]),
        ("speed != 5", [0, 1, 0, 0]),
        ("unit == \"V\" or unit == 'A'", [1, 1, 0, 0]),
        ('unit != "V"', [0, 1, 0, 0]),
        ('"V" == unit', [1, 0, 0, 0]),
        ('unit in ("V", "W")', [1, 0, 0, 0]),
        ('unit not in ("V", "W")', [0, 1, 0, 0]),
        ("speed in (2, -1)", [0, 1, 0, 0]),
        ("ok", [1, 0, 0, 0]),
        ("not ok", [0, 1, 1, 1]),
        ("ok == false", [0, 1, 0, 0]),
        ("has(ok) and not ok", [0, 1, 0, 0]),
        ("has(speed)", [1, 1, 1, 0]),
        ("deep.a == 1 or `deep.a` == 2", [1, 0, 0, 0]),
        ('label == "b"', [0, 1, 0, 1]),
        ('label in ("a", "c")', [1, 0, 1, 0]),
        ("label >= 1", [0, 1, 1, 1]),
        ('source == "door" and hour > 12', [1, 1, 1, 1]),
        ("confidence < 0.5 or not confidence < 0.5", [1, 1, 1, 1]),
        ("ok or speed > 1 and speed < 3", [1, 1, 0, 0]),
        ("(ok or speed > 1) and speed < 3", [0, 1, 0, 0]),
        ("not not ok", [1, 0, 0, 0]),
    ],
)
def test_what_conditions_hold_of(text: str, holds: list[int]) -> None:
    assert parse(text, ("a", "b", "c")).holds(columns()).astype(int).tolist() == holds


WRONG = [
    ("speed >", 7, "found the end"),
    ("speed = 3", 6, "write == to compare"),
    ("speed > 3 andd ok", 10, "found 'andd'"),
    ('unit > "V"', 7, "texts are compared by == and !="),
    ('label == "zz"', 9, "no label is called 'zz'"),
    ("(speed > 3", 10, "expected ')'"),
    ("1 < speed < 3", 10, "two things at a time"),
    ('eval("1")', 0, "'eval' is no function"),
    ('unit == "V', 8, "no closing"),
    ('speed in (1, "a")', 9, "numbers or texts, not both"),
    ("loss", 0, "compare it"),
    ("speed @ 3", 6, "has no meaning"),
    ("has(3)", 4, "expected a field"),
    ("__import__('os').system", 16, "has no meaning"),
    ("speed + 'a' > 3", 8, "expected a number, found a text"),
    ("", 0, "found the end"),
    ("speed in ()", 10, "expected a field"),
    ("(" * 60 + "ok" + ")" * 60, 51, "at most 50 deep"),
]


@pytest.mark.parametrize(("text", "place", "words"), WRONG)
def test_a_mistake_is_shown_with_its_place(text: str, place: int, words: str) -> None:
    with pytest.raises(ConditionError) as found:
        parse(text, ("a", "b"))
    assert words in str(found.value)
    assert found.value.place == place
    if text:
        _, shown, mark = str(found.value).split("\n")
        assert shown == f"    {text}"
        assert mark.index("^") == place + 4


@given(st.text(alphabet="ab1.<>=!()\"'`+-*/, \nandornthsi", max_size=60))
@settings(max_examples=300, deadline=None)
def test_no_text_is_more_than_a_condition_or_a_mistake(text: str) -> None:
    mistake: ConditionError | None = None
    try:
        found = parse(text).holds(columns())
    except ConditionError as error:
        mistake = error
    if mistake is not None:
        assert 0 <= mistake.place <= len(text)
        return
    assert found.shape == (4,)
    assert found.dtype == bool


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"name": "a b", "when": "ok", "slots": 1}, "name must be"),
        ({"name": "a", "when": "ok"}, "needs slots"),
        ({"name": "a", "when": "ok", "action": "least", "slots": 3}, "needs n and per"),
        ({"name": "a", "when": "ok", "slots": 3, "n": 2}, "n and per go together"),
        ({"name": "a", "when": "ok", "action": "never", "slots": 1}, "remove slots"),
        (
            {"name": "a", "when": "ok", "action": "most", "n": 1, "per": "day", "before": 2},
            "before",
        ),
        ({"name": "a", "when": "ok", "slots": 0}, "slots"),
        ({"name": "a", "when": "ok", "slots": 1, "ttl_days": 0}, "ttl_days"),
        ({"name": "a", "when": "ok", "slots": 1, "per": "week", "n": 1}, "per"),
        ({"name": "a", "when": "ok >", "slots": 1}, "rule 'a': expected"),
        ({"name": "a", "when": "ok", "slot": 1}, "slots"),
    ],
)
def test_a_wrong_rule_is_one_sentence(table: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_method({"rule": [table]})


def test_rules_have_names_of_their_own_and_two_brackets() -> None:
    rule = {"name": "a", "when": "ok", "slots": 1}
    with pytest.raises(ConfigError, match="two rules are called 'a'"):
        parse_method({"rule": [rule, rule]})
    with pytest.raises(ConfigError, match="two brackets"):
        parse_method({"rule": rule})
    fleet = {"samples": {"shape": [3], "labels": 2}, "rule": [rule]}
    with pytest.raises(ConfigError, match="'rule' is a device's"):
        parse_fleet(fleet)
    assert "rule" not in fleet_tables(fleet)


def test_an_experiment_without_rules_keeps_its_hash_and_with_them_has_another() -> None:
    plain = {"task": {"name": "demo"}}
    rule = {"name": "a", "when": "label == 1", "slots": 1}
    ruled = resolve({**plain, "rule": [rule]})
    assert "rule" not in resolve(plain).described()
    assert ruled.described()["rule"] == [rule]
    assert resolve(plain).digest() == resolve({**plain, "rule": []}).digest() != ruled.digest()


class Fed:
    """A ruled store of random keys, fed by hand."""

    def __init__(self, rules: list[Rule], slots: int = 2, labels: int = 2) -> None:
        self.store = RuledStore(
            np.full(labels, slots), soft_quotas=True, rules=rules, labels=labels
        )
        self.book = RuleBook(rules, self.store)
        self.number = 0

    def come(
        self, score: float, label: int = 0, time: float = 0.0, source: str = "", **fields: Any
    ) -> str:
        self.number += 1
        batch = Batch(
            np.full((1, 2), float(self.number)), np.array([label]), np.array([self.number])
        )
        context = RecordContext([fields], source, np.array([time]))
        if not self.book.look(batch, context, {}).all():
            return "NEVER"
        outcome = self.store.offer(batch, batch.y, np.array([score]), batch.ids)
        return OfferResult(outcome.results[0]).name

    def held(self) -> list[int]:
        return sorted(self.store.ranks()["ids"].tolist())


def test_what_a_rule_keeps_stays_whatever_it_is_worth_until_its_slots_are_full() -> None:
    fed = Fed([Rule("alarms", "alarm", slots=2)], slots=1)
    assert [fed.come(0.9), fed.come(0.8, label=1)] == ["KEPT", "KEPT"]
    assert fed.come(0.1) == "REFUSED"
    assert [fed.come(0.1, alarm=1), fed.come(0.2, alarm=1)] == ["KEPT", "KEPT"]
    assert fed.held() == [1, 2, 4, 5]
    assert fed.come(0.15, alarm=1) == "KEPT", "in the place of the lowest that the rule held"
    assert fed.store.take_changes() == ([4], [])
    assert fed.held() == [1, 2, 5, 6]
    assert fed.come(0.01, alarm=1) == "REFUSED", "lower than both, and than what the policy keeps"
    assert fed.store.stored().batch.ids.tolist() == [1, 2], "rules alone train nothing"
    assert len(fed.store) == 4


def test_a_sample_leaves_once_neither_policy_nor_rule_holds_it() -> None:
    fed = Fed([Rule("alarms", "alarm", slots=1)], slots=1, labels=1)
    assert fed.come(0.5, alarm=1) == "KEPT"  # held by both
    assert len(fed.store) == 1
    assert fed.come(0.9) == "KEPT", "it displaced nothing that left"
    assert fed.held() == [1, 2]
    assert fed.come(0.6, alarm=1) == "KEPT"
    assert fed.store.take_changes() == ([1], [])
    assert fed.held() == [2, 3]


def test_never_is_stored_and_counted_nowhere() -> None:
    fed = Fed([Rule("faces", "private", "never"), Rule("all", "true == true", slots=5)])
    assert [fed.come(0.9, private=1), fed.come(0.1)] == ["NEVER", "KEPT"]
    assert fed.held() == [2]


def test_at_least_and_at_most_n_of_each_group() -> None:
    least = Fed([Rule("each", "has(kind)", "least", n=1, per="label")], slots=0)
    fates = [least.come(s, label=y, kind=1) for s, y in ((0.1, 0), (0.3, 1), (0.2, 0), (0.1, 1))]
    assert fates == ["KEPT", "KEPT", "KEPT", "REFUSED"]
    assert least.held() == [2, 3]
    hourly = Fed([Rule("hourly", "alarm", slots=3, n=2, per="hour")], slots=0)
    times = [10.0, 20.0, 30.0, 3700.0, 3800.0, 7300.0]
    assert [hourly.come(0.5, time=t, alarm=1) for t in times].count("KEPT") == 6
    hourly.store.take_changes()
    assert hourly.held() == [4, 5, 6], "the oldest hour made room"
    assert hourly.come(0.9, time=15.0, alarm=1) == "REFUSED", "older than all that is held"
    sources = Fed([Rule("all", "alarm", slots=3, n=3, per="source")], slots=0)
    for source in "aaab":
        sources.come(0.5, source=source, alarm=1)
    assert sources.held() == [2, 3, 4], "the largest group made room"


def test_at_most_n_of_a_group_take_part_in_what_the_policy_keeps() -> None:
    rng = np.random.default_rng(0)
    fed = Fed([Rule("calm", "not alarm", "most", n=2, per="hour")], slots=50)
    for i in range(90):
        fed.come(rng.random(), time=3600.0 * (i // 30) + i, alarm=int(i % 10 == 0))
    ids = np.array(fed.held())
    calm = ids[(ids - 1) % 10 != 0]
    assert len(ids) - len(calm) == 9
    assert np.bincount((calm - 1) // 30).tolist() == [2, 2, 2]
    weights = fed.store.stands_for(calm)
    assert weights.tolist() == [13.5] * 6, "27 came in each hour"
    gone, _ = fed.store.take_changes()
    assert not {*gone} & {*ids.tolist()}


def test_samples_before_and_after_a_trigger() -> None:
    fed = Fed([Rule("crash", "shock > 9", slots=10, before=2, after=2)], slots=0)
    fates = [fed.come(0.5, shock=10 * (i == 5), source="a") for i in range(9)]
    assert [i for i, fate in enumerate(fates) if fate == "KEPT"] == [5, 6, 7]
    gone, late = fed.store.take_changes()
    assert (gone, [sample.id - 1 for sample in late]) == ([], [3, 4])
    assert fed.held() == [4, 5, 6, 7, 8]
    fed.come(0.5, shock=10, source="b")
    assert fed.store.take_changes() == ([], []), "another source has its own past"


def device_of(rules: list[dict[str, Any]], seed: int, capacity: int = 12) -> Device:
    method = parse_method({"policy": {"name": "balanced-reservoir"}, "rule": rules})
    learner = DenseLearner((2, 2))
    return build_device(method, learner, capacity=capacity, sample_shape=(2,), labels=2, seed=seed)


KEEPING = [
    {"name": "large", "when": "loss > 0.8", "slots": 3, "before": 1, "after": 1},
    {"name": "each", "when": "label >= 0", "action": "least", "n": 1, "per": "label", "slots": 2},
]
LIMITING = [{"name": "hot", "when": "time < 40", "action": "most", "n": 6, "per": "label"}]


@pytest.mark.parametrize(("rules", "reserved"), [(KEEPING, 5), (LIMITING, 0)])
def test_rules_do_not_bias_what_is_trained_on(rules: list[dict[str, Any]], reserved: int) -> None:
    """The mean over many draws of the stored samples' weighted gradient is that of all arrivals."""
    rng = np.random.default_rng(5)
    n, draws = 80, 500
    x = rng.standard_normal((n, 2)).astype(np.float32)
    x[:40] += 1.5  # what the limit thins is not like the rest
    y = (x[:, 0] + rng.standard_normal(n) > 0.5).astype(np.int64)
    batch = Batch(x, y, np.arange(n))
    model = rng.standard_normal(6).astype(np.float32)
    learner = DenseLearner((2, 2))
    exact = learner.probe(model).measure(batch).mean_gradient()
    found = np.zeros((draws, 6))
    for draw in range(draws):
        device = device_of(rules, draw, capacity=12 + reserved)
        device.set_model(model)
        for start in range(0, n, 40):
            part = batch.take(slice(start, start + 40))
            times = np.arange(start, start + len(part), dtype=np.float64)
            device.ingest(part, times, device.measure(part))
        held = device.store.stored()
        assert len(held.batch) == 12
        weights = device.sample_weights(held.regions, held.batch.ids)
        gradients = learner.probe(model).measure(held.batch)
        found[draw] = gradients.weighted_gradient(weights / weights.mean())
    error = found.mean(axis=0) - exact
    spread = found.std(axis=0) / np.sqrt(draws)
    assert (np.abs(error) < 4 * spread + 0.01 * np.abs(exact).max()).all(), error / spread


def test_what_is_trained_on_is_what_a_smaller_store_without_rules_keeps() -> None:
    rng = np.random.default_rng(1)
    x = rng.standard_normal((200, 2)).astype(np.float32)
    batch = Batch(x, rng.integers(0, 2, 200), np.arange(200))
    ruled, plain = device_of(KEEPING, 3, capacity=15), device_of([], 3, capacity=10)
    order = TrainOrder(0, ruled.learner.initial(0), None, LocalTraining(0.1, 2))
    for round_, start in enumerate(range(0, 200, 50)):
        part = batch.take(slice(start, start + 50))
        for device in (ruled, plain):
            device.ingest(part, float(start), device.measure(part))
        held = [device.store.stored().batch.ids.tolist() for device in (ruled, plain)]
        assert held[0] == held[1]
        order = TrainOrder(round_, order.model, None, order.local)
        reports = [device.participate(order) for device in (ruled, plain)]
        np.testing.assert_array_equal(reports[0].model, reports[1].model)
    store = ruled.store
    assert isinstance(store, RuledStore)
    assert len(store) > 10


@given(st.integers(0, 2**32 - 1), st.integers(1, 40))
@settings(max_examples=12, deadline=None)
def test_how_a_stream_is_cut_and_a_restart_change_nothing(seed: int, step: int) -> None:
    few = {"name": "few", "when": "label == 1", "action": "most", "n": 3, "per": "day"}
    rules = [{**KEEPING[0], "after": 0}, KEEPING[1], few]
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((60, 2)).astype(np.float32)
    batch = Batch(x, rng.integers(0, 2, 60), np.arange(60))
    model = rng.standard_normal(6).astype(np.float32)

    def fed(cut: int, *, restarts: bool) -> Device:
        device = device_of(rules, 7)
        device.set_model(model)
        for start in range(0, 60, cut):
            part = batch.take(slice(start, start + cut))
            device.ingest(part, 0.0, device.measure(part))
            if restarts:
                again = device_of(rules, 7)
                again.restore(device.snapshot())
                device = again
        return device

    one, other = fed(60, restarts=False).store, fed(step, restarts=True).store
    assert isinstance(one, RuledStore)
    assert isinstance(other, RuledStore)
    for name, column in one.ranks().items():
        np.testing.assert_array_equal(column, other.ranks()[name])
    assert one.stored().batch.ids.tolist() == other.stored().batch.ids.tolist()


def test_what_the_model_says_is_known_to_rules_once_there_is_one() -> None:
    rules = [
        {"name": "unsure", "when": "confidence < 0.6", "slots": 3},
        {"name": "wrong", "when": "prediction != label and loss > 0.69", "slots": 3},
    ]
    device = device_of(rules, 0, capacity=30)
    store = device.store
    assert isinstance(store, RuledStore)
    x = np.array([[9, 0], [0, 9], [0.1, 0], [9, 0]], dtype=np.float32)
    y = np.array([0, 1, 0, 1])
    device.ingest(Batch(x, y, np.arange(4)), 0.0, None)
    assert [store.holders(id_) for id_ in range(4)] == [()] * 4, "there is no model yet"
    device.set_model(np.array([1, 0, 0, 1, 0, 0], dtype=np.float32))
    batch = Batch(x, y, np.arange(10, 14))
    device.ingest(batch, 0.0, device.measure(batch))
    assert [store.holders(id_) for id_ in range(10, 14)] == [(), (), (0,), (1,)]


def test_a_snapshot_has_all_that_rules_hold() -> None:
    device = device_of(KEEPING, 7)
    device.set_model(device.learner.initial(0))
    rng = np.random.default_rng(0)
    batch = Batch(
        rng.standard_normal((60, 2)).astype(np.float32), rng.integers(0, 2, 60), np.arange(60)
    )
    device.ingest(batch, 0.0, device.measure(batch))
    again = device_of(KEEPING, 7)
    again.restore(device.snapshot())
    one, other = device.store, again.store
    assert isinstance(one, RuledStore)
    assert isinstance(other, RuledStore)
    np.testing.assert_array_equal(one.ranks()["ids"], other.ranks()["ids"])
    assert [one.holders(i) for i in range(60)] == [other.holders(i) for i in range(60)]
    other.remove(one.ranks()["ids"].tolist())
    assert len(other) == 0
