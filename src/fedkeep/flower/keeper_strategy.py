"""A wrapper for any strategy of Flower's that sends g_hat and takes in local gradients.

Before the inner strategy merges the replies, they pass the same stages as the reports of a served
fleet (`core.aggregation.pipeline`), with the same limits.
"""

import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from fedkeep.config.presets import DEFAULT, DEFAULT_POLICY, experiment_tables
from fedkeep.core.aggregation import AGGREGATORS, Aggregator
from fedkeep.core.aggregation.pipeline import UpdatePipeline
from fedkeep.core.errors import RejectedError, RejectionReason
from fedkeep.core.estimators import Estimate, GlobalEstimator, global_estimator
from fedkeep.core.rounds import Rejection
from fedkeep.core.screening import Limits, screen_gradient
from fedkeep.core.types import DeviceId, Report, Vector
from fedkeep.flower.exchange import PromptGrid
from fedkeep.flower.keeper import DIRECTION, ESTIMATE, KEEPER
from fedkeep.flower.reply_updates import ModelLayout, updates_in
from fedkeep.flower.rounds import Rejections
from fedkeep.records import End, Evaluation, Header, Line, Recorder, Round
from fedkeep.records.measures import GIST, gist_line
from fedkeep.records.runs import versions

log = logging.getLogger("fedkeep.flower")

_SUMMED = ("offered", "stored", "unsound")
"""What a Keeper reports of itself that adds up over a fleet."""
_MAX_SAMPLES = 10**9
"""No local gradient is the mean of more arrivals."""


class KeeperStrategy(Strategy):
    """Any strategy of Flower's, on what the devices' Keepers kept, guarded like a served fleet.

    Replies are validated, clipped, filtered and reweighted; then the inner strategy merges them,
    and sees its own records only. A reply that is invalid, or far longer than usual, does not reach
    it. Running statistics of layers are checked for their form alone.

    Parameters
    ----------
    inner : Strategy
        Any strategy of Flower's, such as `FedAvg`.
    preset, policy : str
        The Keepers'. They say how local gradients become g_hat (`"paper"` is Eq. 8), and which
        stages the replies pass: all of the robust mean by default, the limits alone with `"paper"`.
    records : str, optional
        A file for `fedkeep watch` and `report`.
    aggregation : Aggregator, optional
        Whose stages the replies pass, instead of the preset's; the inner strategy does the merging.
    limits : Limits
        How far replies may stray; `Limits(enabled=False)` leaves every valid reply as it is.

    Raises
    ------
    ConfigError
        If there is no such preset, or the aggregation does not run with these limits.

    Examples
    --------
    >>> from flwr.serverapp.strategy import FedAvg
    >>> strategy = KeeperStrategy(FedAvg(fraction_evaluate=0.0), preset="paper")
    >>> # then strategy.start(...) as ever
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
        aggregation: Aggregator | None = None,
        limits: Limits = Limits(),
    ) -> None:
        self._inner, self._preset = inner, preset
        self._recorder = None if records is None else Recorder(Path(records))
        tables = experiment_tables(preset, policy)
        if aggregation is None:
            aggregation = AGGREGATORS[tables.get("aggregation", {}).get("name", "fedavg")]()
        estimator = str(tables.get("estimator", {}).get("name", "incremental"))
        self._limits = limits
        self._pipeline = UpdatePipeline(aggregation, limits)
        self._estimator: GlobalEstimator = global_estimator(estimator)
        self._layout = ModelLayout(ArrayRecord())
        self._model: Vector = np.empty(0, dtype=np.float32)
        """The parameters that the present round began with, in the layout's order."""
        self._accepted: dict[DeviceId, int] = {}
        self._samples: dict[DeviceId, float] = {}
        """The arrivals behind each node's latest local gradient."""
        self._numbers: dict[int, int] = {}
        """Nodes in the order in which they were first heard of: a record's devices."""
        self._offered: dict[int, int] = {}
        self._size: int | None = None
        """The length of a local gradient: that of most of the first ones."""

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        *others: Any,
        **named: Any,
    ) -> Result:
        """Run Flower's own loop, over a grid that returns as soon as the last reply is there."""
        if self._recorder is not None:
            about = {"preset": self._preset, "strategy": type(self._inner).__name__}
            header = Header(
                run="keeping", method=about["strategy"], task="fleet", seed=0, config=about,
                config_hash="",
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
        """Return the inner strategy's messages, with g_hat beside the model."""
        self._layout = ModelLayout(arrays)
        self._model = self._layout.flatten(arrays)
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
        """Screen the replies and merge the local gradients; the inner strategy merges the rest."""
        listed, rejections = list(replies), Rejections()
        gradients = self._take_gradients(listed, server_round, rejections)
        reports, gists = self._take_reports(listed)
        counted, estimates, filtered = self._screen(listed, gradients, server_round, rejections)
        self._estimator.update(estimates)
        self._accepted.update(dict.fromkeys(gradients, server_round))
        arrays, metrics = self._inner.aggregate_train(server_round, counted)

        rejected = rejections.take()
        self._write(self._round(server_round, listed, reports, rejected))
        if gists:
            self._write(gist_line(server_round, gists))
        if not reports:
            return arrays, metrics
        totals = {f"keeper-{name}": sum(of[name] for of in reports.values()) for name in _SUMMED}
        totals |= {
            "keeper-estimates": len(estimates),
            "keeper-rejected": len({r.device for r in rejected if not _is_cut(r)}),
            "keeper-filtered": len(filtered),
        }
        return arrays, MetricRecord({**(metrics or {}), **totals})

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return the inner strategy's messages."""
        return self._inner.configure_evaluate(server_round, arrays, config, grid)

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Return the inner strategy's metrics; record accuracy and loss if they are there."""
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
        """Log the inner strategy's summary."""
        self._inner.summary()

    def _round(
        self,
        round_: int,
        replies: list[Message],
        reports: Mapping[int, Mapping[str, int]],
        rejected: tuple[Rejection, ...],
    ) -> Round:
        nodes = [reply.metadata.src_node_id for reply in replies]
        for node in nodes:
            self._numbers.setdefault(node, len(self._numbers))
        arrivals = {node: of["offered"] for node, of in reports.items()}
        fresh = sum(max(0, count - self._offered.get(node, 0)) for node, count in arrivals.items())
        self._offered |= arrivals
        return Round(
            round=round_,
            participants=tuple(sorted(self._numbers[node] for node in nodes)),
            arrivals=fresh,
            dropouts=sum(reply.has_error() for reply in replies),
            refused_reports=dict(Counter(str(rejection.reason) for rejection in rejected)),
            staleness=self._estimator.staleness(round_),
        )

    def _write(self, line: Line) -> None:
        if self._recorder is not None:
            self._recorder.write(line)

    def _take_gradients(
        self, replies: list[Message], round_: int, rejections: Rejections
    ) -> dict[DeviceId, Report]:
        """Take the local gradients out of the replies; of an invalid one the reply goes on."""
        found: dict[DeviceId, tuple[Any, int]] = {}
        for reply in replies:
            record = None if reply.has_error() else reply.content.pop(ESTIMATE, None)
            about = None if reply.has_error() else reply.content.get(KEEPER)
            if not isinstance(record, ArrayRecord) or not isinstance(about, ConfigRecord):
                continue
            node = reply.metadata.src_node_id
            with rejections.attributed_to(node):
                samples = about.get("samples")
                if not isinstance(samples, int) or not 0 < samples <= _MAX_SAMPLES:
                    raise RejectedError(
                        RejectionReason.BAD_GRADIENT_SAMPLES,
                        f"{samples!r} is not a number from 1 to {_MAX_SAMPLES}",
                    )
                if "local_gradient" not in record:
                    raise RejectedError(RejectionReason.MISSING_ARRAY, "no local_gradient")
                gradient = record["local_gradient"].numpy()
                screen_gradient(gradient, gradient.size, samples, self._limits)
                found[node] = gradient, samples
        if self._size is None and found:
            lengths = Counter(len(gradient) for gradient, _ in found.values())
            self._size = lengths.most_common(1)[0][0]
        valid: dict[DeviceId, Report] = {}
        for node, (gradient, samples) in found.items():
            with rejections.attributed_to(node):
                screen_gradient(gradient, self._size or 0, samples, self._limits)
                empty = np.empty(0, dtype=np.float32)
                valid[node] = Report(round_, empty, 0.0, 0, 0, gradient, samples)
        return valid

    def _take_reports(
        self, replies: list[Message]
    ) -> tuple[dict[int, dict[str, int]], list[list[float]]]:
        """Take out of the replies what Keepers report of themselves, and of their gists."""
        reports, gists = {}, []
        for reply in replies:
            about = None if reply.has_error() else reply.content.pop(KEEPER, None)
            if not isinstance(about, ConfigRecord):
                continue
            counts = {
                name: value
                for name in _SUMMED
                if isinstance(value := about.get(name), int) and value >= 0
            }
            if len(counts) == len(_SUMMED):  # all that adds up over a fleet, or nothing
                reports[reply.metadata.src_node_id] = counts
            listed = about.get("gist")
            figures = (
                [f for f in listed if isinstance(f, float)] if isinstance(listed, list) else []
            )
            if len(figures) == len(GIST) and np.isfinite(figures).all():
                gists.append(figures)
        return reports, gists

    def _screen(
        self,
        replies: list[Message],
        gradients: Mapping[DeviceId, Report],
        round_: int,
        rejections: Rejections,
    ) -> tuple[list[Message], dict[DeviceId, Estimate], tuple[DeviceId, ...]]:
        """Return the replies to merge, the gradients that count, and who was filtered."""
        key = str(getattr(self._inner, "weighted_by_key", "num-examples"))
        updates = updates_in(replies, self._layout, key)
        valid: dict[DeviceId, Report] = {}
        for node, update in updates.items():
            with rejections.attributed_to(node):
                valid[node] = self._pipeline.validate(update.report(round_), self._model, 0, np.inf)
        for node in valid.keys() & gradients.keys():
            gradient = gradients[node].local_gradient
            if gradient is not None and len(gradient) <= len(self._model):
                valid[node] = replace(valid[node], local_gradient=gradient)
        result = self._pipeline.merge(self._model, valid)
        for finding in result.findings:
            rejections.add(Rejection(*finding))

        merged = result.merged.reports
        out = {node for node, r in merged.items() if r.weight == 0 < valid[node].weight}
        for node in merged:
            updates[node].replace(valid[node], merged[node])
        out |= updates.keys() - merged.keys()
        counted = [reply for reply in replies if reply.metadata.src_node_id not in out]

        for node in result.dropped_gradients:
            self._estimator.forget(node)
        dropped = set(result.dropped_gradients) | (updates.keys() - merged.keys())
        kept = {node: report for node, report in gradients.items() if node not in dropped}
        self._samples |= {node: float(report.gradient_samples) for node, report in kept.items()}
        self._pipeline.set_rates(self._samples)
        estimates = {
            node: Estimate(gradient, weight, round_)
            for node, (gradient, weight) in self._pipeline.clip_gradients(
                kept, self._samples.__getitem__
            ).items()
        }
        return counted, estimates, result.merged.filtered


def _is_cut(rejection: Rejection) -> bool:
    """Whether the reply counted all the same, though not in full."""
    return rejection.reason == RejectionReason.UPDATE_CUT
