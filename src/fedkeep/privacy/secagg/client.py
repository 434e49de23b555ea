"""A device in secure rounds: its report leaves under masks, or not at all.

Keys are signed by the devices' own node keys, so that a server cannot invent members: `members` and
each node's key come from whoever provisions the fleet (`fedkeep provision`), never from the server.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from fedkeep.core.errors import ConfigError, RejectedError, RejectionReason, optional_import
from fedkeep.core.screening import Limits, screen_report
from fedkeep.core.state import add_prefix, strip_prefix
from fedkeep.core.types import DeviceId, Report, State, TrainOrder, Vector
from fedkeep.privacy.options import PrivacyOptions
from fedkeep.privacy.secagg import protocol
from fedkeep.privacy.secagg.fixed_point import WIDEST, WORD, Differences, Words
from fedkeep.protocol.wire import from_array, to_array

with optional_import("secure aggregation", "privacy"):
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.hashes import SHA384

_SIGNED = ec.ECDSA(SHA384())
_FAR = 10.0


class SecureAggregationClient:
    """Answers the four exchanges of each secure round, one sum at a time.

    `differences` must be kept durably; a sum under way need not be: a device that forgets it has
    dropped out.
    """

    def __init__(self, options: PrivacyOptions, gradient_size: int) -> None:
        self._options = options
        self.differences = Differences(gradient_size + 1)
        self._gradient_size = gradient_size
        self._held: protocol.MaskingDevice | None = None
        self._keys = MemberKeys(options) if options.members else None

    def terms(self, payload: bytes) -> protocol.SecureAggregationConfig:
        """Return the terms of a sum, if this device may take part on them; before it trains."""
        terms: protocol.SecureAggregationConfig = protocol.decode(
            payload, protocol.SecureAggregationConfig
        )
        if len(terms.session) != protocol.SESSION_BYTES or terms.gradient_size not in (
            0,
            self._gradient_size,
        ):
            raise RejectedError(
                RejectionReason.SUM_TERMS, "they are not those of a sum over this fleet's reports"
            )
        if terms.summands < self._options.least_in_sum:
            raise RejectedError(
                RejectionReason.TOO_FEW_DEVICES,
                f"{terms.summands} are fewer than privacy.min_cohort: nothing was sent",
            )
        if terms.threshold < max(2, self._options.threshold(terms.summands)):
            asked = f"{terms.threshold} of {terms.summands} devices"
            raise RejectedError(
                RejectionReason.THRESHOLD,
                f"{asked} are fewer than privacy.sum_threshold wants: nothing was sent",
            )
        bounds = (terms.update_norm, terms.gradient_norm, terms.weight_unit)
        if not (
            all(0 < bound < WIDEST for bound in bounds)
            and terms.heaviest >= 0
            and 0 <= terms.rate <= 1
        ):
            raise RejectedError(RejectionReason.SUM_TERMS, "their limits fit no grid")
        return terms

    def hold(
        self, report: Report, order: TrainOrder, terms: protocol.SecureAggregationConfig
    ) -> bytes:
        """Screen the report as a server would, and keep it on its grid; the answer is keys."""
        self._held = None
        lost = not self.differences.knows(terms.counted)
        if lost or not terms.gradient_size:
            report = replace(report, local_gradient=None, gradient_samples=0)
        try:
            words = self._words(report, order.model, terms, lost=lost)
        except RejectedError as error:
            return protocol.encode(protocol.Declined(terms.session, error.reason, error.detail))
        self._held = protocol.MaskingDevice(
            terms.device, terms.session, terms.threshold, words.tobytes()
        )
        keys = self._held.keys()
        signed = keys if self._keys is None else self._keys.sign(keys, terms.session, terms.device)
        return protocol.encode(protocol.Keys(terms.session, signed, lost))

    def answer(self, payload: bytes) -> bytes:
        """Answer one of the other exchanges; masks are agreed with enough members only."""
        request: protocol.Request = protocol.decode(payload, protocol.Request)
        held = self._held
        if held is None or held.session != request.session:
            raise RejectedError(
                RejectionReason.ANOTHER_SUM,
                "this device is not in the sum it is asked about: nothing was sent",
            )
        match request:
            case protocol.PartyKeys(session, roster):
                if len(roster) < self._options.least_in_sum:
                    raise RejectedError(
                        RejectionReason.TOO_FEW_DEVICES,
                        f"{len(roster)} are fewer than privacy.min_cohort",
                    )
                if self._keys is not None:
                    self._keys.require_members(roster, session)
                bare = {d: replace(keys, member=b"", signature=b"") for d, keys in roster.items()}
                return protocol.encode(held.share(bare))
            case protocol.Envelopes(_, envelopes):
                return protocol.encode(held.mask(envelopes))
            case protocol.Survivors(_, devices):
                reply, self._held = held.unmask(devices), None
        return protocol.encode(reply)

    def snapshot(self) -> State:
        """Everything, for devices that live for one message only."""
        state = add_prefix("differences", self.differences.snapshot())
        if self._held is not None:
            state["held"] = to_array(self._held)
        return state

    def restore(self, state: State) -> None:
        """Take over what `snapshot` returned."""
        self.differences.restore(strip_prefix("differences", state))
        held = state.get("held")
        self._held = None if held is None else from_array(held, protocol.MaskingDevice)

    def _words(
        self, report: Report, model: Vector, terms: protocol.SecureAggregationConfig, *, lost: bool
    ) -> Words:
        """Return the report on its grids, if it is valid; clip an update over the limit.

        First the update times its weight, the weight, and the local steps times the weight where
        they count; then what the running sum of estimators has to add: zeros if nothing has arrived
        since this device was last counted.
        """
        limits = Limits(update_norm=terms.update_norm, gradient_norm=terms.gradient_norm)
        if report.model.shape == model.shape:
            update = report.model.astype(np.float64) - model
            length = float(np.linalg.norm(update))
            if terms.update_norm < length < _FAR * terms.update_norm:
                shorter = model + update * (0.999 * terms.update_norm / length)
                report = replace(report, model=shorter.astype(np.float32))
        screened = screen_report(report, model, terms.gradient_size, terms.heaviest, limits)
        weight, steps = (
            screened.weight / terms.weight_unit,
            max(screened.steps, 1) if terms.per_step else 1,
        )
        update = (screened.model.astype(np.float64) - model) * (weight / steps)
        words = terms.update_grid.encode(
            np.append(update, [weight, weight * steps if terms.per_step else 0.0])
        )
        if not terms.gradient_size:
            return words
        if lost:
            return np.append(words, np.zeros(terms.gradient_size + 1, WORD))
        gradient = screened.local_gradient
        latest = None
        if gradient is not None:
            weighted = np.append(gradient.astype(np.float64) * terms.rate, terms.rate)
            latest = terms.estimator_grid.encode(weighted)
        return np.append(words, self.differences.send(latest, terms.session, terms.counted))


class MemberKeys:
    """A device's node key, and the public keys of all devices that may be in a sum with it."""

    def __init__(self, options: PrivacyOptions) -> None:
        try:
            key = serialization.load_ssh_private_key(
                Path(options.member_key).read_bytes(), password=None
            )
            files = sorted(Path(options.members).glob("*.pub"))
            members = [serialization.load_ssh_public_key(file.read_bytes()) for file in files]
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"privacy.member_key and privacy.members cannot be read: {error}"
            ) from error
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise ConfigError(
                f"{options.member_key} is no elliptic-curve key: use the one of `fedkeep provision`"
            )
        curved = [member for member in members if isinstance(member, ec.EllipticCurvePublicKey)]
        if len(curved) < len(members):
            raise ConfigError(
                f"a key in {options.members} is no elliptic-curve key: "
                "use those of `fedkeep provision`"
            )
        self._members = {_name(member): member for member in curved}
        self._key, self._own = key, _name(key.public_key())
        if self._own not in self._members:
            raise ConfigError(
                "privacy.member_key is not among privacy.members: "
                "both come from `fedkeep provision`"
            )

    def sign(
        self, keys: protocol.PublicKeys, session: bytes, device: DeviceId
    ) -> protocol.PublicKeys:
        """Return the keys signed as this member's, for this sum and under this number."""
        return replace(
            keys,
            member=self._own,
            signature=self._key.sign(_statement(keys, session, device), _SIGNED),
        )

    def require_members(
        self, roster: Mapping[DeviceId, protocol.PublicKeys], session: bytes
    ) -> None:
        """Check that every key of the roster is another registered member's."""
        for device, keys in roster.items():
            try:
                self._members[keys.member].verify(
                    keys.signature, _statement(keys, session, device), _SIGNED
                )
            except (KeyError, InvalidSignature):
                why = f"device {device} is none that this fleet knows: nothing was sent"
                raise RejectedError(RejectionReason.NOT_A_MEMBER, why) from None
        if len({keys.member for keys in roster.values()}) < len(roster):
            raise RejectedError(
                RejectionReason.TWICE_IN_SUM,
                "one member stands under two numbers: nothing was sent",
            )


def _statement(keys: protocol.PublicKeys, session: bytes, device: DeviceId) -> bytes:
    parts = (
        b"fedkeep secure sum",
        session,
        str(device).encode(),
        keys.masking,
        keys.sealing,
        keys.own_mask,
    )
    return b"".join(len(part).to_bytes(4, "big") + part for part in parts)


def _name(public: ec.EllipticCurvePublicKey) -> bytes:
    return public.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
