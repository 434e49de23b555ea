"""The device behind a node whose agent runs beside it: every question goes through the agent's socket."""

from __future__ import annotations

from fedkeep.core.types import Profile, Report, TrainOrder, Vector
from fedkeep.flower.codec import Evaluation
from fedkeep.link.client import AgentClient


class AgentDevice:
    """Owns nothing: stream, store, model and training are the agent's, and outlive every ClientApp process."""

    def __init__(self, socket_path: str, timeout: float = 600.0) -> None:
        self._path, self._timeout = socket_path, timeout

    def profile(self) -> Profile:
        with AgentClient(self._path, self._timeout) as agent:
            return agent.profile()

    def participate(self, order: TrainOrder) -> Report:
        with AgentClient(self._path, self._timeout) as agent:
            return agent.participate(order)

    def hold(self, order: TrainOrder, terms: bytes) -> bytes:
        with AgentClient(self._path, self._timeout) as agent:
            return agent.hold(order, terms)

    def answer(self, question: bytes) -> bytes:
        with AgentClient(self._path, self._timeout) as agent:
            return agent.answer(question)

    def evaluate(self, model: Vector) -> Evaluation:
        with AgentClient(self._path, self._timeout) as agent:
            said = agent.evaluate(model)
        return Evaluation(said.samples, said.loss * said.samples, round(said.accuracy * said.samples))
