"""Forty models, inputs and losses in a Keeper: measured as autograd does, or refused in a sentence.

docs/flower.md has the same table; `test_the_table_of_the_docs_is_this_one` compares them.
"""

import copy
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from flwr.app import ArrayRecord, Context, RecordDict
from torch import Tensor, nn

from fedkeep.core.errors import FedkeepError
from fedkeep.flower import Keeper
from tests.flower import unusual_models as unusual

PAGE = Path(__file__).parents[2] / "docs" / "flower.md"


def new_context(node: int = 1) -> Context:
    return Context(run_id=1, node_id=node, node_config={}, state=RecordDict(), run_config={})


class OwnBuffer(nn.Module):
    """A scale that is learnt elsewhere and travels in the state dict."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.rand(5) + 0.5)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Any:
        return self.head(x * self.scale)


class Adapted(nn.Module):
    """A frozen layer with a trainable one of low rank beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(5, 6).requires_grad_(False)
        self.down, self.up = nn.Linear(5, 2, bias=False), nn.Linear(2, 6, bias=False)
        self.head = nn.Linear(6, 3).requires_grad_(False)

    def forward(self, x: Tensor) -> Any:
        return self.head(torch.relu(self.base(x) + self.up(self.down(x))))


class Tied(nn.Module):
    """A decoder whose weight is the encoder's."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 4)
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Any:
        return self.head(torch.tanh(self.body(self.embed(x).mean(1))))


class Transformer(nn.Module):
    """An encoder of tokens that leaves out the padding, token 0."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Any:
        mask = x == 0
        seen = self.layer(self.embed(x), src_key_padding_mask=mask)
        kept = (~mask).float()[..., None]
        return self.head((seen * kept).sum(1) / kept.sum(1))


class Recurrent(nn.Module):
    """The last state of an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTM(5, 6, batch_first=True), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.cell(x)[0][:, -1])


class ByKeyword(nn.Module):
    """Two named inputs, and outputs by name."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body = nn.Embedding(11, 4), nn.Linear(5, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, tokens: Tensor, sensor: Tensor) -> Any:
        joined = self.embed(tokens).mean(1) + self.body(sensor)
        return {"logits": self.head(torch.relu(joined)), "features": joined}


class WholeDict(ByKeyword):
    """The same for a single argument that holds all."""

    def forward(self, batch: dict[str, Tensor]) -> Any:  # type: ignore[override]
        return super().forward(batch["tokens"], batch["sensor"])["logits"]


class Pair(nn.Module):
    """Two inputs in order; scores and features."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(5, 3), nn.Linear(5, 3)

    def forward(self, a: Tensor, b: Tensor) -> Any:
        return self.one(a) + self.two(b), a


class OfBytes(nn.Module):
    """Images of bytes, scaled by the module itself."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(1, 3, 3), nn.Linear(3 * 16, 3)

    def forward(self, x: Tensor) -> Any:
        return self.head(torch.relu(self.conv(x.float() / 255)).flatten(1))


class Centred(nn.Module):
    """Takes the batch's mean from each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(5, 4), nn.Linear(4, 3)
        self.centre = Centre()

    def forward(self, x: Tensor) -> Any:
        return self.head(self.centre(self.first(x)))


class Centre(nn.Module):
    """The layer that does it."""

    def forward(self, x: Tensor) -> Any:
        return x - x.mean(0)


def frozen_middle() -> nn.Module:
    module = nn.Sequential(*(nn.Linear(5, 5) for _ in range(3)), nn.Linear(5, 3))
    module[2].requires_grad_(False)
    return module


def backbone() -> nn.Module:
    module = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))
    module[0].requires_grad_(False)
    return module


def dense(*middle: nn.Module, outputs: int = 3) -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), *middle, nn.ReLU(), nn.Linear(8, outputs))


def images(*middle: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3), *middle, nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))


def spectral(normalise: Callable[[nn.Module], nn.Module]) -> nn.Module:
    return nn.Sequential(normalise(nn.Linear(5, 8)), nn.ReLU(), nn.Linear(8, 3))


def old(normalise: Callable[[nn.Module], nn.Module]) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return spectral(normalise)


def focal(out: Tensor, y: Tensor) -> Tensor:
    loss = F.cross_entropy(out, y, reduction="none")
    return (1 - torch.exp(-loss)) ** 2 * loss


def scripted() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        module: nn.Module = torch.jit.script(dense())
    return module


def one_logit(out: Tensor, y: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(out[:, 0], y.float(), reduction="none")


def padded(samples: list[Tensor]) -> Tensor:
    return nn.utils.rnn.pad_sequence(samples, batch_first=True)


RNG = np.random.default_rng(0)
N = 12
FLOATS = RNG.normal(size=(N, 5)).astype(np.float32)
SERIES = RNG.normal(size=(N, 7, 5)).astype(np.float32)
IMAGES = RNG.normal(size=(N, 1, 6, 6)).astype(np.float32)
BYTES = RNG.integers(0, 256, size=(N, 1, 6, 6)).astype(np.uint8)
TOKENS = RNG.integers(1, 11, size=(N, 6))
PADDED = np.where(np.arange(6) < RNG.integers(2, 7, size=(N, 1)), TOKENS, 0)
VARIED = [torch.tensor(row[row > 0]) for row in PADDED]
CUT = [torch.tensor(row[: 2 + place % 5]) for place, row in enumerate(SERIES)]
LABELS = np.arange(N) % 3
VOLUMES = RNG.normal(size=(N, 1, 4, 4, 4)).astype(np.float32)
WEIGHTED = np.stack([LABELS, 1 + LABELS / 2], axis=1).astype(np.float32)
BOTH = {"tokens": TOKENS, "sensor": FLOATS}
REGRESSION = RNG.normal(size=(N, 1)).astype(np.float32)
MANY = (RNG.random((N, 3)) < 0.5).astype(np.float32)
WEIGHTS = torch.tensor([1.0, 5.0, 0.2])
CE = partial(F.cross_entropy, reduction="none")


@dataclass(frozen=True)
class Case:
    """A row of the table; `refused` is part of the sentence, None where it is right."""

    name: str
    make: Any
    x: Any = None
    y: Any = None
    refused: str | None = None
    options: dict[str, Any] | None = None
    loss: str = "cross-entropy"


CASES = (
    Case("linear", lambda: nn.Linear(5, 3)),
    Case("dense layers", dense),
    Case("a class", OwnBuffer),
    Case("an instance", dense()),
    Case("convolutions", images, IMAGES),
    Case("depthwise convolution", lambda: images(nn.Conv2d(4, 4, 1, groups=4)), IMAGES),
    Case("LayerNorm", lambda: dense(nn.LayerNorm(8))),
    Case("GroupNorm", lambda: images(nn.GroupNorm(2, 4)), IMAGES),
    Case(
        "InstanceNorm with statistics",
        lambda: images(nn.InstanceNorm2d(4, affine=True, track_running_stats=True)),
        IMAGES,
    ),
    Case("BatchNorm (no corrections while it trains)", lambda: dense(nn.BatchNorm1d(8))),
    Case(
        "BatchNorm without statistics",
        lambda: dense(nn.BatchNorm1d(8, track_running_stats=False)),
        refused="layer '1' (BatchNorm1d) mixes the samples",
    ),
    Case(
        "the batch's mean taken away",
        Centred,
        refused="layer 'centre' mixes the samples of a batch",
    ),
    Case("dropout", lambda: dense(nn.Dropout(0.5))),
    Case("LSTM", Recurrent, SERIES),
    Case(
        "tokens, Embedding",
        lambda: nn.Sequential(nn.Embedding(11, 4), nn.Flatten(), nn.Linear(24, 3)),
        TOKENS,
    ),
    Case("transformer with padding mask", Transformer, PADDED),
    Case("tied weights", Tied, TOKENS, TOKENS[:, 0]),
    Case("frozen backbone", backbone),
    Case("frozen middle layer, `last_layers=2`", frozen_middle, options={"last_layers": 2}),
    Case("low-rank adapters (LoRA)", Adapted),
    Case("own buffers", OwnBuffer),
    Case(
        "spectral norm (parametrization)", lambda: spectral(nn.utils.parametrizations.spectral_norm)
    ),
    Case("weight norm (parametrization)", lambda: spectral(nn.utils.parametrizations.weight_norm)),
    Case("LazyLinear", lambda: nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.LazyLinear(3))),
    Case("images of bytes", OfBytes, BYTES),
    Case("images of bytes, a model of floats", images, BYTES),
    Case(
        "dictionary by keyword, `output=`",
        ByKeyword,
        BOTH,
        options={"output": lambda out: out["logits"]},
    ),
    Case("dictionary as one argument", WholeDict, BOTH),
    Case(
        "tuple in and out, `output=`",
        Pair,
        (FLOATS, FLOATS[::-1].copy()),
        options={"output": lambda out: out[0]},
    ),
    Case(
        "tuple out without `output=`",
        Pair,
        (FLOATS, FLOATS[::-1].copy()),
        refused="output=lambda out: out[0]",
    ),
    Case("sequences of any length, `collate=`", Transformer, VARIED, options={"collate": padded}),
    Case(
        "class weights",
        dense,
        options={"loss": partial(CE, weight=WEIGHTS)},
        loss="cross-entropy, weighted",
    ),
    Case(
        "label smoothing",
        dense,
        options={"loss": nn.CrossEntropyLoss(label_smoothing=0.2, reduction="none")},
        loss="cross-entropy, smoothed",
    ),
    Case("focal loss", dense, options={"loss": focal}, loss="focal"),
    Case(
        "cross-entropy times 0.1",
        dense,
        options={"loss": lambda out, y: 0.1 * CE(out, y)},
        loss="cross-entropy x 0.1",
    ),
    Case(
        "one logit",
        lambda: dense(outputs=1),
        y=LABELS % 2,
        options={"loss": one_logit, "labels": 2},
        loss="binary cross-entropy",
    ),
    Case(
        "one logit without `loss=`",
        lambda: dense(outputs=1),
        y=LABELS % 2,
        refused="give the loss you train with",
    ),
    Case(
        "several labels",
        dense,
        y=MANY,
        options={"loss": nn.BCEWithLogitsLoss(reduction="none")},
        loss="binary cross-entropy of each",
    ),
    Case(
        "regression",
        lambda: dense(outputs=1),
        y=REGRESSION,
        options={"loss": nn.MSELoss(reduction="none")},
        loss="squared error",
    ),
    Case(
        "regression without `loss=`",
        lambda: dense(outputs=1),
        y=REGRESSION[:, 0],
        refused="for regression give the loss=",
    ),
    Case(
        "a loss that is a mean",
        dense,
        options={"loss": nn.CrossEntropyLoss()},
        refused="make it with reduction='none'",
    ),
    Case(
        "all layers frozen",
        lambda: dense().requires_grad_(False),
        refused="the model has no parameters to train",
    ),
    Case("a class that wants arguments", nn.Linear, refused="cannot be made without arguments"),
    Case("`torch.compile`", lambda: torch.compile(dense(), backend="eager")),
    Case("`nn.DataParallel`", lambda: nn.DataParallel(dense())),
    Case(
        "`torch.jit.script`",
        scripted,
        refused="a module of torch.jit cannot be measured sample by sample",
    ),
    Case("attention with time first", unusual.SequenceFirst, SERIES),
    Case(
        "attention that takes the batch for time",
        unusual.BatchTakenForTime,
        SERIES,
        refused="layer 'attention' mixes the samples of a batch",
    ),
    Case(
        "the batch's mean taken away in `forward`",
        unusual.CentredInline,
        refused="what the model does before layer 'head' mixes the samples of a batch",
    ),
    Case("GRUCell in a loop", unusual.Cells, SERIES),
    Case(
        "encoder with two heads",
        unusual.TwoHeads,
        options={"loss": unusual.two_losses, "labels": 3},
        loss="cross-entropy and squared error",
    ),
    Case("a head that the loss leaves out", unusual.UnusedHead),
    Case("EmbeddingBag", unusual.Bags, TOKENS),
    Case(
        "Embedding with sparse gradients",
        unusual.SparseTokens,
        TOKENS,
        refused="layer 'embed' makes sparse gradients",
    ),
    Case("complex weights", unusual.Fourier, refused="parameter 'filter' is of complex64"),
    Case("bfloat16", lambda: dense().bfloat16(), refused="parameter '0.weight' is of bfloat16"),
    Case("an autograd.Function of one's own", unusual.StraightThrough),
    Case("one layer used three times", unusual.Residual),
    Case("a branch by each sample's data", unusual.Branching),
    Case("frozen BatchNorm, kept in evaluation mode", unusual.FrozenStatistics),
    Case(
        "Conv1d, PReLU",
        lambda: nn.Sequential(nn.Conv1d(7, 4, 3), nn.PReLU(), nn.Flatten(), nn.Linear(12, 3)),
        SERIES,
    ),
    Case(
        "Conv3d",
        lambda: nn.Sequential(nn.Conv3d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(24, 3)),
        VOLUMES,
    ),
    Case(
        "ConvTranspose2d, average pooling",
        lambda: nn.Sequential(
            nn.ConvTranspose2d(1, 3, 3, stride=2),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(12, 3),
        ),
        IMAGES,
    ),
    Case(
        "dilated, circular Conv2d, max pooling",
        lambda: nn.Sequential(
            nn.Conv2d(1, 4, 3, dilation=2, padding=2, padding_mode="circular"),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(36, 3),
        ),
        IMAGES,
    ),
    Case("InstanceNorm", lambda: images(nn.InstanceNorm2d(4)), IMAGES),
    Case(
        "RMSNorm, GLU",
        lambda: nn.Sequential(nn.Linear(5, 8), nn.GLU(), nn.RMSNorm(4), nn.Linear(4, 3)),
    ),
    Case(
        "CTC",
        unusual.TimeDistributed,
        SERIES,
        options={"loss": unusual.ctc, "labels": 3},
        loss="CTC of each sample",
    ),
    Case(
        "triplets of a batch",
        dense,
        options={"loss": unusual.triplet},
        loss="triplet margin",
        refused="the loss compares the samples of a batch with each other",
    ),
    Case(
        "label smoothing with `ignore_index`",
        dense,
        options={
            "loss": nn.CrossEntropyLoss(label_smoothing=0.1, ignore_index=2, reduction="none")
        },
        loss="cross-entropy, smoothed",
    ),
    Case(
        "log-probabilities",
        lambda: nn.Sequential(dense(), nn.LogSoftmax(1)),
        options={"loss": nn.NLLLoss(reduction="none")},
        loss="negative log-likelihood",
    ),
    Case(
        "several numbers a target, and `labels=`",
        dense,
        y=WEIGHTED,
        options={"loss": unusual.weighted, "labels": 3},
        loss="cross-entropy, weighted by sample",
        refused="leave labels= out",
    ),
    Case(
        "sample weights in the target",
        dense,
        y=WEIGHTED,
        options={"loss": unusual.weighted},
        loss="cross-entropy, weighted by sample",
    ),
    Case(
        "a batch norm of one's own (no corrections while it trains)",
        lambda: dense(unusual.OwnNorm(8)),
    ),
    Case("weight norm (hook)", lambda: old(nn.utils.weight_norm)),
    Case("spectral norm (hook)", lambda: old(nn.utils.spectral_norm)),
    Case("a hook that changes what a layer gives", unusual.hooked),
    Case("parameters in lists, of one number, of none", unusual.SingleNumbers),
    Case("GRU of two layers in both directions, dropout", unusual.Stacked, SERIES),
    Case("packed sequences, `collate=`", unusual.Stacked, CUT, options={"collate": unusual.packed}),
    Case(
        "dropout that does not ask `self.training`",
        unusual.AlwaysRandom,
        refused="draws random numbers in evaluation mode, too",
    ),
    Case(
        "complex samples",
        lambda: nn.Linear(5, 3),
        FLOATS.astype(np.complex64),
        refused="these are complex; offer real and imaginary parts as two channels",
    ),
)


def data_of(case: Case) -> tuple[Any, Any]:
    return FLOATS if case.x is None else case.x, LABELS if case.y is None else case.y


def whole(case: Case, places: range) -> tuple[Any, Tensor]:
    """The samples as the user's own loop would give them to the module."""
    x, y = data_of(case)
    if isinstance(x, dict):
        given: Any = {name: torch.tensor(part[list(places)]) for name, part in x.items()}
    elif isinstance(x, tuple):
        given = tuple(torch.tensor(part[list(places)]) for part in x)
    elif isinstance(x, list):
        given = (case.options or {})["collate"]([x[place] for place in places])
    else:
        given = torch.tensor(x[list(places)])
        if case.name == "images of bytes, a model of floats":
            given = given.float()
    return given, torch.tensor(y[list(places)])


def by_hand(case: Case, module: nn.Module, place: int) -> np.ndarray:
    """The gradient of one sample by plain autograd of the user's loss."""
    options = case.options or {}
    x, y = whole(case, range(place, place + 1))
    module.zero_grad()
    if isinstance(x, dict) and not isinstance(module, WholeDict):
        out = module(**x)
    else:
        out = module(*x) if type(x) is tuple else module(x)
    out = options.get("output", lambda o: o)(out)
    torch.autograd.backward(options.get("loss", CE)(out, y).mean())
    grads = [(p, p.grad) for p in module.parameters() if p.requires_grad]
    parts = [torch.zeros_like(p) if g is None else g.to_dense() for p, g in grads]
    return torch.cat([part.ravel() for part in parts]).numpy().copy()


def participate(case: Case) -> None:
    x, y = data_of(case)
    with Keeper.open(new_context(), case.make, N, **case.options or {}) as keeper:
        keeper.offer(x, y)
        keeper.sync(ArrayRecord(case.make().state_dict()))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_model_is_measured_as_by_autograd_or_refused(case: Case) -> None:
    x, y = data_of(case)
    torch.manual_seed(3)
    if case.refused is not None:
        with pytest.raises(FedkeepError, match=re.escape(case.refused)):
            participate(case)
        return
    sent = case.make if isinstance(case.make, nn.Module) else case.make()
    if case.name == "LazyLinear":
        sent(torch.zeros(1, 5))
    # A forward pass in training mode moves the buffers that spectral norm and BatchNorm keep.
    given, _ = whole(case, range(N))
    with torch.no_grad():
        if isinstance(given, dict) and not isinstance(sent, WholeDict):
            sent(**given)
        else:
            sent(*given) if type(given) is tuple else sent(given)
    before = torch.get_rng_state()
    with Keeper.open(new_context(), case.make, N, **case.options or {}) as keeper:
        keeper.offer(x, y)
        assert keeper.status().stored == N, keeper.status()
        keeper.sync(ArrayRecord(sent.state_dict()))
        batch = keeper._stream.device.store.stored().batch  # type: ignore[union-attr]
        model = keeper._stream.model.vector(  # type: ignore[union-attr]
            {name: part.numpy() for name, part in ArrayRecord(sent.state_dict()).items()}
        )
        seen = keeper._stream.model.learner.probe(model).measure(batch)  # type: ignore[union-attr]
    assert torch.equal(torch.get_rng_state(), before), "torch's random numbers go on as they were"
    size = keeper._stream.model.learner.gradient_size  # type: ignore[union-attr]
    # InstanceNorm layers normalise by each image while they train, and are measured as they train.
    sent.train(case.name.startswith("InstanceNorm"))
    right = np.stack([by_hand(case, sent, place)[-size:] for place in range(N)])
    scale = float(np.abs(right).max())
    np.testing.assert_allclose(seen.mean_gradient(), right.mean(0), atol=1e-4 * scale)
    np.testing.assert_allclose(seen.norms(), np.linalg.norm(right, axis=1), rtol=1e-3, atol=1e-6)
    toward = np.random.default_rng(1).normal(size=size).astype(np.float32)
    margin = 1e-3 * float(np.abs(right @ toward).max())
    np.testing.assert_allclose(seen.projections(toward), right @ toward, atol=margin)


def table() -> str:
    """The rows of docs/flower.md."""
    rows = ["| model, input | loss | |", "|---|---|---|"]
    for case in CASES:
        outcome = "right" if case.refused is None else f'refused: "... {case.refused} ..."'
        rows.append(f"| {case.name} | {case.loss} | {outcome} |")
    return "\n".join(rows) + "\n"


def test_the_table_of_the_docs_is_this_one() -> None:
    assert table() in PAGE.read_text()


def loop(net: nn.Module, optimizer: Any, samples: list[Any], case: Case) -> list[float]:
    """Thirty steps of a user's own loop over all samples at once: the loss before each."""
    options, losses = case.options or {}, []
    xs, ys = zip(*samples, strict=True)
    if isinstance(xs[0], dict):
        x: Any = {name: torch.tensor(np.stack([of[name] for of in xs])) for name in xs[0]}
    elif isinstance(xs[0], tuple):
        x = tuple(torch.tensor(np.stack(part)) for part in zip(*xs, strict=True))
    elif "collate" in options:
        x = options["collate"]([torch.tensor(part) for part in xs])
    else:
        x = torch.tensor(np.stack(xs))
    y = torch.tensor(np.stack(ys))
    for _ in range(30):
        optimizer.zero_grad()
        if isinstance(x, dict) and not isinstance(net, WholeDict):
            out = net(**x)
        else:
            out = net(*x) if type(x) is tuple else net(x)
        out = options.get("output", lambda o: o)(out)
        loss = options.get("loss", CE)(out, y).mean()
        torch.autograd.backward(loss)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    "adam": lambda p: torch.optim.AdamW(p, lr=0.01),
}
TRAINED = [
    case
    for case in CASES
    # Numbers up to 255 diverge at these rates, whatever the gradients are corrected by.
    if case.refused is None and case.name != "images of bytes, a model of floats"
]


def part_of(data: Any, places: slice) -> Any:
    if isinstance(data, dict):
        return {name: part[places] for name, part in data.items()}
    return tuple(part[places] for part in data) if isinstance(data, tuple) else data[places]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("case", TRAINED, ids=lambda c: c.name)
def test_a_loop_with_corrections_still_learns_what_is_stored(case: Case, optimizer: str) -> None:
    torch.manual_seed(5)
    if case.name == "LazyLinear":
        net: nn.Module = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))
    else:
        net = copy.deepcopy(case.make) if isinstance(case.make, nn.Module) else case.make()
    x, y = data_of(case)
    context = new_context()
    for places in (slice(0, 8), slice(8, N)):
        with Keeper.open(context, case.make, 6, **case.options or {}) as keeper:
            keeper.offer(part_of(x, places), y[places])
            keeper.sync(ArrayRecord(net.state_dict()))
    stepping = OPTIMIZERS[optimizer]([p for p in net.parameters() if p.requires_grad])  # type: ignore[no-untyped-call]
    keeper.correct(net, stepping)
    losses = loop(net.train(), stepping, keeper.samples(), case)
    keeper.records()
    status = keeper.status().correction
    if "no corrections while it trains" in case.name:
        assert "mixes the samples of a batch" in status
    else:
        assert status == "on", status
    if "dropout" not in case.name:
        assert losses[-1] < losses[0]
