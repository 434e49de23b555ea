"""The devices: an agent's, where the node has one, or simulated ones that catch up when they are woken."""

from flwr.app import Context

from fedkeep.flower.client_app import NodeDevice, make_client_app, open_agent


def open_device(context: Context) -> NodeDevice:
    """The device behind this node; simulated ones are imported only where they are used, since this starts often."""
    if context.node_config.get("agent-socket"):
        return open_agent(context)
    from fedkeep_app.task import simulated_device

    return simulated_device(context)


app = make_client_app(open_device)
