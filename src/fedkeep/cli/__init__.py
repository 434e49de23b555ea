"""The command line: one file per verb, each a thin call into the library."""

import sys

__all__ = ["main"]


def main() -> None:
    """Runs the command; the verbs are loaded here, so that Ctrl-C while they load is no traceback either."""
    try:
        from fedkeep.cli.app import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(130)
