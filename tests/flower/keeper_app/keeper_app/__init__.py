"""An app of somebody's own, played by `flwr run`."""
