"""fedkeep decides what a federated device keeps of its stream."""

__version__ = "0.1.0"
