"""A Grid whose nodes live in this process: to debug an app without SuperLink and SuperNodes."""

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from flwr.app import Context, Message, RecordDict
from flwr.app.error import Error
from flwr.app.user_config import UserConfig
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity


@dataclass(eq=False)
class InProcessNode:
    """A node: its app, its context, and the key by which it is known."""

    node_id: int
    app: ClientApp | Callable[[Message, Context], Message]
    public_key: bytes
    context: Context


def make_node(
    number: int, app: ClientApp | Callable[[Message, Context], Message], run_config: UserConfig
) -> InProcessNode:
    """Node `number`, which says of itself that it is device `number`."""
    context = Context(
        run_id=1,
        node_id=1000 + number,
        node_config={"device": number},
        state=RecordDict(),
        run_config=run_config,
    )
    return InProcessNode(context.node_id, app, f"key of node {number}".encode(), context)


class InProcessGrid(Grid):
    """Answers each message when it is pushed; messages are serialised by Flower both ways."""

    def __init__(self, nodes: Iterable[InProcessNode]) -> None:
        self.nodes: dict[int, InProcessNode] = {node.node_id: node for node in nodes}
        self._replies: dict[str, Message] = {}
        self._ids = itertools.count()
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
        """Flower asks this global of its own for the sender of every message."""

    def set_run(self, run: Run) -> None:
        """There is one run."""

    @property
    def run(self) -> Run:
        raise AttributeError("a grid in this process has no run")

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        return list(self.nodes)

    def get_nodes(self) -> Iterable[InProcessNode]:  # type: ignore[override]
        return list(self.nodes.values())

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        return [self._push(message) for message in messages]

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        return [self._replies.pop(key) for key in list(message_ids) if key in self._replies]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        return self.pull_messages(self.push_messages(messages))

    def _push(self, message: Message) -> str:
        message_id = f"message-{next(self._ids)}"
        message.metadata.__dict__["_message_id"] = message_id
        node = self.nodes.get(message.metadata.dst_node_id)
        if node is not None:
            reply = _answer(node, message_from_proto(message_to_proto(message)))
            self._replies[message_id] = message_from_proto(message_to_proto(reply))
        return message_id


def _answer(node: InProcessNode, message: Message) -> Message:
    """The app's reply; what the app raises becomes an error reply, as it does on a SuperNode."""
    try:
        return node.app(message, node.context)
    except Exception as error:  # noqa: BLE001 - any failure of a node is the node's
        return Message(
            Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, f"{type(error).__name__}: {error}"),
            reply_to=message,
        )
