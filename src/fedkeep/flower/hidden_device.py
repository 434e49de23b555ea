"""A device whose reports leave under masks only, around any other that lives in this process."""

from __future__ import annotations

from fedkeep.core.errors import RefusedError
from fedkeep.core.types import Profile, Report, TrainOrder, Vector
from fedkeep.flower.codec import Evaluation
from fedkeep.flower.device_memory import DeviceMemory
from fedkeep.flower.node_device import NodeDevice
from fedkeep.privacy.encrypted import EncryptedProfile, ProfileRequest
from fedkeep.privacy.sum_member import SumMember


class HiddenDevice:
    """Takes part in secure sums; every step is saved before its answer leaves, so that none is ever made twice."""

    def __init__(self, inner: NodeDevice, member: SumMember, memory: DeviceMemory) -> None:
        self._inner, self._member, self._memory = inner, member, memory
        state = memory.load()
        if state:
            member.restore(state)

    def profile(self) -> Profile:
        return self._inner.profile()

    def encrypted_profile(self, request: ProfileRequest) -> EncryptedProfile:
        return self._inner.encrypted_profile(request)

    def participate(self, order: TrainOrder) -> Report:  # noqa: ARG002 - it is refused whatever it says
        raise RefusedError("in the clear", "privacy.secure_sum is set here: this device answers secure orders only")

    def hold(self, order: TrainOrder, terms: bytes) -> bytes:
        agreed = self._member.terms(terms)
        keys = self._member.hold(self._inner.participate(order), order, agreed)
        self._memory.save(self._member.snapshot())
        return keys

    def answer(self, question: bytes) -> bytes:
        answer = self._member.answer(question)
        self._memory.save(self._member.snapshot())
        return answer

    def evaluate(self, model: Vector) -> Evaluation:
        return self._inner.evaluate(model)
