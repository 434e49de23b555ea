"""The ClientApp: a thin, torch-free shim between Flower's messages and the device behind the node."""

from __future__ import annotations

from collections.abc import Callable

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from msgspec import structs

from fedkeep.core.errors import ConfigError
from fedkeep.flower import codec
from fedkeep.flower.node_device import NodeDevice
from fedkeep.link.messages import DeviceRequest, EncryptedProfiled, Profiled

SUM_ACTIONS = ("share", "mask", "unmask")
"""The exchanges of a secure sum after the order, which is answered with keys."""


def make_client_app(open_device: Callable[[Context], NodeDevice]) -> ClientApp:
    """A ClientApp that answers profile queries, orders and evaluations with the device of its context."""
    app = ClientApp()

    def answer(message: Message, context: Context) -> Message:
        device, request = open_device(context), codec.decode(message.content, DeviceRequest)
        reply = device.reply(request)
        if isinstance(reply, Profiled | EncryptedProfiled):
            number = device_number(context)
            reply = structs.replace(reply, device=number, name=str(context.node_config.get("name", f"device {number}")))
        return Message(codec.encode(reply), reply_to=message)

    app.query("profile")(answer)
    app.train()(answer)
    app.evaluate()(answer)
    for action in SUM_ACTIONS:
        app.train(action)(answer)
    return app


def device_number(context: Context) -> int:
    """The device's number: `device` of the node's settings, or the partition in Flower's simulation."""
    for key in ("device", "partition-id"):
        number = context.node_config.get(key)
        if isinstance(number, int) and number >= 0:
            return number
    raise ConfigError("the node has no number: start its SuperNode with --node-config 'device=0'")
