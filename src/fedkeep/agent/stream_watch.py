"""What an agent notices of its stream: that it has changed, and that it has stopped."""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from fedkeep.core.bounds import check_range
from fedkeep.core.drift import AdaptiveWindow, PageHinkley
from fedkeep.core.types import FloatArray, IntArray
from fedkeep.protocol.messages import DriftStatus

log = logging.getLogger(__name__)
WATCHED = ("labels", "losses", "gradients")
"""What changes are looked for in."""
_MOST_CHANNELS = 64
"""Shares of labels that are watched; more labels are watched in groups of neighbours."""
_A_SECOND = 500
"""Arrivals of each second that are looked at: enough to notice, and cheap at any speed."""
_GAPS, _LEAST_SILENCE, _NEVER_CAME = 3.0, 600.0, 3600.0
"""By default a source is silent after so many times the longest gap between two of its arrivals,
after ten minutes at the least, and after an hour if nothing ever came."""
_LARGEST = 1e12
"""A loss that is no number counts as this."""
_RHO_TOLERANCE, _RHO_THRESHOLD, _RHO_LEAST = 0.05, 0.5, 5


@dataclass(frozen=True)
class DriftOptions:
    """The table `[drift]`: when an agent says that its stream has changed, or stopped."""

    enabled: bool = True
    """Whether changes of label shares, losses and gradient correlation are looked for."""
    delta: float = 0.002
    """The probability of a false alarm at each look; a smaller one notices later."""
    silence_minutes: float | None = None
    """Minutes without an arrival after which a source counts as silent; None: three times the \
longest gap there was between two of its arrivals, ten minutes at the least."""

    def __post_init__(self) -> None:
        check_range(self, "delta", above=0, below=1)
        check_range(self, "silence_minutes", above=0)


class StreamWatch:
    """Looks at what arrives for changes, and at the clock for silence.

    All of it begins anew with each process; how often the stream has changed is the agent's to
    count.

    Parameters
    ----------
    options
        When something is said.
    labels
        How many labels there are, or intervals of numbers.
    names
        What the labels are called, if they are.
    sources
        The names of the sources.
    now
        The present time, in seconds that nobody can set.

    Examples
    --------
    >>> watch = StreamWatch(DriftOptions(), 2, ("idle", "person"), ("camera",), now=0.0)
    >>> for second in range(40):
    ...     y = np.full(50, 0 if second < 20 else 1)
    ...     if watch.observe(y, None, now=float(second)):
    ...         print(watch.last)
    labels: 'person' from 0 % to 62 % of the arrivals
    >>> watch.arrived("camera", 40.0)
    >>> list(watch.silent(40.0 + 3599)), list(watch.silent(40.0 + 3601))
    ([], ['camera'])
    """

    def __init__(
        self,
        options: DriftOptions,
        labels: int,
        names: Sequence[str],
        sources: Iterable[str],
        now: float,
    ) -> None:
        self.options, self._labels, self._names = options, labels, names
        self._channels = min(labels, _MOST_CHANNELS)
        self._shares = AdaptiveWindow(self._channels, options.delta)
        self._losses = AdaptiveWindow(1, options.delta)
        self._usual_loss: float | None = None
        self._correlation = PageHinkley(_RHO_TOLERANCE, _RHO_THRESHOLD, _RHO_LEAST)
        self.last = ""
        """The last change, in words."""
        self._changed_at: float | None = None
        self._second, self._looked_at = 0.0, 0
        self._last_arrival = dict.fromkeys(sources, now)
        self._longest_gap: dict[str, float] = {}
        self._told: set[str] = set()
        """Sources that were said to be silent."""

    def observe(self, y: IntArray, losses: FloatArray | None, now: float) -> str:
        """Take in labels and losses of arrivals; gives what has changed, or nothing."""
        if self._labels < 2:
            return self._observe_losses(losses, now)
        groups = y * self._channels // self._labels
        change = self._shares.add(np.eye(self._channels)[groups])
        if change is None:
            return self._observe_losses(losses, now)
        before, after = 100 * change.before, 100 * change.after
        label = self._named(change.channel)
        self._note(f"labels: {label} from {before:.0f} % to {after:.0f} % of the arrivals", now)
        return "labels"

    def wants(self, count: int, now: float) -> bool:
        """Whether so many arrivals are looked at; of a fast stream a part is."""
        if not self.options.enabled:
            return False
        if now - self._second >= 1:
            self._second, self._looked_at = now, 0
        self._looked_at += count
        return self._looked_at <= _A_SECOND

    def _observe_losses(self, losses: FloatArray | None, now: float) -> str:
        """Look at losses, brought between 0 and 1 by the mean of the first under this model."""
        if losses is None:
            return ""
        losses = np.nan_to_num(np.maximum(losses, 0.0), nan=_LARGEST, posinf=_LARGEST)
        if self._usual_loss is None:
            self._usual_loss = max(float(np.mean(losses)), 1e-9)
        change = self._losses.add((losses / (losses + self._usual_loss))[:, None])
        if change is None:
            return ""
        before, after = (
            self._usual_loss * value / max(1e-9, 1 - value)
            for value in (change.before, change.after)
        )
        self._note(f"losses: from about {before:.3g} to {after:.3g} under the same model", now)
        return "losses"

    def took_part(self, rho: float | None, now: float) -> str:
        """Note a new model, under which losses are others, and the gradient correlation."""
        self._losses.reset()
        self._usual_loss = None
        usual = self._correlation.mean
        if not self.options.enabled or rho is None or not self._correlation.add(rho):
            return ""
        self._note(f"gradients: correlation {rho:.2f}, usually {usual:.2f}", now)
        return "gradients"

    def _note(self, change: str, now: float) -> None:
        self.last, self._changed_at = change, now
        log.warning("the stream has changed: %s", change)

    def _named(self, channel: int) -> str:
        """Return what a channel is: a label, or several."""
        first = -(-channel * self._labels // self._channels)
        last = -(-(channel + 1) * self._labels // self._channels) - 1
        if first == last:
            return repr(self._names[first]) if self._names else f"label {first}"
        return f"labels {first} to {last}"

    def arrived(self, source: str, now: float) -> None:
        """Note that something came from a source, whatever it was."""
        gap = now - self._last_arrival.get(source, now)
        if source in self._longest_gap:
            self._longest_gap[source] = max(self._longest_gap[source], gap)
        else:
            self._longest_gap[source] = 0.0
        self._last_arrival[source] = now
        if source in self._told:
            self._told.discard(source)
            log.info("source '%s' is heard again, after %.0f minutes", source, gap / 60)

    def postpone(self, now: float) -> None:
        """Let a time not count in which the agent itself held its sources back."""
        self._last_arrival = dict.fromkeys(self._last_arrival, now)

    def look(self, now: float) -> None:
        """Say once which sources have fallen silent."""
        for source, seconds in self.silent(now).items():
            if source not in self._told:
                self._told.add(source)
                log.warning("source '%s' is silent for %.0f minutes", source, seconds / 60)

    def silent(self, now: float) -> dict[str, float]:
        """Return the sources that are silent, each with the seconds since it was heard."""
        return {
            source: now - last
            for source, last in self._last_arrival.items()
            if now - last > self._patience(source)
        }

    def _patience(self, source: str) -> float:
        """Return for how many seconds nothing may come."""
        if self.options.silence_minutes is not None:
            return 60 * self.options.silence_minutes
        gap = self._longest_gap.get(source)
        if not gap:  # one arrival says nothing of gaps
            return _NEVER_CAME
        return max(_LEAST_SILENCE, _GAPS * gap)

    def status(self, changes: dict[str, int], now: float) -> DriftStatus:
        """Return what is known, with the counts that the agent keeps."""
        return DriftStatus(
            changes=changes,
            last=self.last,
            last_seconds=None if self._changed_at is None else now - self._changed_at,
            silent=self.silent(now),
            quiet_seconds={source: now - last for source, last in self._last_arrival.items()},
        )
