"""The command line: one file per verb, each a thin call into the library."""

import sys

from fedkeep.core.errors import FedkeepError

__all__ = ["main"]


def main() -> None:
    """Run the command; a mistake ends in a sentence and exit code 2.

    Ctrl-C ends in no traceback either, even while verbs load.
    """
    try:
        from fedkeep.cli.app import app

        app()
    except KeyboardInterrupt:
        sys.exit(130)
    except FedkeepError as error:
        mistake = str(error)
    # A full disk, a folder that may not be written: a traceback would explain neither.
    except OSError as error:
        mistake = ": ".join(
            str(part) for part in (error.filename, error.strerror or error) if part is not None
        )
    except MemoryError as error:
        mistake = f"not enough memory: {error or 'lower the sizes that were asked for'}"
    else:
        return
    from fedkeep.protocol.printing import printable

    print("fedkeep: " + "\n".join(map(printable, mistake.split("\n"))), file=sys.stderr)
    sys.exit(2)
