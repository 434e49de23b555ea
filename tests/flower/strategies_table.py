"""Every strategy and mod of Flower's by `flwr run`: `python -m tests.flower.strategies_table`.

Each plays three rounds on six virtual nodes of Flower's own simulation, with a Keeper on each
device and `KeeperStrategy` around the strategy. The table goes into docs/flower.md.
"""

import argparse
import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import flwr.serverapp.strategy as strategies
from flwr.app.user_config import UserConfig

from fedkeep.core.errors import FedkeepError
from fedkeep.deploy.local_fleet import LocalFleet, free_port
from tests.flower.real_fleet import Simulation

APP = Path(__file__).parent / "keeper_app"
PAGE = Path("docs/flower.md")
START, END = "<!-- strategies -->", "<!-- end of strategies -->"
NODES, ROUNDS, SECONDS = 6, 3, 600.0
MODS_OF = {
    "DifferentialPrivacyClientSideFixedClipping": "fixedclipping_mod",
    "DifferentialPrivacyClientSideAdaptiveClipping": "adaptiveclipping_mod",
}
"""What these strategies want on their clients."""
OTHER_MODS = ("LocalDpMod", "arrays_size_mod", "message_size_mod", "compression")


class AsStartedByFlower(Simulation):
    """The SuperLink that `flwr run . local` starts installs what an app asks for; ours do not."""

    def superlink(self) -> list[str]:
        left_out = "--disable-runtime-dependency-installation"
        return [word for word in super().superlink() if word != left_out]


def combinations() -> list[tuple[str, str]]:
    """List strategies with the mod that each wants, and FedAvg with every other mod."""
    names = [name for name in strategies.__all__ if name not in {"Result", "Strategy"}]
    return [(name, MODS_OF.get(name, "")) for name in names] + [("FedAvg", m) for m in OTHER_MODS]


def played(fleet: LocalFleet, strategy: str, mod: str, output: Path) -> dict[str, Any]:
    """Play one combination by `flwr run`; an empty answer if it came to nothing."""
    deployment = fleet.deployment
    assert isinstance(deployment, Simulation)
    settings: UserConfig = {
        "strategy": strategy,
        "client-mod": mod,
        "nodes": NODES,
        "rounds": ROUNDS,
    }
    settings["output"] = str(output)
    command = deployment.run_virtual(APP, settings, NODES)
    try:
        said = fleet.call([*command, "--stream"], timeout=SECONDS)
    except (FedkeepError, subprocess.TimeoutExpired) as error:
        said = str(error)
    if output.exists():
        found: dict[str, Any] = json.loads(output.read_text())
        return found
    print(said[-2000:], file=sys.stderr)
    return {}


def row(strategy: str, mod: str, found: dict[str, Any]) -> tuple[str, bool]:
    """Return the table's line, and whether the combination did what it should."""
    trees = strategy.startswith("FedXgb")
    right = found.get("rounds") == ROUNDS and not found.get("errors")
    estimates = found.get("estimates", [])
    right &= trees or min(estimates[1:], default=0) >= NODES // 2  # the first model is of nobody
    accuracy = found.get("accuracy")
    words = "passes as it is" if trees else ", ".join(map(str, estimates)) or "none"
    shown = "" if accuracy is None else f"{accuracy:.2f}"
    outcome = "right" if right else "**failed**"
    return f"| {strategy} | {mod} | {words} | {shown} | {outcome} |", right


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--only", nargs="*", help="these strategies and mods alone; the page keeps its other rows"
    )
    only = parser.parse_args().only
    lines, failed = dict[tuple[str, str], str](), 0
    with TemporaryDirectory() as folder:
        deployment = AsStartedByFlower(Path(folder) / "fleet", port=free_port(), insecure=True)
        with LocalFleet(deployment) as fleet:
            fleet.environment["RAY_worker_niceness"] = "0"  # 15 by default: others starve it
            # A Ray that was killed leaves its address there, and the next would wait for it.
            fleet.environment["RAY_TMPDIR"] = folder
            fleet.start_superlink()
            for number, (strategy, mod) in enumerate(combinations()):
                if only and not {strategy, mod} & set(only):
                    continue
                found = played(fleet, strategy, mod, Path(folder) / f"{number}.json")
                line, right = row(strategy, mod, found)
                print(line, flush=True)
                lines[strategy, mod] = line
                failed += not right
                write_table(lines, PAGE)  # a run that is interrupted leaves what it has played
    return min(failed, 1)


def write_table(lines: dict[tuple[str, str], str], page: Path) -> None:
    """Write these rows into the page, among those of other runs, in the order of `combinations`."""
    before, _, rest = page.read_text(encoding="utf-8").partition(START)
    table, _, after = rest.partition(END)
    earlier = [line for line in table.splitlines() if line.startswith("| ")]
    rows = {tuple(cell.strip() for cell in line.split("|")[1:3]): line for line in earlier}
    rows |= lines
    listed = [rows[each] for each in combinations() if each in rows]
    missing = len(combinations()) - len(listed)
    head = (
        f"flwr {version('flwr')}, by `python -m tests.flower.strategies_table` (`make flower-long`)"
    )
    head += f"; {missing} not run yet:" if missing else ":"
    head += (
        "\n\n| strategy | mod | gradients in rounds 1, 2, 3 | accuracy | |\n|---|---|---|---|---|"
    )
    page.write_text(before + "\n".join([START, head, *listed, END]) + after, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
