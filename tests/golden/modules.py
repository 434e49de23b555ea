"""Modules for tests: two that are no plain chain, one of which vmap can take, and two dense."""

from torch import Tensor, nn


def normalised(classes: int) -> nn.Module:
    return nn.Sequential(nn.Linear(12, 10), nn.LayerNorm(10), nn.Tanh(), nn.Linear(10, classes))


class Recurrent(nn.Module):
    """A GRU, which neither vmap nor the closed forms can take."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.gru, self.last = nn.GRU(4, 6, batch_first=True), nn.Linear(6, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.gru(x)[0][:, -1])  # type: ignore[no-any-return]


def recurrent(classes: int) -> nn.Module:
    return Recurrent(classes)


def har_dnn(features: int = 900, hidden: int = 100, classes: int = 5) -> nn.Module:
    """The 900-100-5 network for (n, features) windows of motion sensors."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, classes)
    )


def logistic(features: int = 60, classes: int = 10) -> nn.Module:
    """Softmax regression for (n, features)."""
    return nn.Sequential(nn.Flatten(), nn.Linear(features, classes))
