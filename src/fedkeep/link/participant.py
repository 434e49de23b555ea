"""A device as a server sees it, wherever it lives, and how it answers each of the server's questions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

from fedkeep.core.types import Profile, Report, TrainOrder, Vector
from fedkeep.link.messages import (
    Answered,
    AskProfile,
    AskSum,
    DeviceReply,
    DeviceRequest,
    EncryptedProfile,
    EncryptedProfiled,
    Evaluate,
    Evaluated,
    Participate,
    Profiled,
    ProfileRequest,
    Reported,
)


class Participant(Protocol):
    """What answers a server: a device in this process, or an agent. It refuses what its privacy excludes."""

    def profile(self) -> Profile:
        """What the device declares in the clear (step 1)."""

    def encrypted_profile(self, request: ProfileRequest) -> EncryptedProfile:
        """The same, for the key-holder alone."""

    def participate(self, order: TrainOrder) -> Report:
        """Trains on what is stored and reports (steps 4-6)."""

    def hold(self, order: TrainOrder, terms: bytes) -> bytes:
        """Takes part in a secure sum, and keeps the report for masking; the answer is keys."""

    def answer(self, question: bytes) -> bytes:
        """The answer to a later exchange of a secure sum."""


Evaluating: TypeAlias = Callable[[Vector], Evaluated]
"""A model on the device's own samples."""


def reply_of(device: Participant, evaluate: Evaluating, request: DeviceRequest) -> DeviceReply:
    """The device's reply to a question; raises where it refuses."""
    match request:
        case Participate(order, None):
            return Reported(device.participate(order))
        case Participate(order, terms):
            return Answered(device.hold(order, terms or b""))
        case AskSum(question):
            return Answered(device.answer(question))
        case Evaluate(model):
            return evaluate(model)
        case AskProfile(None):
            return Profiled(device.profile())
        case AskProfile(wanted):
            assert wanted is not None
            return EncryptedProfiled(device.encrypted_profile(wanted))
