"""The ClientApp: a thin layer without torch between Flower's messages and a node's device."""

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from msgspec import structs

from fedkeep.config.canonical import present_name
from fedkeep.config.presets import DEFAULT, DEFAULT_POLICY
from fedkeep.core.errors import ConfigError
from fedkeep.flower import codec
from fedkeep.protocol.client import AgentClient
from fedkeep.protocol.messages import (
    AskProfile,
    DeviceReply,
    DeviceRequest,
    EncryptedProfiled,
    Profiled,
)


class NodeDevice(Protocol):
    """A device as a ClientApp sees it: in this process, or behind an agent's socket."""

    def reply(self, request: DeviceRequest) -> DeviceReply:
        """Answer a server's question; raises where it refuses."""


def make_client_app(open_device: Callable[[Context], NodeDevice]) -> ClientApp:
    """Make a ClientApp that answers profile queries, orders and evaluations.

    Parameters
    ----------
    open_device
        From the context to the device that answers.
    """
    app = ClientApp()

    def answer(message: Message, context: Context) -> Message:
        device, request = open_device(context), codec.decode(message.content, DeviceRequest)
        if isinstance(request, AskProfile) and request.encrypted is not None:
            request = AskProfile(replace(request.encrypted, device=device_number(context)))
        reply = device.reply(request)
        if isinstance(reply, Profiled | EncryptedProfiled):
            number = device_number(context)
            reply = structs.replace(
                reply, device=number, name=str(context.node_config.get("name", f"device {number}"))
            )
        return Message(codec.encode(reply), reply_to=message)

    later = map(
        app.train, ("share", "mask", "unmask")
    )  # of a secure sum, whose order is answered with keys
    for register in (app.evaluate(), app.query("profile"), app.train(), *later):
        register(answer)
    return app


def device_number(context: Context) -> int:
    """Read a device's number: `device` of the node's settings, or a simulation's partition.

    >>> from flwr.app import RecordDict
    >>> device_number(Context(1, 7, {"device": 3}, state=RecordDict(), run_config={}))
    3
    """
    for key in ("device", "partition-id"):
        number = context.node_config.get(key)
        if isinstance(number, int) and number >= 0:
            return number
    raise ConfigError("the node has no number: start its SuperNode with --node-config 'device=0'")


class AgentDevice:
    """The agent behind a node, which owns stream, store, model and training.

    They outlive every ClientApp process.
    The agent's profile says what its method must have like the server's, which compares the two
    (`config.agreement`). An agent of an earlier release does not say it: there policy and preset
    must be the run's, or the device reports the difference instead of its profile.
    """

    def __init__(self, context: Context) -> None:
        self._path = str(context.node_config.get("agent-socket", ""))
        if not self._path:
            raise ConfigError(
                "the node has no agent: start its SuperNode with "
                "--node-config 'agent-socket=\"PATH\"'"
            )
        run = context.run_config
        policy = present_name("policy", str(run.get("policy.name", DEFAULT_POLICY)))
        self._method = policy, str(run.get("preset", DEFAULT))

    def reply(self, request: DeviceRequest) -> DeviceReply:
        """Answer a server's question."""
        with AgentClient(self._path) as agent:
            reply: DeviceReply = agent.ask(request, DeviceReply)
            if isinstance(reply, Profiled | EncryptedProfiled) and reply.agreement is None:
                now = agent.status()
                method = present_name("policy", now.policy), now.preset
                if method != self._method:
                    raise ConfigError(
                        f"the agent's policy is '{now.policy}' with preset '{now.preset}', "
                        f"the run's is '{self._method[0]}' with '{self._method[1]}': "
                        "make the two the same"
                    )
            return reply


open_agent = AgentDevice
"""Opens the agent at the `agent-socket` of the node's settings."""
app = make_client_app(open_agent)
"""Of a node beside an agent, which is all that the app of a `fleet.toml` needs."""
