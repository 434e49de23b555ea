"""Runs the code in a Markdown page, top to bottom, in a folder of its own.

    python snippets.py PAGE FOLDER

A block that begins with a comment of a file's name (`# mine.toml`) is written to that file. Python
blocks of a page share their names. `sh` blocks run with `fedkeep` and `python` on the path and
copies of the repository's folders beside them. TOML is read by the part of fedkeep it is for. A
`text` block, or one without language, right after a block that ran is what that block prints; `...`
stands for anything. A block that cannot run here has the reason above it,
`<!-- not run: REASON -->`; one that runs until it is stopped, `<!-- runs until stopped -->`.
Numbers with decimals that depend on the machine's libraries stand below
`<!-- decimals may differ by 2 -->`.
"""

import contextlib
import doctest
import io
import os
import re
import shutil
import signal
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FENCE = re.compile(
    r"(?:^ *<!-- (?P<remark>"
    r"not run: [^\n]+?|runs until stopped|decimals may differ by [\d.]+"
    r") -->\n\s*)?"
    r"^(?P<indent> *)```(?P<language>\w*)[^\n]*\n(?P<text>.*?)^(?P=indent)```[ ]*$",
    re.MULTILINE | re.DOTALL,
)
FILE_NAME = re.compile(r"# ([\w.-]+\.(?:py|toml))\n")
DECIMALS = re.compile(r"[+-]?\d+\.\d+")
RUN = ("python", "sh", "console", "toml")
SECONDS = 300


@dataclass(frozen=True)
class Block:
    """One fenced block, its first line's number, and whether it directly follows the one before."""

    language: str
    text: str
    line: int
    remark: str
    follows: bool

    @property
    def file_name(self) -> str | None:
        named = FILE_NAME.match(self.text)
        return named[1] if named else None


def blocks(page: str) -> list[Block]:
    """The fenced blocks of a page."""
    found: list[Block] = []
    end = 0
    for match in FENCE.finditer(page):
        indent = len(match["indent"])
        text = "".join(
            line[indent:] if line.strip() else line
            for line in match["text"].splitlines(keepends=True)
        )
        line = page.count("\n", 0, match.start("text"))
        follows = bool(found) and not page[end : match.start()].strip()
        found.append(Block(match["language"], text, line, match["remark"] or "", follows))
        end = match.end()
    return found


class Runner:
    """The state of one page while its blocks run."""

    def __init__(self, page: Path) -> None:
        self._page = page
        self._names: dict[str, Any] = {"__name__": "__main__"}

    def run(self) -> int:
        """Runs every block; returns how many did something."""
        ran, printed = 0, ""
        for block in blocks(self._page.read_text(encoding="utf-8")):
            if block.language in ("", "text") and block.follows and printed:
                self._compare(block, printed)
                continue
            printed = ""
            if block.language in RUN and not block.remark.startswith("not run"):
                with self._told(block):
                    printed = self._play(block)
                ran += 1
        return ran

    def _play(self, block: Block) -> str:
        """Runs a block; returns what it printed."""
        if block.file_name:
            Path(block.file_name).write_text(block.text, encoding="utf-8")
        if block.language == "toml":
            _check_table(tomllib.loads(block.text))
            return ""
        return self._python(block) if block.language == "python" else _shell(block)

    def _python(self, block: Block) -> str:
        code = compile("\n" * block.line + block.text, str(self._page), "exec")
        if block.file_name:
            return ""
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(code, self._names)
        return out.getvalue()

    def _compare(self, block: Block, printed: str) -> None:
        expected, got, rules = block.text, printed, doctest.ELLIPSIS
        if block.remark.startswith("decimals"):
            rules |= doctest.NORMALIZE_WHITESPACE
            within = float(block.remark.split()[-1])
            pairs = zip(DECIMALS.findall(expected), DECIMALS.findall(got), strict=False)
            if all(abs(float(one) - float(other)) <= within for one, other in pairs):
                expected, got = (DECIMALS.sub("0.0", text) for text in (expected, got))
        if not doctest.OutputChecker().check_output(expected, got, rules):
            raise SystemExit(f"{self._page}:{block.line}: expected\n{block.text}got\n{printed}")

    @contextlib.contextmanager
    def _told(self, block: Block) -> Any:
        """Names the page and the line where a block fails."""
        try:
            yield
        except BaseException:
            print(f"{self._page}:{block.line}: this block failed:\n{block.text}", file=sys.stderr)
            raise


def _shell(block: Block) -> str:
    lines = block.text.splitlines()
    if block.language == "console":
        lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    command = ["sh", "-euc", "\n".join(lines)]
    if block.remark == "runs until stopped":
        return _until_it_speaks(command)
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    if done.returncode:
        raise SystemExit(f"exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def _until_it_speaks(command: list[str]) -> str:
    """The first line of a command that goes on; it must be running when it is stopped then."""
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(1)
        running = process.poll() is None
        if running:
            os.killpg(process.pid, signal.SIGTERM)
    if not (line and running):
        raise SystemExit(f"it ended by itself with exit code {process.returncode}")
    return line


def _check_table(table: dict[str, Any]) -> None:
    """Reads the table with the part of fedkeep that it is for."""
    from fedkeep.agent.assembly import parse_config
    from fedkeep.config.experiment import expand
    from fedkeep.config.method import parse_fleet
    from fedkeep.privacy.options import PrivacyOptions
    from fedkeep.tables import build

    if "samples" in table:
        (parse_config if "store" in table else parse_fleet)(table)
    elif set(table) == {"privacy"}:
        build(PrivacyOptions, table["privacy"], "privacy")
    elif "tool" not in table:
        assert expand({"task": {"name": "demo"}, **table})


def main(page: Path, folder: Path) -> None:
    """Runs a page in an empty folder, with the command line on the path."""
    tools = folder / "bin"
    tools.mkdir(parents=True)
    for name, command in (("fedkeep", f"{sys.executable} -m fedkeep"), ("python", sys.executable)):
        (tools / name).write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        (tools / name).chmod(0o755)
    for name in ("benchmarks", "examples", "experiments"):
        shutil.copytree(ROOT / name, folder / name)
    os.environ["PATH"] = f"{tools}:{os.environ['PATH']}"
    os.environ["PYTHONPATH"] = f"{ROOT / 'src'}:{os.environ.get('PYTHONPATH', '')}"
    os.chdir(folder)
    sys.path.insert(0, str(ROOT / "src"))
    sys.path.append(str(folder))
    print(Runner(page).run())


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve())
