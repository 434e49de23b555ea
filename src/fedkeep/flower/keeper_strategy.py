"""A wrapper for any strategy of Flower's: it sends the direction down and takes the estimates out of the replies."""

import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from fedkeep.config.presets import DEFAULT, DEFAULT_POLICY, experiment_tables
from fedkeep.core.gist import GistFigures
from fedkeep.core.gradients import Estimate, GlobalEstimator, global_estimator
from fedkeep.core.types import DeviceId
from fedkeep.flower.exchange import PromptGrid
from fedkeep.flower.keeper import DIRECTION, ESTIMATE, KEEPER
from fedkeep.records import End, Evaluation, Header, Line, Recorder, Round
from fedkeep.records.measures import GIST, gist_line
from fedkeep.records.runs import versions

log = logging.getLogger("fedkeep.flower")

_TOLD = ("offered", "stored", "unsound")
"""What a keeper says of itself that adds up over a fleet."""
_GRADIENT_NORM = 1e3
"""No estimate counts that is longer."""


class KeeperStrategy(Strategy):
    """`KeeperStrategy(FedAvg(...))`: the inner strategy trains as ever, on what the devices' Keepers kept.

    The inner strategy sees its own records only: FedAvg refuses replies with a second ArrayRecord. `preset` and
    `policy` are the Keepers' and say how the estimates become g_hat: `"paper"` is Eq. 8. `records` is a
    file for `fedkeep watch` and `report`.

    >>> from flwr.serverapp.strategy import FedAvg
    >>> strategy = KeeperStrategy(FedAvg(fraction_evaluate=0.0), preset="paper")  # then strategy.start(...) as ever
    >>> KeeperStrategy(FedAvg(), preset="papr")
    Traceback (most recent call last):
    fedkeep.core.errors.ConfigError: unknown preset 'papr': did you mean 'paper'?
    """

    def __init__(
        self,
        inner: Strategy,
        preset: str = DEFAULT,
        policy: str = DEFAULT_POLICY,
        *,
        records: str | None = None,
    ) -> None:
        self._inner, self._preset = inner, preset
        self._recorder = None if records is None else Recorder(Path(records))
        said = experiment_tables(preset, policy).get("estimator", {})
        self._estimator: GlobalEstimator = global_estimator(str(said.get("name", "incremental")))
        self._accepted: dict[DeviceId, int] = {}
        self._numbers: dict[int, int] = {}
        """Nodes in the order in which they were first heard of: a record's devices."""
        self._offered: dict[int, int] = {}
        self._size: int | None = None
        """The length of an estimate: that of most of the first ones."""

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        *others: Any,
        **named: Any,
    ) -> Result:
        """Flower's own loop, over a grid that does not sleep between two looks for replies."""
        if self._recorder is not None:
            about = {"preset": self._preset, "strategy": type(self._inner).__name__}
            header = Header(
                run="keeping", method=about["strategy"], task="fleet", seed=0, config=about, config_hash="",
                versions=versions(), labels=(), devices=0, rounds=num_rounds,
            )  # fmt: skip
            self._recorder.start(header)
        result = super().start(
            cast(Grid, PromptGrid(grid)), initial_arrays, num_rounds, *others, **named
        )
        self._write(End(round=num_rounds, digest=""))
        return result

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
        listed, said, gists = list(replies), {}, []
        estimates, refused = self._estimates(listed, server_round)
        self._estimator.update(estimates)
        self._accepted.update(dict.fromkeys(estimates, server_round))
        for reply in listed:
            about = None if reply.has_error() else reply.content.pop(KEEPER, None)
            if not isinstance(about, ConfigRecord):
                continue
            counts = {
                name: value
                for name in _TOLD
                if isinstance(value := about.get(name), int) and value >= 0
            }
            if len(counts) == len(
                _TOLD
            ):  # all of the numbers that add up over a fleet, or none of them
                said[reply.metadata.src_node_id] = counts
            figures = about.get("gist")
            figures = (
                [f for f in figures if isinstance(f, float)] if isinstance(figures, list) else []
            )
            if len(figures) == len(GIST) and np.isfinite(figures).all():
                gists.append(GistFigures(*figures))
        arrays, metrics = self._inner.aggregate_train(server_round, listed)
        self._write(self._round(server_round, listed, said, refused))
        if gists:
            self._write(gist_line(server_round, gists))
        if not said:
            return arrays, metrics
        totals = {f"keeper-{name}": sum(of[name] for of in said.values()) for name in _TOLD}
        return arrays, MetricRecord(
            {**(metrics or {}), **totals, "keeper-estimates": len(estimates)}
        )

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        return self._inner.configure_evaluate(server_round, arrays, config, grid)

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        metrics = self._inner.aggregate_evaluate(server_round, replies)
        found = {
            name: value for name, value in (metrics or {}).items() if isinstance(value, int | float)
        }
        accuracy, loss = (
            next((float(v) for n, v in found.items() if word in n), None)
            for word in ("acc", "loss")
        )
        if found:
            self._write(Evaluation(round=server_round, accuracy=accuracy, loss=loss))
        return metrics

    def summary(self) -> None:
        self._inner.summary()

    def _round(
        self,
        round_: int,
        replies: list[Message],
        said: Mapping[int, Mapping[str, int]],
        refused: int,
    ) -> Round:
        nodes = [reply.metadata.src_node_id for reply in replies]
        for node in nodes:
            self._numbers.setdefault(node, len(self._numbers))
        arrivals = {node: of["offered"] for node, of in said.items()}
        fresh = sum(max(0, count - self._offered.get(node, 0)) for node, count in arrivals.items())
        self._offered |= arrivals
        return Round(
            round=round_,
            participants=tuple(sorted(self._numbers[node] for node in nodes)),
            arrivals=fresh,
            dropouts=sum(reply.has_error() for reply in replies),
            refused_reports={"estimate": refused} if refused else {},
            staleness=self._estimator.staleness(round_),
        )

    def _write(self, line: Line) -> None:
        if self._recorder is not None:
            self._recorder.write(line)

    def _estimates(self, replies: list[Message], round_: int) -> tuple[dict[int, Estimate], int]:
        """The estimates, taken out of the replies, and how many had another length than most.

        One that is not sound is dropped and its node named.
        """
        taken: dict[int, Estimate] = {}
        for reply in replies:
            node, record = (
                reply.metadata.src_node_id,
                None if reply.has_error() else reply.content.pop(ESTIMATE, None),
            )
            if not isinstance(record, ArrayRecord) or not isinstance(
                about := reply.content.get(KEEPER), ConfigRecord
            ):
                continue
            gradient = (
                record["local_gradient"].numpy() if "local_gradient" in record else np.array(np.nan)
            )
            flat = (
                gradient.ndim == 1 and gradient.dtype == np.float32 and np.isfinite(gradient).all()
            )
            short = flat and np.linalg.norm(gradient.astype(np.float64)) <= _GRADIENT_NORM
            count = about.get("samples")
            if short and isinstance(count, int) and 0 < count <= 10**9:
                taken[node] = Estimate(gradient, float(count), round_)
            else:
                log.warning("node %d: estimate refused", node)
        if self._size is None and taken:
            self._size = Counter(len(e.gradient) for e in taken.values()).most_common(1)[0][0]
        estimates = {node: e for node, e in taken.items() if len(e.gradient) == self._size}
        for node in taken.keys() - estimates.keys():
            log.warning("node %d: estimate refused: it has another length than most", node)
        return estimates, len(taken) - len(estimates)
