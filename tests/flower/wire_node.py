"""A hand-made node: it has a SuperNode's key, speaks Flower's FleetProfiles API, sends anything."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Message, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.inflatable.inflatable_utils import push_object_contents_from_iterable
from flwr.supernode.fleet_http_connection import http_request_response

from tests.flower.real_fleet import RealFleet, wait_until


@dataclass(frozen=True)
class WireNode:
    """An open connection to a SuperLink."""

    node_id: int
    calls: tuple[Any, ...]
    """Flower's functions: receive, send, get_run, get_fab, pull_object, push_object, confirm."""

    def asked(self, seconds: float = 120.0) -> Message:
        """The next message for this node, without its content."""
        found: list[Message] = []

        def received() -> bool:
            answer = self.calls[0]()
            found.extend([] if answer is None else [answer[0]])
            return bool(found)

        wait_until(received, seconds, "a message from the server")
        return found[0]

    def reply(self, message: Message, content: RecordDict) -> Message:
        reply = Message(content, reply_to=message)
        reply.metadata.__dict__["_message_id"] = reply.object_id
        return reply

    def send(self, reply: Message) -> int:
        """Sends a reply as a SuperNode does; returns how many objects the SuperLink asked for."""
        tree, objects = get_object_tree(reply), get_all_nested_objects(reply)
        wanted, session = self.calls[1](reply, tree, 0.1)
        contents = ((key, objects[key].deflate()) for key in objects if key in wanted)
        push_object_contents_from_iterable(
            contents, push_object_fn=partial(self.calls[5], reply.metadata.run_id, session)
        )
        return len(wanted)


@contextmanager
def wire_node(fleet: RealFleet, key: ec.EllipticCurvePrivateKey) -> Iterator[WireNode]:
    """Joins the fleet with a key that is registered there."""
    ca = fleet.deployment.credentials.ca_certificate.read_bytes()
    joined = http_request_response(
        fleet.deployment.address, False, ca, (key, key.public_key()), max_retries=3
    )
    with joined as (node_id, *calls):
        yield WireNode(node_id, tuple(calls))
