"""An existing app, FedAvg and torch and all, adopts fedkeep by a Keeper and a wrapper."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg, Result

from fedkeep.core.errors import ConfigError, DataError
from fedkeep.core.screening import Limits
from fedkeep.flower import Keeper, KeeperStrategy
from fedkeep.flower.keeper_records import GRADIENT, KEEPER, decode, encode, read_order
from fedkeep.records import GistLine, read_run
from tests.flower.in_process import InProcessGrid, make_node

CENTRES = np.random.default_rng(0).normal(size=(3, 5)).astype(np.float32) * 2


def net() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))


def arrivals(node: int, round_: int, n: int = 40) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng((node, round_))
    y = rng.integers(0, 3, n)
    return CENTRES[y] + rng.normal(size=(n, 5)).astype(np.float32), y


def make_app(capacity: int = 9, directory: str | None = None, preset: str = "default") -> ClientApp:
    app = ClientApp()

    @app.train()
    def train(msg: Message, context: Context) -> Message:
        model = net()
        model.load_state_dict(msg.content.array_records["arrays"].to_torch_state_dict())
        with Keeper.open(context, net, capacity, directory=directory, preset=preset) as keeper:
            keeper.offer(*arrivals(context.node_id, int(msg.content["config"]["server-round"])))
            keeper.sync(msg)
            kept = keeper.samples()
        x, y = torch.tensor(np.stack([x for x, _ in kept])), torch.tensor([y for _, y in kept])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            torch.autograd.backward(torch.nn.functional.cross_entropy(model(x), y))
            optimizer.step()
        metrics = MetricRecord({"num-examples": len(kept)})
        content = RecordDict(
            {"arrays": ArrayRecord(model.state_dict()), "metrics": metrics, **keeper.records()}
        )
        return Message(content, reply_to=msg)

    return app


def accuracy(arrays: ArrayRecord) -> float:
    model = net()
    model.load_state_dict(arrays.to_torch_state_dict())
    x, y = arrivals(99, 99, 600)
    return float((model(torch.tensor(x)).argmax(1).numpy() == y).mean())


def make_grid(app: ClientApp) -> InProcessGrid:
    return InProcessGrid([make_node(number, app, {}) for number in range(4)])


def test_fedavg_trains_on_what_was_kept_and_directions_go_round() -> None:
    app, directions = make_app(), []

    def watched(message: Message, context: Context) -> Message:
        directions.append(read_order(message.content).direction is not None)
        return app(message, context)

    strategy = KeeperStrategy(FedAvg(fraction_evaluate=0.0))
    initial = ArrayRecord(net().state_dict())
    result = strategy.start(make_grid(watched), initial, num_rounds=8)  # type: ignore[arg-type]
    assert accuracy(result.arrays) > max(0.8, accuracy(initial))
    assert directions[:8] == [False] * 8
    assert all(directions[8:])


def test_no_more_is_kept_than_the_capacity(tmp_path: Path) -> None:
    node = make_node(0, make_app(), {})
    with Keeper.open(node.context, net, 7, directory=str(tmp_path)) as keeper:
        keeper.offer(*arrivals(0, 0, 100))
        keeper.sync(ArrayRecord(net().state_dict()))
        assert len(keeper.samples()) == 7


@pytest.mark.parametrize("durable", [True, False])
def test_a_keeper_remembers_between_two_messages(tmp_path: Path, durable: bool) -> None:
    context = make_node(0, make_app(), {}).context
    directory = str(tmp_path) if durable else None
    with Keeper.open(context, net, 7, directory=directory) as keeper:
        keeper.offer(*arrivals(0, 0, 50))
        keeper.sync(ArrayRecord(net().state_dict()))
        before = sorted(y for _, y in keeper.samples())
    with Keeper.open(context, net, 7, directory=directory) as keeper:
        assert sorted(y for _, y in keeper.samples()) == before


def test_a_keeper_that_failed_is_not_saved(tmp_path: Path) -> None:
    context = make_node(0, make_app(), {}).context

    def fail() -> None:
        with Keeper.open(context, net, 7, directory=str(tmp_path)) as keeper:
            keeper.offer(*arrivals(0, 0, 50))
            raise TimeoutError

    with pytest.raises(TimeoutError):
        fail()
    assert not list(tmp_path.iterdir())


def test_a_sample_offered_again_is_the_same_sample() -> None:
    context = make_node(0, make_app(), {}).context
    with Keeper.open(context, net, 50) as keeper:
        for _ in range(3):
            keeper.offer(*arrivals(0, 0, 20))
        assert len(keeper.samples()) == 20


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (np.full(67, np.nan), "estimator-not-finite"),
        (np.ones(3), "estimator-shape"),
        (np.zeros(67), "zero-estimator"),
        (np.full(67, 1e30), "large-estimator"),
        (b"123", "malformed"),
    ],
)
def test_a_bad_estimate_is_dropped_and_training_goes_on(
    bad: np.ndarray | bytes, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    honest = make_app()

    def liar(message: Message, context: Context) -> Message:
        reply = honest(message, context)
        if context.node_id == 1002 and GRADIENT in reply.content[KEEPER]:
            reply.content[KEEPER][GRADIENT] = bad if isinstance(bad, bytes) else encode(bad)  # type: ignore[assignment]
        return reply

    strategy = KeeperStrategy(FedAvg(fraction_evaluate=0.0))
    result = strategy.start(make_grid(liar), ArrayRecord(net().state_dict()), num_rounds=4)  # type: ignore[arg-type]
    assert np.isfinite(result.arrays["0.weight"].numpy()).all()
    assert f"device 1002 rejected: {reason}: " in caplog.text


def test_the_documented_difference_is_at_most_ten_lines() -> None:
    page = (Path(__file__).parents[2] / "docs" / "flower.md").read_text()
    diff = page.split("```diff")[1].split("```")[0].splitlines()
    assert 0 < sum(line.startswith("+") for line in diff) <= 10


def norm_net() -> torch.nn.Sequential:
    torch.manual_seed(0)
    nn = torch.nn
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def opened(capacity: int = 9, make=norm_net, **options: object) -> Keeper:  # type: ignore[no-untyped-def]
    return Keeper.open(make_node(0, make_app(), {}).context, make, capacity, **options)  # type: ignore[arg-type]


def test_unsound_samples_are_counted_and_none_is_kept() -> None:
    with opened() as keeper:
        x, y = arrivals(0, 0, 8)
        x[0, 0], x[1, 2] = np.nan, np.inf
        keeper.offer(
            x, np.where(np.arange(8) == 2, -3, np.where(np.arange(8) == 3, 7, y)).astype(float)
        )
        keeper.offer(x[4:6], np.array([0.5, 1.0]))
        keeper.offer(np.zeros((2, 6)), [0, 1])
        now = keeper.status()
    assert now.unsound == {"label": 3, "not-finite": 2, "shape": 2}
    assert (now.offered, now.capacity) == (12, 9)
    assert now.stored == sum(now.labels.values()) == now.fates["kept"]


@pytest.mark.parametrize(
    ("y", "said"),
    [
        ([0.5, 1.25], "regression"),
        ([[0, 1], [1, 0]], "one class number a sample"),
        ([0], "one class number a sample"),
        (["a", "b"], "arrays or tensors of numbers"),
    ],
)
def test_what_are_no_classes_is_refused_in_a_sentence(y: object, said: str) -> None:
    with opened() as keeper, pytest.raises(ConfigError, match=said):
        keeper.offer(np.zeros((2, 5)), y)


@pytest.mark.parametrize(
    ("x", "said"),
    [
        ([["a"] * 5] * 2, "arrays or tensors of numbers"),
        ([[1.0, 2.0], [3.0]], "arrays or tensors of numbers"),
        (None, "one class number a sample"),
        (np.zeros((2, 6)), r"takes no samples of shape \(6,\)"),
    ],
)
def test_what_are_no_samples_is_refused_in_a_sentence(x: object, said: str) -> None:
    with opened() as keeper, pytest.raises(ConfigError, match=said):
        keeper.offer(x, [0, 1])


def test_nothing_to_offer_is_no_mistake_and_a_tensor_may_be_part_of_a_graph() -> None:
    with opened() as keeper:
        keeper.offer(np.zeros((0, 5)), [])
        assert keeper.status().offered == 0
        keeper.offer(torch.zeros((2, 5), requires_grad=True), torch.tensor([0, 1]))
        assert keeper.status().stored == 2


def test_models_that_are_none_are_refused_in_a_sentence() -> None:
    with (
        opened() as keeper,
        pytest.raises(ConfigError, match="takes the message, its ArrayRecord or a vector"),
    ):
        keeper.sync(net().state_dict())
    with pytest.raises(ConfigError, match="a torch module, its class, or a function"):
        opened(make=3)


def test_a_keepers_file_of_another_form_is_refused_in_a_sentence(tmp_path: Path) -> None:
    with opened(directory=str(tmp_path)) as keeper:
        keeper.offer(*arrivals(0, 0, 8))
    (file,) = tmp_path.glob("*.npz")
    with np.load(file) as saved:
        older = {name: saved[name] for name in saved.files if name != "form"}
    np.savez(file, **older)
    with pytest.raises(DataError, match="has form 0, not 1: remove it to begin anew"):
        opened(directory=str(tmp_path))


def wider() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(5, 9), torch.nn.ReLU(), torch.nn.Linear(9, 3))


@pytest.mark.parametrize(
    ("make", "changed"),
    [(net, {"last_layers": 1}), (net, {"policy": "ode"}), (wider, {})],
    ids=["last_layers", "policy", "model"],
)
def test_a_keeper_opened_for_another_model_says_how_to_begin_anew(
    tmp_path: Path, make: Any, changed: dict[str, Any]
) -> None:
    context = make_node(0, make_app(), {}).context
    with Keeper.open(context, net, 9, directory=str(tmp_path)) as keeper:
        keeper.offer(*arrivals(0, 0))
        keeper.sync(ArrayRecord(net().state_dict()))
    (file,) = tmp_path.iterdir()
    with pytest.raises(ConfigError, match=f"does not fit the model .* delete {file} to begin anew"):
        Keeper.open(context, make, 9, directory=str(tmp_path), **changed)
    file.unlink()
    assert Keeper.open(context, make, 9, directory=str(tmp_path), **changed).status().stored == 0


def test_two_keepers_of_one_app_are_told_apart_or_refused(tmp_path: Path) -> None:
    context = make_node(0, make_app(), {}).context
    for keepers in ("one", "two"):
        with (
            Keeper.open(context, net, 9, directory=str(tmp_path / "a")) as first,
            Keeper.open(context, wider, 6, directory=str(tmp_path / "b")) as second,
        ):
            for keeper in (first, second):
                keeper.offer(*arrivals(0, 0))
        assert (first.status().stored, second.status().stored) == (9, 6), keepers
    with Keeper.open(context, net, 9) as keeper:
        keeper.offer(*arrivals(0, 0))
    with pytest.raises(ConfigError, match="if an app has several keepers, give each a directory="):
        Keeper.open(context, wider, 6)


def test_a_model_with_one_output_is_refused_in_a_sentence() -> None:
    with (
        opened(make=lambda: torch.nn.Linear(5, 1)) as keeper,
        pytest.raises(ConfigError, match="give the loss you train with"),
    ):
        keeper.offer(np.zeros((2, 5)), [0, 1])


@pytest.mark.parametrize("capacity", [1.5, 0, -3, True, "9"])
def test_a_capacity_that_is_none_is_refused(capacity: int) -> None:
    with pytest.raises(ConfigError, match="capacity must be a whole number"):
        opened(capacity)


@pytest.mark.parametrize("last_layers", [1, None])
def test_batch_norm_is_valued_as_in_evaluation_by_the_statistics_that_came(
    last_layers: int | None,
) -> None:
    trained = norm_net()
    with torch.no_grad():
        trained[1].running_mean += 0.7  # type: ignore[operator,union-attr,assignment]
        trained[1].running_var *= 3.0  # type: ignore[operator,union-attr,assignment]
    x, y = arrivals(0, 0, 30)
    direction = np.ones(27 if last_layers else 27 + 16 + 48, dtype=np.float32)
    with opened(last_layers=last_layers, policy="high-loss") as keeper:
        keeper.offer(x, y)
        keeper.sync(ArrayRecord(trained.state_dict()), direction)
        keeper.offer(*arrivals(0, 1, 30))
        kept = keeper._stream.device.store.stored()  # type: ignore[union-attr]
    trained.eval()
    kept_x = np.stack([x for x, _ in keeper.samples()])
    losses = torch.nn.functional.cross_entropy(
        trained(torch.tensor(kept_x)), torch.tensor(kept.batch.y), reduction="none"
    )
    np.testing.assert_allclose(kept.scores, losses.detach().numpy(), rtol=1e-4)


def test_statistics_are_remembered_between_two_messages(tmp_path: Path) -> None:
    context, trained = make_node(0, make_app(), {}).context, norm_net()
    with torch.no_grad():
        trained[1].running_mean += 0.7  # type: ignore[operator,union-attr,assignment]
    with Keeper.open(context, norm_net, 9, directory=str(tmp_path)) as keeper:
        keeper.offer(*arrivals(0, 0, 30))
        keeper.sync(ArrayRecord(trained.state_dict()))
    again = Keeper.open(context, norm_net, 9, directory=str(tmp_path))
    expected = trained.eval()(torch.tensor(arrivals(0, 1, 4)[0])).detach().numpy()
    vector = np.concatenate([p.detach().numpy().ravel() for p in trained.parameters()])
    np.testing.assert_allclose(
        again._stream.model.learner.logits(vector, arrivals(0, 1, 4)[0]),  # type: ignore[union-attr]
        expected,
        rtol=1e-5,
    )


def test_flowers_log_and_the_record_say_what_the_keepers_did(tmp_path: Path) -> None:
    record = tmp_path / "keeping.jsonl"
    strategy = KeeperStrategy(FedAvg(fraction_evaluate=0.0), records=str(record))
    result = strategy.start(make_grid(make_app()), ArrayRecord(net().state_dict()), num_rounds=3)
    said = result.train_metrics_clientapp[3]
    assert (said["keeper-offered"], said["keeper-stored"], said["keeper-unsound"]) == (
        4 * 3 * 40,
        4 * 9,
        0,
    )
    assert said["keeper-estimates"] == 4
    run = read_run(record)
    assert [(line.round, line.participants, line.arrivals) for line in run.rounds] == [
        (number, (0, 1, 2, 3), 160) for number in (1, 2, 3)
    ]
    gists = run.of(GistLine)
    assert [(line.round, line.participations) for line in gists] == [(2, 4), (3, 4)], (
        "after a first model"
    )
    assert gists[-1].worth > 9, "more than the keepers store"
    assert run.end is not None


def test_a_users_own_loop_is_corrected_by_the_gist() -> None:
    with opened(make=net, policy="balanced-reservoir", gist="local") as keeper:
        for round_ in range(2):
            keeper.offer(*arrivals(0, round_, 200))
            keeper.sync(ArrayRecord(net().state_dict()))
        kept = keeper.samples()
    x, y = torch.tensor(np.stack([x for x, _ in kept])), torch.tensor([y for _, y in kept])

    def gradient(corrected: bool) -> np.ndarray:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        if corrected:
            keeper.correct(model, optimizer)
        torch.autograd.backward(torch.nn.functional.cross_entropy(model(x), y))
        optimizer.step()
        return all_gradients(model)

    model = net()
    x_all, y_all = (
        np.concatenate(parts)
        for parts in zip(*(arrivals(0, r, 200) for r in range(2)), strict=True)
    )
    torch.autograd.backward(
        torch.nn.functional.cross_entropy(model(torch.tensor(x_all)), torch.tensor(y_all))
    )
    stream = all_gradients(model)
    plain, mended = (float(np.linalg.norm(gradient(c) - stream)) for c in (False, True))
    assert mended < 0.95 * plain, (
        f"nine samples are {plain:.3f} from the stream's gradient, with the gist {mended:.3f}"
    )


def all_gradients(model: torch.nn.Module) -> np.ndarray:
    return np.concatenate(
        [p.grad.numpy().ravel() for p in model.parameters() if p.grad is not None]
    )


class Large(torch.nn.Module):
    """About a million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(
            torch.nn.Linear(1000, 990), torch.nn.ReLU(), torch.nn.Linear(990, 10)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.body(x.float() / 255)
        return scores


def test_at_a_million_parameters_the_context_is_tiny_and_the_file_holds_two_models() -> None:
    context = make_node(0, make_app(), {}).context
    rng = np.random.default_rng(0)
    model = Large()
    size = sum(p.numel() for p in model.parameters())
    assert size > 10**6
    for _ in range(2):
        with Keeper.open(context, Large, 64) as keeper:
            x = rng.integers(0, 256, size=(64, 1000)).astype(np.uint8)
            keeper.offer(x, np.arange(64) % 10)
            keeper.sync(ArrayRecord(model.state_dict()))
    assert keeper.samples()[0][0].dtype == np.uint8
    assert not context.state.array_records
    in_context = sum(record.count_bytes() for record in context.state.config_records.values())
    assert in_context < 500
    stored = 64 * 1000
    allowed = 2 * 4 * size + stored + 50_000
    assert keeper._memory.path.stat().st_size <= allowed
    assert keeper._memory.path.stat().st_mode & 0o077 == 0


def test_a_file_that_is_gone_begins_anew_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    context = make_node(0, make_app(), {}).context
    with Keeper.open(context, net, 9) as keeper:
        keeper.offer(*arrivals(0, 0, 20))
    keeper._memory.path.unlink()
    with Keeper.open(context, net, 9) as keeper:
        assert keeper.status().offered == 0
    assert "this device begins anew" in caplog.text


class Net(torch.nn.Module):
    """What an app's task.py holds."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(
            torch.nn.Linear(5, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.body(x)
        return scores


def test_the_documented_app_learns_with_a_class_and_corrections() -> None:
    app = ClientApp()
    corrected: list[str] = []

    @app.train()
    def train(msg: Message, context: Context) -> Message:
        model = Net()
        model.load_state_dict(msg.content.array_records["arrays"].to_torch_state_dict())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with Keeper.open(context, Net, capacity=9) as keeper:
            round_ = int(str(msg.content["config"]["server-round"]))  # type: ignore[call-overload,index]
            keeper.offer(*arrivals(context.node_id, round_))
            keeper.sync(msg)
            keeper.correct(model, optimizer)
        loader = torch.utils.data.DataLoader(keeper.samples("img", "label"), batch_size=4)  # type: ignore[arg-type,var-annotated]
        for batch in loader:
            optimizer.zero_grad()
            torch.autograd.backward(
                torch.nn.functional.cross_entropy(model(batch["img"]), batch["label"])
            )
            optimizer.step()
        corrected.append(keeper.status().correction)
        metrics = MetricRecord({"num-examples": 9})
        arrays = ArrayRecord(model.state_dict())
        content = RecordDict({"arrays": arrays, "metrics": metrics, **keeper.records()})
        return Message(content, reply_to=msg)

    torch.manual_seed(0)
    strategy = KeeperStrategy(FedAvg(fraction_evaluate=0.0))
    result = strategy.start(make_grid(app), ArrayRecord(Net().state_dict()), num_rounds=12)  # type: ignore[arg-type]
    model = Net()
    model.load_state_dict(result.arrays.to_torch_state_dict())
    x, y = arrivals(99, 99, 600)
    assert float((model(torch.tensor(x)).argmax(1).numpy() == y).mean()) > 0.8
    assert corrected[:4] == ["none"] * 4, "nothing is known before the first model"
    assert corrected[-4:] == ["on"] * 4


def test_the_lines_of_the_readme_are_an_app_that_learns() -> None:
    """With a class, a loader of torch's, and arrivals as numpy makes them: float64."""
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    (block,) = (b for b in re.findall(r"```python\n(.*?)```", readme, re.S) if "Keeper.open" in b)
    pasted: dict[str, Any] = {}
    exec(compile(block, "README.md", "exec"), pasted)
    app = ClientApp()

    @app.train()
    def train(msg: Message, context: Context) -> Message:
        model = Net()
        model.load_state_dict(msg.content.array_records["arrays"].to_torch_state_dict())
        x, y = arrivals(context.node_id, int(str(msg.content["config"]["server-round"])))
        new = x.astype(np.float64), y
        samples, keeper = pasted["samples_for"](msg, context, Net, new, model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for features, labels in torch.utils.data.DataLoader(samples, batch_size=16):
            optimizer.zero_grad()
            torch.autograd.backward(torch.nn.functional.cross_entropy(model(features), labels))
            optimizer.step()
        metrics = MetricRecord({"num-examples": len(samples)})
        content: dict[str, Any] = {"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}
        return Message(RecordDict({**content, **keeper.records()}), reply_to=msg)

    torch.manual_seed(0)
    grid, arrays = make_grid(app), ArrayRecord(Net().state_dict())
    result = pasted["strategy"].start(grid, arrays, num_rounds=8)
    metrics = result.train_metrics_clientapp[8]
    assert (metrics["keeper-errors"], metrics["keeper-estimates"]) == (0, 4)
    model = Net()
    model.load_state_dict(result.arrays.to_torch_state_dict())
    x, y = arrivals(99, 99, 600)
    assert float((model(torch.tensor(x)).argmax(1).numpy() == y).mean()) > 0.8


def test_a_device_whose_loss_rises_three_times_stops_correcting_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    context = make_node(0, make_app(), {}).context
    for round_ in range(5):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=50.0)
        with Keeper.open(context, net, 9, gist="local") as keeper:
            keeper.offer(*arrivals(0, round_, 40))
            keeper.sync(ArrayRecord(net().state_dict()))
        keeper.correct(model, optimizer)
        x, y = (torch.tensor(np.stack(part)) for part in zip(*keeper.samples(), strict=True))
        for _ in range(4):
            optimizer.zero_grad()
            torch.autograd.backward(torch.nn.functional.cross_entropy(model(x), y))
            optimizer.step()
        ends = "corrections have ended on this device" in caplog.text
        keeper.records()
        assert ends == (round_ == 4), "the first model is not corrected, the next three are"
    assert "rose three times" in keeper.status().correction


def test_a_gist_and_a_budget_are_options_of_the_keeper(tmp_path: Path) -> None:
    def participate(keeper: Keeper) -> None:
        keeper.offer(*arrivals(0, 0, 30))
        keeper.sync(ArrayRecord(net().state_dict()))
        keeper.offer(*arrivals(0, 1, 30))
        keeper.sync(ArrayRecord(net().state_dict()))

    with opened(make=net, gist="none") as keeper:
        participate(keeper)
        assert "gist" not in keeper.records()["fedkeep.keeper"]
    with pytest.raises(ConfigError, match="gist"):
        opened(make=net, gist="shard")
    with opened(make=net) as keeper:
        participate(keeper)
        clear = decode(keeper.records()[KEEPER][GRADIENT])  # type: ignore[arg-type]
    budget = {"epsilon": 5.0, "unit": "device", "clip": 0.5}
    with opened(make=net, privacy=budget, directory=str(tmp_path)) as keeper:
        participate(keeper)
        noisy = decode(keeper.records()[KEEPER][GRADIENT])  # type: ignore[arg-type]
        assert "gist" not in keeper.records()["fedkeep.keeper"]
    short = clear * min(1.0, 0.5 / float(np.linalg.norm(clear)))
    assert np.linalg.norm(noisy - short) > 0.1
    with pytest.raises(ConfigError, match="name a directory="):
        opened(make=net, privacy=budget)
    with pytest.raises(ConfigError, match="unit"):
        opened(make=net, privacy={"epsilon": 5.0}, directory=str(tmp_path))
    with pytest.raises(ConfigError, match="protects its estimate alone"):
        opened(make=net, privacy={"epsilon": 5.0, "protect": ["model"]}, directory=str(tmp_path))


def test_a_spent_budget_is_remembered_and_withholds_the_estimate(tmp_path: Path) -> None:
    budget = {"epsilon": 5.0, "unit": "device", "clip": 0.5, "planned_participations": 1}
    sent = []
    for round_ in range(4):
        with opened(make=net, privacy=budget, directory=str(tmp_path)) as keeper:
            keeper.offer(*arrivals(0, round_, 30))
            keeper.sync(ArrayRecord(net().state_dict()))
            sent.append(GRADIENT in keeper.records()[KEEPER])
    assert sum(sent) == 1, f"one release was paid for: {sent}"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda named: named.pop("2.weight"), "has no parameter '2.weight'"),
        (lambda named: named.update({"0.bias": torch.zeros(7)}), "'0.bias' has shape .7,."),
    ],
)
def test_a_model_of_other_names_or_shapes_is_refused_by_name(change, said: str) -> None:  # type: ignore[no-untyped-def]
    named = net().state_dict()
    change(named)
    with opened(make=net) as keeper:
        keeper.offer(*arrivals(0, 0, 8))
        with pytest.raises(ConfigError, match=said):
            keeper.sync(ArrayRecord(named))


def test_arrays_that_are_numbered_are_taken_in_the_models_order() -> None:
    arrays = [p.detach().numpy() for p in net().state_dict().values()]
    with opened(make=net) as keeper:
        keeper.offer(*arrivals(0, 0, 8))
        keeper.sync(ArrayRecord(arrays))
        right = np.concatenate([array.ravel() for array in arrays])
        np.testing.assert_array_equal(keeper._stream.device.model, right)  # type: ignore[union-attr,arg-type]


def test_corrections_measure_what_was_given_out_though_the_store_has_changed() -> None:
    context = make_node(0, make_app(), {}).context
    with Keeper.open(context, net, 9, gist="local") as keeper:
        keeper.offer(*arrivals(0, 0, 40))
        keeper.sync(ArrayRecord(net().state_dict()))
    with Keeper.open(context, net, 9, gist="local") as keeper:
        keeper.offer(*arrivals(0, 1, 40))
        keeper.sync(ArrayRecord(net().state_dict()))
        kept = keeper.samples()
        keeper.offer(*arrivals(0, 2, 200))
    assert len(keeper.samples()) == 9
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    keeper.correct(model, optimizer)
    x, y = (torch.tensor(np.stack(part)) for part in zip(*kept, strict=True))
    for _ in range(3):
        optimizer.zero_grad()
        torch.autograd.backward(torch.nn.functional.cross_entropy(model(x), y))
        optimizer.step()
    keeper.records()
    assert keeper.status().correction == "on"
    with np.load(keeper._memory.path) as saved:
        assert len(saved["pool.numbers"]) == 10, "nine samples, and one that shows their form"


Forge = Callable[[np.ndarray, np.ndarray], np.ndarray]


def attacked(forge: Forge, **options: Any) -> tuple[Result, list[MetricRecord]]:
    """Eight rounds of nine nodes; the last sends what `forge` makes of model and update."""
    honest = make_app(preset=options.get("preset", "default"))

    def byzantine(message: Message, context: Context) -> Message:
        sent = {n: a.numpy() for n, a in message.content["arrays"].items()}  # type: ignore[union-attr]
        reply = honest(message, context)
        if context.node_id == 1008 and "arrays" in reply.content:
            own = {n: a.numpy() for n, a in reply.content["arrays"].items()}  # type: ignore[union-attr]
            reply.content["arrays"] = ArrayRecord(
                {n: Array(forge(sent[n], own[n] - sent[n]).astype(np.float32)) for n in own}
            )
        return reply

    strategy = KeeperStrategy(FedAvg(fraction_evaluate=0.0), **options)
    grid = InProcessGrid([make_node(number, byzantine, {}) for number in range(9)])  # type: ignore[arg-type]
    result = strategy.start(grid, ArrayRecord(net().state_dict()), num_rounds=8)  # type: ignore[arg-type]
    return result, list(result.train_metrics_clientapp.values())


def reversed_update(model: np.ndarray, update: np.ndarray) -> np.ndarray:
    return model - 10 * update


def test_a_byzantine_node_is_filtered_as_by_a_served_fleet() -> None:
    result, metrics = attacked(reversed_update)
    assert accuracy(result.arrays) > 0.8
    assert metrics[-1]["keeper-filtered"] == 1
    assert metrics[-1]["keeper-rejected"] == 0


def test_without_limits_and_robust_mean_the_same_node_ends_the_run() -> None:
    result, metrics = attacked(reversed_update, preset="paper", limits=Limits(enabled=False))
    assert accuracy(result.arrays) < 0.6
    assert metrics[-1]["keeper-filtered"] == 0


@pytest.mark.parametrize(
    ("forge", "reason"),
    [
        (lambda model, update: np.full_like(model, np.nan), "model-not-finite"),
        (lambda model, update: model + 1e6, "large-update"),
        (lambda model, update: np.zeros((3, 7)), "model-shape"),
    ],
)
@pytest.mark.parametrize("preset", ["default", "paper"])
def test_an_invalid_reply_does_not_reach_the_inner_strategy(
    forge: Forge, reason: str, preset: str, caplog: pytest.LogCaptureFixture
) -> None:
    result, metrics = attacked(forge, preset=preset)
    assert f"device 1008 rejected: {reason}: " in caplog.text
    assert accuracy(result.arrays) > 0.8
    assert {line["keeper-rejected"] for line in metrics} == {1}


def test_without_robust_mean_an_honest_fleet_is_merged_as_the_inner_strategy_would() -> None:
    def honest(model: np.ndarray, update: np.ndarray) -> np.ndarray:
        return model + update

    limited, _ = attacked(honest, preset="paper")
    unlimited, _ = attacked(honest, preset="paper", limits=Limits(enabled=False))
    for name, array in unlimited.arrays.items():
        np.testing.assert_allclose(limited.arrays[name].numpy(), array.numpy(), atol=1e-4)
