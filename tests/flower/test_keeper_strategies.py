"""KeeperStrategy around every strategy of Flower's, and Keepers behind every client mod."""

import inspect
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flwr.serverapp.strategy as strategies
import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp import mod as mods
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideAdaptiveClipping as AdaptiveClipping,
)
from flwr.serverapp.strategy import DifferentialPrivacyClientSideFixedClipping as FixedClipping
from flwr.serverapp.strategy import FedAvg, Strategy

from fedkeep.core.errors import ConfigError, RejectedError
from fedkeep.flower import Keeper, KeeperStrategy
from fedkeep.flower.keeper_records import (
    KEEPER,
    VERSION,
    VERSION_KEY,
    add_orders,
    encode,
    read_order,
)
from fedkeep.records import Evaluation, Round, read_run
from tests.flower.in_process import InProcessGrid, make_node
from tests.flower.strategies_table import combinations, write_table

NODES, FEATURES, LABELS = 6, 4, 3


def net() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Linear(FEATURES, LABELS)


def arrivals(node: int, round_: int) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng([node, round_])
    y = draw.integers(LABELS, size=24)
    return (np.eye(FEATURES)[y] * 3 + draw.normal(size=(24, FEATURES))).astype(np.float32), y


def make_app(*client_mods: Any, preset: str = "default", with_keeper: bool = True) -> ClientApp:
    """An app as Flower's quickstart has it, with a Keeper; evaluation by accuracy."""
    app = ClientApp()

    @app.train(mods=list(client_mods))  # for the app as a whole, mods would run in evaluations, too
    def train(msg: Message, context: Context) -> Message:
        model = net()
        model.load_state_dict(msg.content.array_records["arrays"].to_torch_state_dict())
        x, y = arrivals(context.node_id, int(str(msg.content["config"]["server-round"])))
        records: dict[str, Any] = {}
        if with_keeper:
            with Keeper.open(context, net, capacity=6, preset=preset) as keeper:
                keeper.offer(x, y)
                keeper.sync(msg)
                kept = keeper.samples()
            x, y = np.stack([sample for sample, _ in kept]), np.array([label for _, label in kept])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        for _ in range(3):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(torch.tensor(x)), torch.tensor(y))
            torch.autograd.backward(loss)
            optimizer.step()
        if with_keeper:
            records = dict(keeper.records())
        metrics = MetricRecord({"num-examples": len(y), "train-loss": loss.item()})
        content = {"arrays": ArrayRecord(model.state_dict()), "metrics": metrics, **records}
        return Message(RecordDict(content), reply_to=msg)

    @app.evaluate()
    def evaluate(msg: Message, context: Context) -> Message:
        model = net()
        model.load_state_dict(msg.content.array_records["arrays"].to_torch_state_dict())
        x, y = arrivals(context.node_id, 999)
        right = float((model(torch.tensor(x)).argmax(1).numpy() == y).mean())
        metrics = MetricRecord({"num-examples": len(y), "accuracy": right, "eval_loss": 0.0})
        return Message(RecordDict({"metrics": metrics}), reply_to=msg)

    return app


def play(
    strategy: Strategy, app: Callable[[Message, Context], Message], rounds: int = 3
) -> strategies.Result:
    grid = InProcessGrid([make_node(number, app, {}) for number in range(NODES)])
    return strategy.start(grid, ArrayRecord(net().state_dict()), num_rounds=rounds)


def weights(arrays: ArrayRecord) -> np.ndarray:
    return np.concatenate([array.numpy().ravel() for array in arrays.values()])


INNER: dict[str, Callable[[], Strategy]] = {
    "Bulyan": lambda: strategies.Bulyan(num_malicious_nodes=0),
    "FedMedian": strategies.FedMedian,
    "FedTrimmedAvg": strategies.FedTrimmedAvg,
    "Krum": lambda: strategies.Krum(num_malicious_nodes=1),
    "MultiKrum": lambda: strategies.MultiKrum(num_malicious_nodes=1, num_nodes_to_select=4),
    "QFedAvg": lambda: strategies.QFedAvg(client_learning_rate=0.3, train_loss_key="train-loss"),
    "DifferentialPrivacyServerSideFixedClipping": lambda: (
        strategies.DifferentialPrivacyServerSideFixedClipping(FedAvg(), 0.01, 5.0, NODES)
    ),
    "DifferentialPrivacyServerSideAdaptiveClipping": lambda: (
        strategies.DifferentialPrivacyServerSideAdaptiveClipping(
            FedAvg(), 0.01, NODES, clipped_count_stddev=0.1
        )
    ),
    "DifferentialPrivacyClientSideFixedClipping": lambda: FixedClipping(FedAvg(), 0.01, 5.0, NODES),
    "DifferentialPrivacyClientSideAdaptiveClipping": lambda: AdaptiveClipping(
        FedAvg(), 0.01, NODES, clipped_count_stddev=0.1
    ),
}
"""How a strategy is made where it needs more than nothing."""
CLIENT_MODS: dict[str, Any] = {
    "DifferentialPrivacyClientSideFixedClipping": mods.fixedclipping_mod,
    "DifferentialPrivacyClientSideAdaptiveClipping": mods.adaptiveclipping_mod,
}
ALL = [
    name
    for name in strategies.__all__
    if name not in {"Result", "Strategy"} and not name.startswith("FedXgb")
]


def inner_of(name: str) -> Strategy:
    return INNER.get(name, getattr(strategies, name))()


@pytest.mark.parametrize("name", ALL)
def test_every_strategy_trains_three_rounds_and_gradients_go_round(name: str) -> None:
    extra = [CLIENT_MODS[name]] if name in CLIENT_MODS else []
    result = play(KeeperStrategy(inner_of(name)), make_app(*extra))
    train = result.train_metrics_clientapp
    assert sorted(train) == [1, 2, 3]
    assert {train[n]["keeper-errors"] for n in train} == {0}
    assert all(int(str(train[n]["keeper-estimates"])) >= NODES // 2 for n in (2, 3))
    assert not np.array_equal(weights(result.arrays), weights(ArrayRecord(net().state_dict())))


@pytest.mark.parametrize("name", ["FedXgbBagging", "FedXgbCyclic"])
def test_trees_pass_as_they_are(name: str) -> None:
    """Boosted trees travel as bytes: nothing of them is a parameter, all reach the strategy."""
    app, seen = ClientApp(), []

    @app.train()
    def train(msg: Message, context: Context) -> Message:
        seen.append(context.node_id)
        trees = ArrayRecord({"0": Array(np.frombuffer(_TREES, dtype=np.uint8))})
        metrics = MetricRecord({"num-examples": 3})
        return Message(RecordDict({"arrays": trees, "metrics": metrics}), reply_to=msg)

    inner = getattr(strategies, name)(fraction_evaluate=0.0)
    empty = ArrayRecord({"0": Array(np.frombuffer(b"", dtype=np.uint8))})
    grid = InProcessGrid([make_node(number, app, {}) for number in range(NODES)])
    result = KeeperStrategy(inner).start(grid, empty, num_rounds=3)
    assert result.arrays["0"].numpy().tobytes().startswith(b'{"learner"')
    assert len(seen) >= 3


_TREES = (
    b'{"learner": {"gradient_booster": {"model": {"gbtree_model_param": {"num_trees": "1", '
    b'"num_parallel_tree": "1"}, "iteration_indptr": [0, 1], "trees": [{"id": 0}], '
    b'"tree_info": [0]}}}}'
)


def compressed(msg: Message, context: Context, call_next: Any) -> Message:
    """A mod of one's own that halves what is sent: float16, and back to the model's dtype."""
    reply: Message = call_next(msg, context)
    (name,) = reply.content.array_records
    halved = {
        key: Array(array.numpy().astype(np.float16).astype(array.dtype))
        for key, array in reply.content.array_records[name].items()
    }
    reply.content[name] = ArrayRecord(halved)
    return reply


@pytest.mark.parametrize(
    "client_mod",
    [
        mods.LocalDpMod(5.0, 0.001, 10.0, 1e-5),
        mods.arrays_size_mod,
        mods.message_size_mod,
        compressed,
    ],
    ids=["LocalDpMod", "arrays_size_mod", "message_size_mod", "compression"],
)
def test_every_client_mod_lets_a_keeper_through(client_mod: Any) -> None:
    result = play(KeeperStrategy(FedAvg(), deadline=5.0), make_app(client_mod))
    train, evaluated = result.train_metrics_clientapp, result.evaluate_metrics_clientapp
    assert {train[n]["keeper-errors"] for n in train} == {0}
    assert train[3]["keeper-estimates"] == NODES
    assert float(str(evaluated[3]["accuracy"])) > 0.6


@pytest.mark.parametrize("around", [True, False], ids=["outside", "inside"])
def test_client_side_clipping_works_on_either_side_of_the_wrapper(around: bool) -> None:
    strategy: Strategy = (
        FixedClipping(KeeperStrategy(FedAvg()), 0.001, 5.0, NODES)
        if around
        else KeeperStrategy(FixedClipping(FedAvg(), 0.001, 5.0, NODES))
    )
    result = play(strategy, make_app(mods.fixedclipping_mod))
    assert float(str(result.evaluate_metrics_clientapp[3]["accuracy"])) > 0.6


def test_no_mod_of_flowers_is_left_out() -> None:
    """A mod that a later Flower adds is to be tried here."""
    assert set(mods.__all__) == {
        "LocalDpMod", "adaptiveclipping_mod", "arrays_size_mod", "fixedclipping_mod",
        "message_size_mod",
    }  # fmt: skip
    names = {name for name, one in inspect.getmembers(strategies, inspect.isclass)}
    assert set(ALL) | {"FedXgbBagging", "FedXgbCyclic", "Result", "Strategy"} == names


def test_secagg_is_refused_in_a_sentence(caplog: pytest.LogCaptureFixture) -> None:
    from flwr.client.mod import secaggplus_mod
    from flwr.server.strategy import FedAvg as OldFedAvg

    with pytest.raises(ConfigError, match=r"SecAgg\+ runs with the older flwr.server alone"):
        KeeperStrategy(OldFedAvg())  # type: ignore[arg-type]
    result = play(KeeperStrategy(FedAvg(fraction_evaluate=0.0)), make_app(secaggplus_mod))
    assert "take secaggplus_mod out" in caplog.text
    assert "every client failed; nothing was learnt" in caplog.text
    assert not result.arrays, "nothing was merged"


def test_errors_of_clients_are_counted_and_named_and_not_waited_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    app = make_app()

    def failing(msg: Message, context: Context) -> Message:
        if context.node_id == 1001:
            raise ValueError("the disk of this device is full")
        return app(msg, context)

    result = play(KeeperStrategy(FedAvg()), failing)
    assert {line["keeper-errors"] for line in result.train_metrics_clientapp.values()} == {1}
    assert "1 of 6 clients failed: " in caplog.text
    assert "the disk of this device is full" in caplog.text


def test_a_reply_that_is_lost_is_waited_for_no_longer_than_the_deadline() -> None:
    app = make_app()

    class Losing(InProcessGrid):
        def pull_messages(self, message_ids: Any) -> list[Message]:
            replies = super().pull_messages(message_ids)
            return [reply for reply in replies if reply.metadata.src_node_id != 1001]

    grid = Losing([make_node(number, app, {}) for number in range(NODES)])
    strategy = KeeperStrategy(FedAvg(fraction_evaluate=0.0), deadline=0.5)
    result = strategy.start(grid, ArrayRecord(net().state_dict()), num_rounds=2)
    assert result.train_metrics_clientapp[2]["keeper-estimates"] == NODES - 1


def test_each_node_is_told_of_its_own_gradient() -> None:
    """Flower's strategies send one content to all nodes: ours must not be shared."""
    shared = RecordDict({"arrays": ArrayRecord(), "config": ConfigRecord({"lr": 0.1})})
    messages = [Message(shared, node, "train") for node in (7, 8)]
    first, second = add_orders(messages, 4, {7: 3}, np.ones(2, dtype=np.float32), "default")
    assert read_order(first.content).accepted == 3
    assert read_order(second.content).accepted == -1
    assert set(shared) == {"arrays", "config"}
    assert set(shared["config"]) == {"lr"}
    assert first.content["config"] is second.content["config"], "uploaded once"


def test_contradictory_presets_are_refused_by_the_keeper(caplog: pytest.LogCaptureFixture) -> None:
    result = play(KeeperStrategy(FedAvg(fraction_evaluate=0.0), preset="paper"), make_app())
    assert "the strategy's preset is 'paper', this keeper's is 'default'" in caplog.text
    assert not result.arrays, "nothing was merged"


def test_clients_without_a_keeper_are_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="fedkeep.flower"):
        play(KeeperStrategy(FedAvg()), make_app(with_keeper=False))
    assert caplog.text.count("6 of 6 clients sent no records of a Keeper") == 1


def test_noise_for_the_model_alone_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    play(KeeperStrategy(inner_of("DifferentialPrivacyServerSideFixedClipping")), make_app())
    assert caplog.text.count("Keepers send mean gradients without noise") == 1


def test_each_run_has_a_record_of_its_own_and_nothing_is_shown_that_was_not_counted(
    tmp_path: Path,
) -> None:
    for _ in range(2):
        play(KeeperStrategy(FedAvg(), records=str(tmp_path)), make_app())
    runs = [
        read_run(path) for path in sorted(tmp_path.glob("*.jsonl")) if "timing" not in path.name
    ]
    assert [run.header.run for run in runs] == ["run-2", "run"] or len(runs) == 2
    rounds = runs[0].of(Round)
    assert sum(line.kept for line in rounds) == NODES * 6
    assert all(line.arrivals == 24 * NODES for line in rounds)
    counted = [line.kept + line.replaced + line.refused for line in rounds]
    assert counted == [24 * NODES] * 3
    evaluations = runs[0].of(Evaluation)
    assert all(line.bytes_up > 0 and line.bytes_down > 0 for line in evaluations)
    assert evaluations[-1].samples_valued == 3 * 24 * NODES


def test_a_gradient_of_no_whole_number_of_floats_is_rejected(
    caplog: pytest.LogCaptureFixture,
) -> None:
    app = make_app()

    def torn(msg: Message, context: Context) -> Message:
        reply = app(msg, context)
        if context.node_id == 1001 and KEEPER in reply.content:
            record = reply.content.config_records[KEEPER]
            record["local_gradient"] = encode(np.ones(3, dtype=np.float32))[:-1]
        return reply

    play(KeeperStrategy(FedAvg(fraction_evaluate=0.0)), torn)
    assert "device 1001 rejected: malformed: 11 bytes" in caplog.text


def changed_version(app: ClientApp, version: int | None) -> Callable[[Message, Context], Message]:
    """The app with a Keeper of another fedkeep; None: of one that says no version."""

    def reply(msg: Message, context: Context) -> Message:
        answer = app(msg, context)
        if KEEPER in answer.content:
            about = answer.content.config_records[KEEPER]
            if version is None:
                del about[VERSION_KEY]
            else:
                about[VERSION_KEY] = version
        return answer

    return reply


@pytest.mark.parametrize(("version", "words"), [(VERSION + 1, "version 2"), (None, "no version")])
def test_a_keeper_of_another_version_is_rejected_with_a_sentence(
    version: int | None, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    app = make_app()
    nodes = [make_node(number, app, {}) for number in range(NODES - 1)]
    nodes.append(make_node(NODES - 1, changed_version(app, version), {}))
    strategy = KeeperStrategy(FedAvg())
    arrays = ArrayRecord(net().state_dict())
    result = strategy.start(InProcessGrid(nodes), arrays, num_rounds=2)
    assert result.train_metrics_clientapp[2]["keeper-rejected"] == 1
    assert result.train_metrics_clientapp[2]["keeper-estimates"] == NODES - 1
    assert f"device {1000 + NODES - 1} rejected: version: its Keeper speaks {words}" in caplog.text
    assert "install the same fedkeep on server and devices" in caplog.text


@pytest.mark.parametrize(("version", "words"), [(VERSION + 1, "version 2"), (None, "no version")])
def test_a_keeper_rejects_a_server_of_another_version(version: int | None, words: str) -> None:
    message = Message(
        RecordDict({"arrays": ArrayRecord(net().state_dict()), "config": ConfigRecord()}),
        1000,
        "train",
    )
    (message,) = add_orders([message], 1, {}, None, "default")
    config = message.content.config_records["config"]
    if version is None:
        del config[VERSION_KEY]
    else:
        config[VERSION_KEY] = version
    context = make_node(0, make_app(), {}).context
    with Keeper.open(context, net, capacity=6) as keeper:
        keeper.offer(*arrivals(0, 0))
        with pytest.raises(RejectedError, match=f"the server speaks {words} .* install the same"):
            keeper.sync(message)


def drop_metrics(content: RecordDict) -> None:
    del content["metrics"]


def rename_weight(content: RecordDict) -> None:
    content["metrics"] = MetricRecord({"n": 3})


def drop_arrays(content: RecordDict) -> None:
    content.pop("arrays", None)


def add_arrays(content: RecordDict) -> None:
    content["more"] = ArrayRecord({"a": Array(np.ones(3, dtype=np.float32))})


def list_loss(content: RecordDict) -> None:
    content["metrics"] = MetricRecord({"num-examples": 3, "train-loss": [0.1, 0.2]})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (drop_metrics, "it lacks 'num-examples' in 'metrics', 'train-loss' in 'metrics'"),
        (rename_weight, "it alone has 'n' in 'metrics'"),
        (drop_arrays, "it lacks 'bias' in 'arrays', 'weight' in 'arrays'"),
        (add_arrays, "it alone has 'a' in 'more'"),
        (list_loss, "it alone has 'train-loss, 2 numbers' in 'metrics'"),
    ],
)
def test_a_reply_of_another_form_than_most_is_rejected_and_does_not_end_the_run(
    change: Callable[[RecordDict], None], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    app = make_app()

    def odd(msg: Message, context: Context) -> Message:
        reply = app(msg, context)
        if context.node_id == 1001 and "arrays" in reply.content:
            change(reply.content)
        return reply

    result = play(KeeperStrategy(FedAvg()), odd)
    last = result.train_metrics_clientapp[3]
    assert (last["keeper-rejected"], last["keeper-estimates"]) == (1, NODES - 1)
    assert "device 1001 rejected: wrong-records: " in caplog.text
    assert words in caplog.text
    assert float(str(result.evaluate_metrics_clientapp[3]["accuracy"])) > 0.6


def test_an_evaluation_of_another_form_does_not_end_the_run() -> None:
    app = make_app()

    def odd(msg: Message, context: Context) -> Message:
        reply = app(msg, context)
        if context.node_id == 1001 and "arrays" not in reply.content:
            reply.content["metrics"] = MetricRecord({"hello": 1.0})
        return reply

    result = play(KeeperStrategy(FedAvg()), odd)
    assert float(str(result.evaluate_metrics_clientapp[3]["accuracy"])) > 0.6


def test_what_no_reply_has_is_the_strategys_own_mistake() -> None:
    with pytest.raises(Exception, match="Missing required key `n`"):
        play(KeeperStrategy(FedAvg(weighted_by_key="n")), make_app())


def test_a_round_in_which_no_reply_has_examples_merges_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    app = make_app()

    def empty(msg: Message, context: Context) -> Message:
        reply = app(msg, context)
        if "arrays" in reply.content:
            reply.content.metric_records["metrics"]["num-examples"] = 0
        return reply

    result = play(KeeperStrategy(FedAvg(fraction_evaluate=0.0)), empty)
    assert result.train_metrics_clientapp[3]["keeper-estimates"] == NODES
    assert caplog.text.count("every reply has num-examples = 0") == 1
    assert not result.arrays, "nothing was merged"


def test_a_part_of_the_long_form_keeps_the_rows_that_it_did_not_play(tmp_path: Path) -> None:
    page, rest = tmp_path / "page.md", "# Page\n\n{}\nafter\n"
    page.write_text(rest.format("<!-- strategies -->\n<!-- end of strategies -->"))
    first = {("FedAvg", ""): "| FedAvg |  | 0 | 0.5 | right |"}
    write_table(first | {("Krum", ""): "| Krum |  | 0 | 0.6 | right |"}, page)
    write_table({("FedAvg", ""): "| FedAvg |  | 6 | 0.9 | right |"}, page)
    found = [line for line in page.read_text().splitlines() if line.startswith(("| Fed", "| Kr"))]
    assert found == ["| FedAvg |  | 6 | 0.9 | right |", "| Krum |  | 0 | 0.6 | right |"]
    assert f"; {len(combinations()) - 2} not run yet:" in page.read_text()
    assert page.read_text().endswith("<!-- end of strategies -->\nafter\n")
