"""ODE written anew in plain numpy from the equations of the paper, and from nothing else.

Nothing of fedkeep is imported: what the paper leaves open (which device takes part, which sample
comes when, the first model, keys before there is a first global gradient) is given by the caller.
Equation numbers are those of To Store or Not?, WWW 2023.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Keys = Callable[[int], float]
"""A number for the n-th arrival of a device, or for a stored id, while all values are equal."""


def algorithm_1(
    velocity: Array, capacity: Sequence[int], n_label: int, n_client: int
) -> NDArray[np.int64]:
    """Give D, (C, Y): the greedy of section 3.3, with the stop of the journal's Algorithm 1."""
    devices, labels = velocity.shape
    held: list[list[int]] = [[] for _ in range(devices)]
    owners = [[c for c in range(devices) if velocity[c][y] > 0] for y in range(labels)]
    for y in sorted(range(labels), key=lambda label: len(owners[label])):
        holders = 0
        for c in sorted(owners[y], key=lambda device: -velocity[device][y]):
            if holders == n_label:
                break
            if len(held[c]) < min(n_client, capacity[c]):
                held[c].append(y)
                holders += 1
    quotas = np.zeros((devices, labels), dtype=np.int64)
    for c in range(devices):
        by_speed = sorted(held[c], key=lambda label: (-velocity[c][label], label))
        for place, y in enumerate(by_speed):
            share, rest = divmod(capacity[c], len(held[c]))
            quotas[c][y] = share + (place < rest)
    return quotas


def equation_11(velocity: Array, quotas: NDArray[np.int64]) -> Array:
    """Give gamma, (Y,); 0 for a label that nobody stores."""
    gamma = np.zeros(velocity.shape[1])
    for y in range(velocity.shape[1]):
        stored = quotas[:, y].sum() / quotas.sum()
        if stored > 0:
            gamma[y] = (velocity[:, y].sum() / velocity.sum()) / stored
    return gamma


def gradients(model: Array, x: Array, y: NDArray[np.int64], labels: int) -> Array:
    """Give the gradient of the cross entropy of softmax regression for each sample, (n, P)."""
    features = x.shape[1]
    weights, bias = model[: features * labels].reshape(labels, features), model[features * labels :]
    logits = x @ weights.T + bias
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    errors = powers / powers.sum(axis=1, keepdims=True)
    errors[np.arange(len(y)), y] -= 1
    by_weights = np.einsum("nl,nf->nlf", errors, x).reshape(len(y), -1)
    return np.concatenate([by_weights, errors], axis=1)


@dataclass
class Slot:
    """A stored sample with its value."""

    id: int
    x: Array
    y: int
    value: float
    came: int


@dataclass
class Client:
    """A device: one priority queue a label, and its estimator."""

    model: Array
    quotas: NDArray[np.int64]
    labels: int
    direction: Array | None = None
    stored: list[Slot] = field(default_factory=list)
    local: Array = field(default_factory=lambda: np.zeros(0))
    n: int = 0
    arrivals: int = 0

    def arrive(self, id_: int, x: Array, y: int, key: Keys) -> None:
        """Equations 6 and 7 for one arrival, and the queue of its label."""
        (gradient,) = gradients(self.model, x[None], np.array([y]), self.labels)
        self.n += 1
        self.local = (
            gradient if self.n == 1 else (self.n - 1) / self.n * self.local + gradient / self.n
        )
        value = key(self.arrivals) if self.direction is None else float(gradient @ self.direction)
        slot = Slot(id_, x, y, value, self.arrivals)
        self.arrivals += 1
        same = [s for s in self.stored if s.id == id_]
        if same:  # the same sample again has a new value and no second place
            self.stored.remove(same[0])
            self.stored.append(slot)
            return
        queue = [s for s in self.stored if s.y == y]
        if len(queue) < self.quotas[y]:
            self.stored.append(slot)
        elif queue:
            lowest = min(queue, key=lambda s: (s.value, s.came))
            if value >= lowest.value:
                self.stored.remove(lowest)
                self.stored.append(slot)

    def receive(self, model: Array, direction: Array | None, key: Keys) -> None:
        """Take the model of the round and g_hat of the round before.

        Value what is stored by them.
        """
        self.model, self.direction = model, direction
        self.local, self.n = np.zeros(0), 0
        for slot in self.stored:
            (gradient,) = gradients(model, slot.x[None], np.array([slot.y]), self.labels)
            slot.value = key(slot.id) if direction is None else float(gradient @ direction)

    def train(self, gamma: Array, rate: float, epochs: int) -> tuple[Array, float]:
        """Equation 12: the trained model, and zeta_c."""
        model = self.model.copy()
        if not self.stored:
            return model, 0.0
        x, y = np.stack([s.x for s in self.stored]), np.array([s.y for s in self.stored])
        zeta = float(gamma[y].sum())
        for _ in range(epochs):
            model = model - rate / zeta * gamma[y] @ gradients(model, x, y, self.labels)
        return model, zeta


@dataclass
class Ode:
    """The fleet: the server of the paper and its clients."""

    velocity: Array
    capacity: Sequence[int]
    model: Array
    n_label: int
    n_client: int
    rate: float
    epochs: int

    def __post_init__(self) -> None:
        devices, labels = self.velocity.shape
        self.quotas = algorithm_1(self.velocity, self.capacity, self.n_label, self.n_client)
        self.gamma = equation_11(self.velocity, self.quotas)
        self.zeta = self.velocity.sum(axis=1) / self.velocity.sum()
        self.clients = [Client(self.model, self.quotas[c], labels) for c in range(devices)]
        self.last = [np.zeros(len(self.model)) for _ in range(devices)]
        self.direction: Array | None = None
        self.round = 0

    def play(
        self, participants: Sequence[int], arrivals: Callable[[int], Any], fresh: Any, again: Any
    ) -> None:
        """One round: arrivals of the participants since they last took part, training, merging.

        `arrivals(c)` gives the samples (id, x, y) of a device since it was last asked for them;
        `fresh(c)` and `again(c, round)` give its keys for arrivals and for stored ids.
        """
        rate = self.rate * 0.95 ** (self.round // 100)
        before, direction = self.model, self.direction
        trained: dict[int, tuple[Array, float]] = {}
        uploaded: dict[int, Array] = {}
        for c in participants:
            client = self.clients[c]
            for id_, x, y in arrivals(c):
                client.arrive(id_, x, y, fresh(c))
            if client.n:
                uploaded[c] = client.local
            stored = list(client.stored)
            client.receive(before, direction, again(c, self.round))
            assert stored == client.stored
            trained[c] = client.train(self.gamma, rate, self.epochs)
        total = sum(zeta for _, zeta in trained.values())
        if total > 0:  # Eq. 2 with the weights of Eq. 12
            self.model = np.asarray(sum(zeta / total * model for model, zeta in trained.values()))
        for c, estimate in uploaded.items():  # Eq. 8, as printed
            step = self.zeta[c] * (estimate - self.last[c])
            self.direction = step if self.direction is None else self.direction + step
            self.last[c] = estimate
        self.round += 1
