"""The paper's convolutional networks as torch modules."""

from torch import nn


def lenet(classes: int = 10) -> nn.Module:
    """Make the authors' LeNet for (n, 1, 28, 28) images; no activation between dense layers."""
    return nn.Sequential(
        nn.Conv2d(1, 6, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(256, 84), nn.Linear(84, classes),
    )  # fmt: skip


def traffic_cnn(classes: int = 20) -> nn.Module:
    """Make the CNN for (n, 3, 64) sequences: size, direction and gap of 64 packets."""
    return nn.Sequential(
        nn.Conv1d(3, 32, 3, padding=1), nn.ReLU(),
        nn.Conv1d(32, 32, 3, padding=1), nn.ReLU(), nn.MaxPool1d(2),
        nn.Conv1d(32, 64, 3, padding=1), nn.ReLU(),
        nn.Conv1d(64, 64, 3, padding=1), nn.ReLU(), nn.MaxPool1d(2),
        nn.Flatten(), nn.Linear(1024, 128), nn.ReLU(), nn.Linear(128, classes),
    )  # fmt: skip
