"""The ClientApp: a thin, torch-free shim between Flower's messages and the device behind the node."""

from __future__ import annotations

from collections.abc import Callable

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fedkeep.core.errors import ConfigError, RefusedError
from fedkeep.flower import codec
from fedkeep.flower.node_device import HidingDevice, NodeDevice

SUM_ACTIONS = ("share", "mask", "unmask")
"""The exchanges of a secure sum after the order, which is answered with keys."""
MOST_BYTES = 1 << 28
"""More than any question of a secure sum."""


def make_client_app(open_device: Callable[[Context], NodeDevice]) -> ClientApp:
    """A ClientApp that answers profile queries, orders and evaluations with the device of its context."""
    app = ClientApp()

    @app.query("profile")
    def profile(message: Message, context: Context) -> Message:
        return Message(_profile(message, open_device(context), device_number(context)), reply_to=message)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        device, order = open_device(context), codec.decode_order(message.content)
        terms = codec.terms_of(message.content)
        if terms is None:
            return Message(codec.encode_report(device.participate(order)), reply_to=message)
        return Message(codec.encode_answer(hiding(device).hold(order, terms)), reply_to=message)

    def answer(message: Message, context: Context) -> Message:
        """Any of the later exchanges of a secure sum."""
        question = codec.decode_answer(message.content, MOST_BYTES)
        return Message(codec.encode_answer(hiding(open_device(context)).answer(question)), reply_to=message)

    for action in SUM_ACTIONS:
        app.train(action)(answer)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        evaluation = open_device(context).evaluate(codec.decode_model(message.content))
        return Message(codec.encode_evaluation(evaluation), reply_to=message)

    return app


def hiding(device: NodeDevice) -> HidingDevice:
    """The device, if it can mask what it sends; one that cannot refuses, and says nothing in the clear instead."""
    if not isinstance(device, HidingDevice):
        raise RefusedError("not-secure", "this device masks nothing: set privacy.secure_sum on both sides, or on none")
    return device


def _profile(message: Message, device: NodeDevice, number: int) -> RecordDict:
    """The device's profile as it was asked for, in the clear or encrypted; the device refuses what it does not do."""
    values = message.content.config_records.get(codec.VALUES)
    if not values:
        return codec.encode_profile(device.profile(), number)
    from fedkeep.flower import profile_codec

    answer = device.encrypted_profile(profile_codec.decode_request(values))
    return profile_codec.encode_profile(answer, number)


def device_number(context: Context) -> int:
    """The device's number: `device` of the node's settings, or the partition in Flower's simulation."""
    for key in ("device", "partition-id"):
        number = context.node_config.get(key)
        if isinstance(number, int) and number >= 0:
            return number
    raise ConfigError("the node has no number: start its SuperNode with --node-config 'device=0'")
