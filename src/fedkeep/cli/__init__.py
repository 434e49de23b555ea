"""The command line: one file per verb, each a thin call into the library."""

from fedkeep.cli.app import main

__all__ = ["main"]
