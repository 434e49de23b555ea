"""Writes `digests.json` anew, for a change that is meant to alter numbers.

python -m tests.golden.update [name..]
"""

import dataclasses
import json
import sys

from tests.golden.runs import DIGESTS, RUNS


def main(names: list[str]) -> None:
    known = json.loads(DIGESTS.read_text()) if DIGESTS.exists() else {}
    wanted = names or list(RUNS)
    found = {
        name: dataclasses.asdict(RUNS[name]()) if name in wanted else known[name] for name in RUNS
    }
    DIGESTS.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
