"""Models that few people build, for the table of what a Keeper measures."""

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn


class SequenceFirst(nn.Module):
    """Attention over (time, batch, features), as torch has it by default."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.head = nn.MultiheadAttention(6, 2), nn.Linear(6, 3)
        self.inner = nn.Linear(5, 6)

    def forward(self, x: Tensor) -> Any:
        steps = self.inner(x).transpose(0, 1)
        seen, _ = self.attention(steps, steps, steps, need_weights=False)
        return self.head(seen.mean(0))


class BatchTakenForTime(nn.Module):
    """The same mistake that many make: the batch stands where time should."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.head = nn.MultiheadAttention(5, 1), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Any:
        seen, _ = self.attention(x, x, x, need_weights=False)
        return self.head(seen.mean(1))


class Cells(nn.Module):
    """A GRUCell in a loop of one's own."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(5, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Any:
        state = x.new_zeros(len(x), 6)
        for step in x.unbind(1):
            state = self.cell(step, state)
        return self.head(state)


class TwoHeads(nn.Module):
    """An encoder with two heads, of which the second predicts a number."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(5, 8), nn.Tanh())
        self.labels, self.number = nn.Linear(8, 3), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Any:
        hidden = self.encoder(x)
        return {"labels": self.labels(hidden), "number": self.number(hidden)}


def two_losses(out: dict[str, Tensor], y: Tensor) -> Tensor:
    """Add the losses of both heads, sample by sample."""
    entropy = F.cross_entropy(out["labels"], y, reduction="none")
    return entropy + 0.5 * (out["number"][:, 0] - y.float()) ** 2


class UnusedHead(TwoHeads):
    """Of the two heads the loss reads the first alone."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x)["labels"]


class Bags(nn.Module):
    """The mean of a bag of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(11, 4, mode="mean"), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.bag(x))


class SparseTokens(nn.Module):
    """An embedding whose gradients are sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 4, sparse=True), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.embed(x).mean(1))


class Fourier(nn.Module):
    """Complex weights on a spectrum."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(3, dtype=torch.cfloat))
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Any:
        return self.head(torch.fft.irfft(torch.fft.rfft(x) * self.filter, n=5))


class ClippedSlope(torch.autograd.Function):
    """The sign, with the slope of the identity: quantised weights train like that."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:  # type: ignore[override]
        ctx.save_for_backward(x)
        return x.sign()

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Any:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return slope * (x.abs() < 1)


class StraightThrough(nn.Module):
    """A hidden layer of signs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(5, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Any:
        signs: Any = ClippedSlope.apply(self.first(x))  # type: ignore[no-untyped-call]
        return self.head(signs)


class Residual(nn.Module):
    """One layer used three times."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Any:
        for _ in range(3):
            x = x + torch.tanh(self.layer(x))
        return self.head(x)


class Branching(nn.Module):
    """A branch by the data of each sample, in plain Python."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(5, 3), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Any:
        return torch.stack([self.one(row) if float(row.sum()) > 0 else self.two(row) for row in x])


class FrozenStatistics(nn.Module):
    """A BatchNorm that is kept in evaluation mode, as in fine-tuning."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.head = nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.norm.eval().requires_grad_(False)

    def train(self, mode: bool = True) -> Any:
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: Tensor) -> Any:
        return self.head(torch.relu(self.norm(self.first(x))))


class TimeDistributed(nn.Module):
    """Scores at every step, for a loss that adds them up."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Conv1d(5, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Any:
        return self.body(x.transpose(1, 2)).permute(2, 0, 1).log_softmax(-1)


def ctc(out: Tensor, y: Tensor) -> Tensor:
    """Align two labels with seven steps, for each sample by itself."""
    lengths = torch.full((len(y),), len(out)), torch.full((len(y),), 2)
    return F.ctc_loss(out, torch.stack([y + 1, (y + 1) % 3 + 1], 1), *lengths, reduction="none")


def triplet(out: Tensor, y: Tensor) -> Tensor:
    """Compare each sample with two others of the batch."""
    positive, negative = out[(y + 1) % len(out)], out[(y + 2) % len(out)]
    return F.triplet_margin_loss(out, positive, negative, reduction="none")


def weighted(out: Tensor, y: Tensor) -> Tensor:
    """Weigh each sample by what its target says: label and weight."""
    return y[:, 1] * F.cross_entropy(out, y[:, 0].long(), reduction="none")


class CentredInline(nn.Module):
    """Takes the batch's mean from each sample, between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(5, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Any:
        hidden = self.first(x)
        return self.head(hidden - hidden.mean(0))


class OwnNorm(nn.Module):
    """A batch normalisation that is none of torch's classes."""

    mean: Tensor
    variance: Tensor

    def __init__(self, features: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(features))
        self.register_buffer("mean", torch.zeros(features))
        self.register_buffer("variance", torch.ones(features))

    def forward(self, x: Tensor) -> Any:
        mean, variance = self.mean, self.variance
        if self.training:
            mean, variance = x.mean(0), x.var(0, unbiased=False)
            with torch.no_grad():
                self.mean.lerp_(mean, 0.1)
                self.variance.lerp_(variance, 0.1)
        return self.scale * (x - mean) / torch.sqrt(variance + 1e-5)


class SingleNumbers(nn.Module):
    """Parameters in lists and dictionaries, one a single number, one empty."""

    def __init__(self) -> None:
        super().__init__()
        self.listed = nn.ParameterList([torch.randn(5, 3), torch.zeros(3)])
        self.named = nn.ParameterDict({"scale": torch.tensor(1.5)})
        self.empty = nn.Parameter(torch.zeros(0))

    def forward(self, x: Tensor) -> Any:
        return self.named["scale"] * (x @ self.listed[0] + self.listed[1])


class Stacked(nn.Module):
    """Two layers of a GRU, in both directions, with dropout between them."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.GRU(5, 4, 2, batch_first=True, bidirectional=True, dropout=0.3)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Any) -> Any:
        return self.head(self.cells(x)[1][-2:].transpose(0, 1).flatten(1))


class AlwaysRandom(nn.Module):
    """Dropout that does not ask whether the module trains."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(5, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Any:
        return self.head(F.dropout(self.body(x), 0.5))


def hooked() -> nn.Module:
    """A chain of layers, one of which does more than it says."""
    module = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))
    module[0].register_forward_hook(lambda _, __, output: 2 * output)
    return module


def packed(samples: list[Tensor]) -> Any:
    """Sequences of any length, as recurrent layers take them."""
    return nn.utils.rnn.pack_sequence(samples, enforce_sorted=False)
