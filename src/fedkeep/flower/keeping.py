"""A wrapper for any strategy of Flower's: it sends the direction down and takes the estimates out of the replies."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from fedkeep.core.estimators import Estimate, GlobalEstimator, global_estimator
from fedkeep.core.types import DeviceId, Vector
from fedkeep.flower.keeper import DIRECTION, ESTIMATE, KEEPER
from fedkeep.flower.prompt_grid import PromptGrid
from fedkeep.presets import DEFAULT, experiment_tables

log = logging.getLogger("fedkeep.flower")


class Keeping(Strategy):
    """`Keeping(FedAvg(...))`: the inner strategy trains as ever, on what the devices' Keepers kept.

    The inner strategy sees its own records only: FedAvg refuses replies with a second ArrayRecord. `preset` says how
    the estimates become g_hat, as everywhere: `"paper"` is Eq. 8.
    """

    def __init__(self, inner: Strategy, preset: str = DEFAULT, gradient_norm: float = 1e3) -> None:
        self._inner = inner
        self._estimator: GlobalEstimator = global_estimator(_estimator_name(preset))
        self._gradient_norm = gradient_norm
        self._accepted: dict[DeviceId, int] = {}
        self._size: int | None = None
        """The length of an estimate: that of most of the first ones."""

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Flower's own loop, over a grid that does not sleep between two looks for replies."""
        return super().start(
            PromptGrid(grid), initial_arrays, num_rounds, timeout, train_config, evaluate_config, evaluate_fn
        )

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The inner strategy's messages, with g_hat beside the model."""
        messages = list(self._inner.configure_train(server_round, arrays, config, grid))
        direction = self._estimator.direction()
        beside = None if direction is None else ArrayRecord({"direction": Array(direction)})
        for message in messages:
            accepted = self._accepted.get(message.metadata.dst_node_id, -1)
            message.content[KEEPER] = ConfigRecord({"round": server_round, "accepted": accepted})
            if beside is not None:
                message.content[DIRECTION] = beside
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Merges the estimates, then lets the inner strategy aggregate what is its own."""
        listed = list(replies)
        taken = {r.metadata.src_node_id: e for r in listed if (e := self._taken(r, server_round)) is not None}
        if self._size is None and taken:
            self._size = Counter(len(e.gradient) for e in taken.values()).most_common(1)[0][0]
        estimates = {node: e for node, e in taken.items() if self._fits(node, e)}
        self._estimator.update(estimates)
        self._accepted.update(dict.fromkeys(estimates, server_round))
        return self._inner.aggregate_train(server_round, listed)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        return self._inner.configure_evaluate(server_round, arrays, config, grid)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        return self._inner.aggregate_evaluate(server_round, replies)

    def summary(self) -> None:
        """Logs the inner strategy's settings."""
        self._inner.summary()

    def _taken(self, reply: Message, round_: int) -> Estimate | None:
        """The estimate in a reply, taken out of it; one that is not sound is dropped and its node named."""
        if reply.has_error():
            return None
        record = reply.content.pop(ESTIMATE, None)
        about = reply.content.pop(KEEPER, None)
        if not isinstance(record, ArrayRecord) or not isinstance(about, ConfigRecord):
            return None
        count, gradient = about.get("samples"), record["local_gradient"].numpy() if "local_gradient" in record else None
        if gradient is None or not self._is_sound(gradient) or not isinstance(count, int) or not 0 < count <= 10**9:
            log.warning("node %d: estimate refused", reply.metadata.src_node_id)
            return None
        return Estimate(gradient, float(count), round_)

    def _fits(self, node: DeviceId, estimate: Estimate) -> bool:
        if len(estimate.gradient) != self._size:
            log.warning("node %d: estimate refused: %d numbers, not %s", node, len(estimate.gradient), self._size)
        return len(estimate.gradient) == self._size

    def _is_sound(self, gradient: Vector) -> bool:
        if gradient.ndim != 1 or gradient.dtype != np.float32 or not np.isfinite(gradient).all():
            return False
        return float(np.linalg.norm(gradient.astype(np.float64))) <= self._gradient_norm


def _estimator_name(preset: str) -> str:
    return str(experiment_tables(preset, "ode").get("estimator", {}).get("name", "incremental"))
