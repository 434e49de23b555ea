"""The agent's local API: typed messages over a Unix socket, for the Flower client and for `fedkeep agent`."""
