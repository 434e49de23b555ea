"""A device in secure rounds: its finished report is held back and leaves under masks, or not at all."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from fedkeep.core.errors import RefusedError
from fedkeep.core.screening import Limits, screen_report
from fedkeep.core.types import FloatArray, Report, State, TrainOrder, Vector
from fedkeep.privacy.fixed_point import Differences, Words, weighted
from fedkeep.privacy.member_keys import member_keys
from fedkeep.privacy.options import PrivacyOptions
from fedkeep.privacy.secure_sum import MaskingDevice
from fedkeep.privacy.sum_messages import (
    SESSION_BYTES,
    Declined,
    Envelopes,
    Keys,
    MaskedWords,
    OpenedShares,
    PartyKeys,
    Reply,
    SumTerms,
    Survivors,
    decode,
    decode_request,
    encode,
)

_WORDS = np.dtype("<u8")
_FAR = 10.0


@dataclass(eq=False)
class _Held:
    """A sum under way: the device's part in it, and the report on its grid."""

    session: bytes
    device: MaskingDevice
    words: Words


class SumMember:
    """Answers the four exchanges of each secure round; one sum at a time, and a new one ends the old.

    `differences` must be kept durably; a sum under way need not be: a device that forgets it has dropped out.
    """

    def __init__(self, options: PrivacyOptions, gradient_size: int) -> None:
        self._options = options
        self.differences = Differences(gradient_size + 1, _WORDS)
        self._gradient_size = gradient_size
        self._held: _Held | None = None
        self._keys = member_keys(options)

    def terms(self, payload: bytes) -> SumTerms:
        """The terms of a sum, if this device may take part on them; to be asked before it trains."""
        terms = decode(payload, SumTerms)
        if len(terms.session) != SESSION_BYTES or terms.gradient_size not in (0, self._gradient_size):
            raise RefusedError("sum-terms", "they are not those of a sum over this fleet's reports")
        if terms.summands < self._options.least_in_sum:
            raise RefusedError(
                "too few devices", f"{terms.summands} are fewer than privacy.sum_least: nothing was sent"
            )
        if terms.threshold < max(2, self._options.threshold(terms.summands)):
            asked = f"{terms.threshold} of {terms.summands} devices"
            raise RefusedError("threshold", f"{asked} are fewer than privacy.sum_threshold wants: nothing was sent")
        bounds = (terms.update_norm, terms.gradient_norm, terms.weight_unit)
        if not (all(0 < bound < math.inf for bound in bounds) and terms.heaviest >= 0 and 0 <= terms.rate <= 1):
            raise RefusedError("sum-terms", "their limits fit no grid")
        return terms

    def hold(self, report: Report, order: TrainOrder, terms: SumTerms) -> bytes:
        """Checks the report as a server would, puts it on the grid and keeps it; the answer is keys only."""
        self._held = None
        lost = not self.differences.knows(terms.counted)
        if lost or not terms.gradient_size:
            report = replace(report, local_gradient=None, gradient_samples=0)
        try:
            words = self._words(report, order.model, terms, lost=lost)
        except RefusedError as error:
            return encode(Declined(terms.session, error.reason, error.detail))
        device = MaskingDevice(terms.device, terms.session, terms.threshold)
        self._held = _Held(terms.session, device, words)
        keys = device.keys()
        signed = keys if self._keys is None else self._keys.sign(keys, terms.session, terms.device)
        return encode(Keys(terms.session, signed, lost))

    def answer(self, payload: bytes) -> bytes:
        """The answer to one of the other exchanges."""
        request = decode_request(payload)
        held = self._held
        if held is None or held.session != request.session:
            raise RefusedError("another sum", "this device is not in the sum it is asked about: nothing was sent")
        if isinstance(request, PartyKeys):
            request = self._known(request)
        reply = _reply(held, request)
        if isinstance(request, Survivors):
            self._held = None
        return encode(reply)

    def snapshot(self) -> State:
        """Everything, for devices that live for one message only."""
        state = {f"differences.{name}": array for name, array in self.differences.snapshot().items()}
        if self._held is not None:
            state |= {f"held.{name}": array for name, array in self._held.device.snapshot().items()}
            state |= {
                "held.session": np.frombuffer(self._held.session, dtype=np.uint8),
                "held.words": self._held.words,
            }
        return state

    def restore(self, state: State) -> None:
        self.differences.restore(_under("differences.", state))
        held = _under("held.", state)
        self._held = None
        if held:
            self._held = _Held(held["session"].tobytes(), MaskingDevice.restored(held), held["words"].copy())

    def _known(self, roster: PartyKeys) -> PartyKeys:
        """The roster as masks are agreed on, if it is of enough devices and, where they are known, of members only."""
        if len(roster.keys) < self._options.least_in_sum:
            raise RefusedError("too few devices", f"{len(roster.keys)} are fewer than privacy.sum_least")
        if self._keys is not None:
            self._keys.require_members(roster.keys, roster.session)
        return PartyKeys(roster.session, {d: replace(k, member=b"", signature=b"") for d, k in roster.keys.items()})

    def _words(self, report: Report, model: Vector, terms: SumTerms, *, lost: bool) -> Words:
        """The report on its grids, if it is sound; an update longer than the fleet's limit is cut to it."""
        report = _cut(report, model, terms.update_norm)
        limits = Limits(update_norm=terms.update_norm, gradient_norm=terms.gradient_norm)
        sound = screen_report(report, model, terms.gradient_size, terms.heaviest, limits)
        update = terms.update_grid.encode(_update(sound, model, terms))
        if not terms.gradient_size:
            return update
        news = np.zeros(terms.gradient_size + 1, _WORDS) if lost else self._news(sound, terms)
        return np.concatenate([update, news])

    def _news(self, report: Report, terms: SumTerms) -> Words:
        """What the running sum has to add for this device; zeros if nothing has arrived since it was last counted."""
        gradient = report.local_gradient
        words = None if gradient is None else terms.estimator_grid.encode(weighted(gradient, terms.rate))
        return self.differences.send(words, terms.session, terms.counted)


def _cut(report: Report, model: Vector, longest: float) -> Report:
    """An update somewhat too long, cut; one far too long, or none at all, is left for screening to refuse."""
    if report.model.shape != model.shape:
        return report
    update = report.model.astype(np.float64) - model
    length = float(np.linalg.norm(update))
    if not longest < length < _FAR * longest:
        return report
    return replace(report, model=(model + update * (0.999 * longest / length)).astype(np.float32))


def _update(report: Report, model: Vector, terms: SumTerms) -> FloatArray:
    """The update times its weight, the weight, and the local steps times the weight where they count."""
    weight = report.weight / terms.weight_unit
    steps = max(report.steps, 1) if terms.per_step else 1
    update = (report.model.astype(np.float64) - model) * (weight / steps)
    return np.append(update, [weight, weight * steps if terms.per_step else 0.0])


def _reply(held: _Held, request: PartyKeys | Envelopes | Survivors) -> Reply:
    match request:
        case PartyKeys():
            return Envelopes(held.session, held.device.share(request.keys))
        case Envelopes():
            masked = held.device.mask(held.words, request.envelopes)
            return MaskedWords(held.session, masked.words.astype(_WORDS).tobytes())
        case Survivors():
            shares = held.device.unmask(request.devices)
            return OpenedShares(held.session, dict(shares.own_masks), dict(shares.masking_keys))


def _under(prefix: str, state: State) -> State:
    return {name.removeprefix(prefix): array for name, array in state.items() if name.startswith(prefix)}
