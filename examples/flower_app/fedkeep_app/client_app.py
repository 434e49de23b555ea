"""The devices: an agent's, where the node has one, or simulated ones that catch up when they are woken."""

from __future__ import annotations

from flwr.app import Context

from fedkeep.flower.client_app import make_client_app
from fedkeep.flower.node_device import NodeDevice


def open_device(context: Context) -> NodeDevice:
    """The device behind this node; each kind is imported only where it is used, since this starts often."""
    if socket := context.node_config.get("agent-socket"):
        from fedkeep.flower.agent_device import AgentDevice

        return AgentDevice(str(socket), context.run_config)
    from fedkeep_app.task import simulated_device

    return simulated_device(context)


app = make_client_app(open_device)
