"""The devices: an agent's, where the node has one, or simulated ones."""

from flwr.app import Context

from fedkeep.flower.client_app import NodeDevice, make_client_app, open_agent


def open_device(context: Context) -> NodeDevice:
    """Open the device behind this node; simulated ones are imported only where they are used."""
    if context.node_config.get("agent-socket"):
        return open_agent(context)
    from fedkeep_app.task import simulated_device

    return simulated_device(context)


app = make_client_app(open_device)
