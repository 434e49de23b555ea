"""The ClientApp: a thin, torch-free shim between Flower's messages and the device behind the node."""

from __future__ import annotations

from collections.abc import Callable

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedkeep.core.errors import ConfigError
from fedkeep.flower import codec
from fedkeep.flower.node_device import NodeDevice


def make_client_app(open_device: Callable[[Context], NodeDevice]) -> ClientApp:
    """A ClientApp that answers profile queries, orders and evaluations with the device of its context."""
    app = ClientApp()

    @app.query("profile")
    def profile(message: Message, context: Context) -> Message:
        content = codec.encode_profile(open_device(context).profile(), device_number(context))
        return Message(content, reply_to=message)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        report = open_device(context).participate(codec.decode_order(message.content))
        return Message(codec.encode_report(report), reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        evaluation = open_device(context).evaluate(codec.decode_model(message.content))
        return Message(codec.encode_evaluation(evaluation), reply_to=message)

    return app


def device_number(context: Context) -> int:
    """The device's number: `device` of the node's settings, or the partition in Flower's simulation."""
    for key in ("device", "partition-id"):
        number = context.node_config.get(key)
        if isinstance(number, int) and number >= 0:
            return number
    raise ConfigError("the node has no number: start its SuperNode with --node-config 'device=0'")
