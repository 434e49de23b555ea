"""The agent's own entry, without the command line's libraries.

`python -m fedkeep.agent CONFIG.toml`.
"""

import logging
import os
import sys
from pathlib import Path
from typing import Any

from fedkeep.core.errors import ConfigError, DataError, FedkeepError, MissingExtraError
from fedkeep.protocol.printing import printable


def main(arguments: list[str]) -> int:
    """Run the agent.

    What its owner must correct ends in a sentence and exit code 2, what may pass in 1.
    """
    files = [word for word in arguments if not word.startswith("--")]
    flags = {word for word in arguments if word.startswith("--")}
    if len(files) != 1 or flags - {"--until-sources-end"}:
        sys.stderr.write("usage: python -m fedkeep.agent CONFIG.toml [--until-sources-end]\n")
        return 2
    # Linear algebra of this size is fastest on one thread, and the other cores belong to the
    # device.
    for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ.setdefault(variable, "1")
    # Without it hashlib uses Python's own hashes, and 4 MB of OpenSSL are never loaded.
    sys.modules.setdefault("_hashlib", None)  # type: ignore[arg-type]
    over_live_line = "\r\x1b[K" if sys.stderr.isatty() else ""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    logging.getLogger().handlers[0].setFormatter(
        _PrintableFormatter(f"{over_live_line}%(levelname)s %(message)s")
    )
    from fedkeep.agent.remote import RestartError

    try:
        from fedkeep.agent.daemon import RESTARTED, run
        from fedkeep.agent.streams import read_streams

        run(read_streams(Path(files[0])), until_sources_end=bool(flags))
    except RestartError:
        command = [sys.executable, "-m", "fedkeep.agent", *arguments]
        os.execve(sys.executable, command, {**os.environ, RESTARTED: "1"})
    except (FedkeepError, OSError) as error:
        mistake = "\n".join(map(printable, str(error).split("\n")))
        sys.stderr.write(f"fedkeep: {mistake}\n")
        return 2 if isinstance(error, ConfigError | DataError | MissingExtraError) else 1
    return 0


class _PrintableFormatter(logging.Formatter):
    """Escapes what a record, a file's name or an error that it quotes could do to a terminal."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        record.message = printable(record.message)
        if (name := record.threadName or "").startswith("stream "):
            record.message = f"[{name.removeprefix('stream ')}] {record.message}"
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:  # noqa: N802 - logging's name
        return "\n".join(map(printable, super().formatException(ei).splitlines()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
