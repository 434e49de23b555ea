"""The device behind a node whose agent runs beside it: every question goes through the agent's socket."""

from __future__ import annotations

from flwr.app import Context
from flwr.app.user_config import UserConfig
from flwr.clientapp import ClientApp

from fedkeep.core.errors import ConfigError
from fedkeep.flower.client_app import make_client_app
from fedkeep.link.client import AgentClient
from fedkeep.link.messages import AskProfile, DeviceReply, DeviceRequest
from fedkeep.presets import DEFAULT, DEFAULT_POLICY


def make_agent_app() -> ClientApp:
    """A ClientApp whose devices are agents, each at the `agent-socket` of its node's settings."""
    return make_client_app(_open_agent)


def _open_agent(context: Context) -> AgentDevice:
    socket = context.node_config.get("agent-socket")
    if not socket:
        raise ConfigError("the node has no agent: start its SuperNode with --node-config 'agent-socket=\"PATH\"'")
    return AgentDevice(str(socket), context.run_config)


class AgentDevice:
    """Owns nothing: stream, store, model and training are the agent's, and outlive every ClientApp process.

    The policy and the preset of the run are the server's half of a method and the agent's configuration is the other
    half: a device where they differ says so instead of its profile, and the run goes on without it.
    """

    def __init__(self, socket_path: str, run_config: UserConfig, timeout: float = 600.0) -> None:
        self._path, self._timeout = socket_path, timeout
        self._method = str(run_config.get("policy.name", DEFAULT_POLICY)), str(run_config.get("preset", DEFAULT))

    def reply(self, request: DeviceRequest) -> DeviceReply:
        with AgentClient(self._path, self._timeout) as agent:
            if isinstance(request, AskProfile):
                self._require_method(agent)
            return agent.ask(request, DeviceReply)

    def _require_method(self, agent: AgentClient) -> None:
        now = agent.status()
        if (now.policy, now.preset) != self._method:
            raise ConfigError(
                f"the agent's policy is '{now.policy}' with preset '{now.preset}', the run's is "
                f"'{self._method[0]}' with '{self._method[1]}': make the two the same"
            )
