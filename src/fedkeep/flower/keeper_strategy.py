"""A wrapper for any strategy of Flower's that sends g_hat and takes in local gradients.

Before the inner strategy merges the replies, they pass the same stages as the reports of a served
fleet (`core.aggregation.pipeline`), with the same limits.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from fedkeep.config.presets import DEFAULT, DEFAULT_POLICY, experiment_tables
from fedkeep.core.aggregation import AGGREGATORS, Aggregator
from fedkeep.core.aggregation.pipeline import UpdatePipeline
from fedkeep.core.errors import ConfigError, RejectedError, RejectionReason
from fedkeep.core.gist import GistFigures
from fedkeep.core.gradients import Estimate, GlobalEstimator, global_estimator
from fedkeep.core.gradients.layout import sketch_of
from fedkeep.core.rounds import Rejection
from fedkeep.core.screening import Limits, screen_gradient, screen_sketch
from fedkeep.core.types import DeviceId, Report, Vector
from fedkeep.flower.exchange import PromptGrid, give_back_large_arrays
from fedkeep.flower.keeper_records import (
    GRADIENT,
    KEEPER,
    RANK,
    VERSION_KEY,
    add_orders,
    check_version,
    read_gradient,
)
from fedkeep.flower.reply_updates import ModelLayout, odd_ones, updates_in
from fedkeep.flower.rounds import Rejections
from fedkeep.records import End, Evaluation, Header, Line, Recorder, Round
from fedkeep.records.measures import GIST, gist_line
from fedkeep.records.runs import versions

log = logging.getLogger("fedkeep.flower")

_SUMMED = ("offered", "stored", "unsound")
"""What a Keeper reports of itself that adds up over a fleet."""
_FATES = ("kept", "replaced", "refused")
"""And what it reports of its arrivals, for the record."""
_REASON_LENGTH = 300
_SECAGG_WORDS = ("secaggplus", "secure_aggregation")
_MAX_COUNT = 10**15
_MAX_RANK = 4096
_Merged = TypeVar("_Merged")
_MAX_SAMPLES = 10**9
"""No local gradient is the mean of more arrivals."""


@dataclass(frozen=True, eq=False)
class _Told:
    """A local gradient as a reply tells it, and what the reply's record says of it."""

    gradient: Vector
    samples: int
    record: ConfigRecord

    @property
    def rank(self) -> int:
        """The rank of the sketch that it says to be; 0: none."""
        rank = self.record.get(RANK, 0)
        return rank if isinstance(rank, int) and 0 < rank <= _MAX_RANK else 0

    @property
    def private(self) -> bool:
        """Whether it says to come with noise."""
        return bool(self.record.get("private", False))


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
        A folder for `fedkeep watch` and `report`: each run writes a file of its own there, named
        by its number; no file is overwritten. Give an absolute path: a relative one begins where
        the SuperLink was started. A name that ends in .jsonl is taken for the file itself.
    deadline : float, optional
        Seconds after which a round goes on with the replies that came; None: the `timeout` of
        `start`. An error of a client is a reply: it is counted, and not waited for.
    aggregation : Aggregator, optional
        Whose stages the replies pass, instead of the preset's; the inner strategy does the merging.
    limits : Limits
        How far replies may stray; `Limits(enabled=False)` leaves every valid reply as it is.

    Raises
    ------
    ConfigError
        If there is no such preset, the aggregation does not run with these limits, or the strategy
        is none of Flower's message API.

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
        deadline: float | None = None,
        aggregation: Aggregator | None = None,
        limits: Limits = Limits(),
    ) -> None:
        if not isinstance(inner, Strategy):
            raise ConfigError(
                "KeeperStrategy takes a strategy of flwr.serverapp.strategy, not "
                f"{type(inner).__name__}; Flower's SecAgg+ runs with the older flwr.server alone: "
                "for secure sums serve a fleet with privacy.secure_aggregation"
            )
        self._inner, self._preset = inner, preset
        self._records, self._deadline = records, deadline
        self._recorder: Recorder | None = None
        self._tally = np.zeros(2, dtype=np.int64)
        self._seen: dict[int, Counter[str]] = {}
        """What each node's keeper had counted at its last report."""
        self._warned = set[str]()
        tables = experiment_tables(preset, policy)
        if aggregation is None:
            aggregation = AGGREGATORS[tables.get("aggregation", {}).get("name", "fedavg")]()
        estimator = str(tables.get("estimator", {}).get("name", "round-mean"))
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
        self._size: int | None = None
        """The length of a local gradient: that of most of the first ones."""
        self._rank = 0
        """The rank of their sketches; 0: they are no sketches."""

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        *others: Any,
        **named: Any,
    ) -> Result:
        """Run Flower's own loop, over a grid that returns as soon as the last reply is there."""
        give_back_large_arrays()
        if self._records is not None:
            path = _record_path(Path(self._records), grid)
            log.info("the record is %s; see it by: fedkeep watch %s", path, path.parent)
            self._recorder = Recorder(path)
            about = {"preset": self._preset, "strategy": type(self._inner).__name__}
            header = Header(
                run=path.stem, method=about["strategy"], task="fleet", seed=0, config=about,
                config_hash="",
                versions=versions(), labels=(), devices=0, rounds=num_rounds,
            )  # fmt: skip
            self._recorder.start(header)
        prompt = cast(Grid, PromptGrid(grid, self._tally, self._deadline))
        result = super().start(prompt, initial_arrays, num_rounds, *others, **named)
        self._write(End(round=num_rounds, digest=""))
        return result

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return the inner strategy's messages, with g_hat beside the model."""
        self._layout = ModelLayout(arrays)
        self._model = self._layout.flatten(arrays)
        messages = self._inner.configure_train(server_round, arrays, config, grid)
        direction = self._estimator.global_gradient()
        return add_orders(messages, server_round, self._accepted, direction, self._preset)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Screen the replies and merge the local gradients; the inner strategy merges the rest."""
        listed, rejections = list(replies), Rejections()
        self._note_failures(server_round, listed)
        ours = [reply for reply in listed if _is_of_this_version(reply, rejections)]
        gradients = self._take_gradients(ours, server_round, rejections)
        reports, gists = self._take_reports(ours)
        counted, estimates, filtered = self._screen(ours, gradients, server_round, rejections)
        aggregate = self._inner.aggregate_train
        arrays, metrics = self._merged(partial(aggregate, server_round), counted, rejections)

        rejected = rejections.take()
        for odd in (r.device for r in rejected if r.reason == RejectionReason.WRONG_RECORDS):
            estimates.pop(odd, None)
        self._estimator.update(estimates)
        self._accepted.update(dict.fromkeys(gradients, server_round))
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
            "keeper-errors": sum(reply.has_error() for reply in listed),
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
        aggregate = partial(self._inner.aggregate_evaluate, server_round)
        metrics = self._merged(aggregate, list(replies), Rejections())
        found = {
            name: value for name, value in (metrics or {}).items() if isinstance(value, int | float)
        }
        accuracy, loss = (
            next((float(v) for n, v in found.items() if word in n), None)
            for word in ("acc", "loss")
        )
        if found:
            valued = sum(counts["offered"] for counts in self._seen.values())
            line = Evaluation(
                round=server_round,
                accuracy=accuracy,
                loss=loss,
                samples_valued=valued,
                bytes_up=int(self._tally[1]),
                bytes_down=int(self._tally[0]),
            )
            self._write(line)
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
        fresh = Counter[str]()
        for node, counts in reports.items():
            known = self._seen.setdefault(node, Counter())
            fresh.update({n: max(0, count - known[n]) for n, count in counts.items()})
            known.update({n: count - known[n] for n, count in counts.items()})
        return Round(
            round=round_,
            participants=tuple(sorted(self._numbers[node] for node in nodes)),
            arrivals=fresh["offered"],
            kept=fresh["kept"],
            replaced=fresh["replaced"],
            refused=fresh["refused"],
            dropouts=sum(reply.has_error() for reply in replies),
            refused_reports=dict(Counter(str(rejection.reason) for rejection in rejected)),
            staleness=self._estimator.staleness(round_),
        )

    def _note_failures(self, round_: int, replies: list[Message]) -> None:
        """Log what clients failed of, and once what is not as it should be."""
        failed = [reply for reply in replies if reply.has_error()]
        for why, count in Counter(str(reply.error.reason) for reply in failed).most_common(3):
            lines = why.strip().splitlines() or ["no reason given"]
            words = (round_, count, len(replies), lines[-1][:_REASON_LENGTH])
            log.warning("round %d: %d of %d clients failed: %s", *words)
        if failed and len(failed) == len(replies):
            log.error("round %d: every client failed; nothing was learnt", round_)
        if any(word in str(r.error.reason) for r in failed for word in _SECAGG_WORDS):
            self._warn_once(
                "Flower's SecAgg+ runs with the older flwr.server alone: take secaggplus_mod out, "
                "or serve a fleet with privacy.secure_aggregation"
            )
        answered = [reply for reply in replies if not reply.has_error()]
        bare = sum(KEEPER not in reply.content for reply in answered)
        if bare:
            self._warn_once(
                "%d of %d clients sent no records of a Keeper: add keeper.records() to their "
                "replies, or their samples are not chosen",
                bare,
                len(answered),
            )
        open_gradients = sum(
            GRADIENT in record and not record.get("private", False)
            for reply in answered
            if isinstance(record := reply.content.get(KEEPER), ConfigRecord)
        )
        if open_gradients and type(self._inner).__name__.startswith("DifferentialPrivacy"):
            self._warn_once(
                "the strategy protects the model alone, and %d Keepers send mean gradients without "
                "noise: open them with privacy=, or gist='local', which sends none",
                open_gradients,
            )

    def _warn_once(self, words: str, *values: object) -> None:
        if words not in self._warned:
            self._warned.add(words)
            log.warning(words, *values)

    def _merged(
        self,
        aggregate: Callable[[list[Message]], _Merged],
        replies: list[Message],
        rejections: Rejections,
    ) -> _Merged:
        """Let the inner strategy merge the replies; if it cannot, those that are like most.

        Strategies of Flower's raise where one reply has other records than the others, which would
        end the run.
        """
        try:
            return aggregate(replies)
        except Exception:
            odd = odd_ones(replies)
            if not odd:
                raise
        for node, why in odd.items():
            rejections.add(Rejection(node, RejectionReason.WRONG_RECORDS, why))
        return aggregate([reply for reply in replies if reply.metadata.src_node_id not in odd])

    def _write(self, line: Line) -> None:
        if self._recorder is not None:
            self._recorder.write(line)

    def _take_gradients(
        self, replies: list[Message], round_: int, rejections: Rejections
    ) -> dict[DeviceId, Report]:
        """Take the local gradients out of the replies; of an invalid one the reply goes on."""
        found: dict[DeviceId, _Told] = {}
        for reply in replies:
            about = None if reply.has_error() else reply.content.get(KEEPER)
            if not isinstance(about, ConfigRecord) or GRADIENT not in about:
                continue
            node = reply.metadata.src_node_id
            with rejections.attributed_to(node):
                samples = about.get("samples")
                if not isinstance(samples, int) or not 0 < samples <= _MAX_SAMPLES:
                    raise RejectedError(
                        RejectionReason.BAD_GRADIENT_SAMPLES,
                        f"{samples!r} is not a number from 1 to {_MAX_SAMPLES}",
                    )
                gradient = read_gradient(about)
                screen_gradient(gradient, gradient.size, samples, self._limits)
                found[node] = _Told(gradient, samples, about)
        if self._size is None and found:
            forms = Counter((len(reported.gradient), reported.rank) for reported in found.values())
            self._size, self._rank = forms.most_common(1)[0][0]
        if self._rank and self._pipeline.statistics.gradient_layout is None and found:
            self._pipeline.statistics.gradient_layout = sketch_of(
                self._layout.shapes, self._rank, self._size or 0
            )
        valid: dict[DeviceId, Report] = {}
        layout = self._pipeline.statistics.gradient_layout
        for node, reported in found.items():
            with rejections.attributed_to(node):
                screen_gradient(reported.gradient, self._size or 0, reported.samples, self._limits)
                if layout is not None and not reported.private:
                    screen_sketch(reported.gradient, layout, self._limits)
                empty = np.empty(0, dtype=np.float32)
                valid[node] = Report(round_, empty, 0.0, 0, 0, reported.gradient, reported.samples)
        return valid

    def _take_reports(
        self, replies: list[Message]
    ) -> tuple[dict[int, dict[str, int]], list[GistFigures]]:
        """Take out of the replies what Keepers report of themselves, and of their gists."""
        reports, gists = {}, []
        for reply in replies:
            about = None if reply.has_error() else reply.content.pop(KEEPER, None)
            if not isinstance(about, ConfigRecord):
                continue
            counts = {
                name: value
                for name in (*_SUMMED, *_FATES)
                if isinstance(value := about.get(name), int) and 0 <= value <= _MAX_COUNT
            }
            if counts.keys() >= set(_SUMMED):  # all that adds up over a fleet, or nothing
                reports[reply.metadata.src_node_id] = counts
            listed = about.get("gist")
            figures = (
                [f for f in listed if isinstance(f, float)] if isinstance(listed, list) else []
            )
            if len(figures) == len(GIST) and np.isfinite(figures).all():
                gists.append(GistFigures(*figures))
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
            gradient, layout = gradients[node].local_gradient, self._pipeline.statistics
            comparable = not self._rank or layout.gradient_layout is not None
            if gradient is not None and comparable and len(gradient) <= len(self._model):
                valid[node] = replace(valid[node], local_gradient=gradient)
        result = self._pipeline.merge(self._model, valid)
        for finding in result.findings:
            rejections.add(Rejection(*finding))

        merged = result.merged.reports
        out = {node for node, r in merged.items() if r.weight == 0 < valid[node].weight}
        for node in merged:
            counts = replace(merged[node], model=result.merged.model_of(node))
            updates[node].replace(valid[node], counts)
        out |= updates.keys() - merged.keys()
        counted = [reply for reply in replies if reply.metadata.src_node_id not in out]
        if merged and not any(report.weight for report in merged.values()):
            self._warn_once("every reply has %s = 0: nothing is merged in such a round", key)
            counted = []

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


def _is_of_this_version(reply: Message, rejections: Rejections) -> bool:
    """Say whether a reply can be read; one of another version's Keeper is rejected by name."""
    if reply.has_error() or KEEPER not in reply.content:
        return True
    about = reply.content[KEEPER]
    with rejections.attributed_to(reply.metadata.src_node_id):
        check_version(
            about.get(VERSION_KEY) if isinstance(about, ConfigRecord) else None, "its Keeper"
        )
        return True
    return False


def _record_path(given: Path, grid: Grid) -> Path:
    """Return a file that is not there yet: in a folder named by the run, else the one given."""
    folder, name = (given.parent, given.stem) if given.suffix == ".jsonl" else (given, "run")
    if folder == given:
        with suppress(AttributeError):  # a grid without a run
            name = f"run-{grid.run.run_id}"
    path, number = folder / f"{name}.jsonl", 2
    while path.exists():
        path, number = folder / f"{name}-{number}.jsonl", number + 1
    return path.absolute()


def _is_cut(rejection: Rejection) -> bool:
    """Whether the reply counted all the same, though not in full."""
    return rejection.reason == RejectionReason.UPDATE_CUT
