"""Modules that are no plain chain of layers: one whose samples vmap measures at once, and one it cannot."""

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
