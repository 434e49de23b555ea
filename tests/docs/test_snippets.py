"""Every snippet in the README and the documentation runs."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RUNNER = Path(__file__).with_name("snippets.py")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
RUNS = re.compile(r"^ *```(?:python|sh|console|toml)\b", re.MULTILINE)


def run(page: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(RUNNER), str(page), str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=900, check=False
    )


@pytest.mark.parametrize(
    "page", [p for p in PAGES if RUNS.search(p.read_text())], ids=lambda page: page.stem
)
def test_the_snippets_of_a_page_run(page: Path, tmp_path: Path) -> None:
    done = run(page, tmp_path / "page")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("page", "says"),
    [
        ("```python\n1 / 0\n```\n", "page.md:1: this block failed"),
        ("```sh\nfalse\n```\n", "exit code 1"),
        ("```console\n$ fedkeep nonsense\n```\n", "No such command"),
        ("```toml\nstorage = { capcity = 3 }\n```\n", "capacity"),
        ("```python\nprint(2 + 2)\n```\n\n```text\n5\n```\n", "expected\n5\ngot\n4"),
        ("<!-- runs until stopped -->\n```sh\necho done\n```\n", "ended by itself"),
        (
            "```python\nprint(5.5)\n```\n<!-- decimals may differ by 2 -->\n```text\n2.0\n```\n",
            "expected\n2.0\ngot\n5.5",
        ),
    ],
)
def test_a_snippet_that_does_not_work_is_found(page: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text(page)
    done = run(tmp_path / "page.md", tmp_path / "folder")
    assert done.returncode != 0
    assert says in done.stderr


def test_blocks_share_names_files_and_order(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text(
        "- a list\n\n    ```python\n    answer = 42\n    ```\n\n"
        "```python\n# other.py\nfrom there import nothing\n```\n\n"
        "<!-- not run: it would fail -->\n```sh\nfalse\n```\n\n"
        "```sh\nls other.py\npython -c 'print(6 * 7)'\n```\n```text\nother...42\n```\n\n"
        "```python\nprint(answer)\n```\n```text\n42\n```\n"
        "```python\nprint('| 86.5  |')\n```\n<!-- decimals may differ by 2 -->\n"
        "```text\n| 85.1 |\n```\n"
    )
    done = run(tmp_path / "page.md", tmp_path / "folder")
    assert (done.returncode, done.stdout) == (0, "5\n"), done.stderr
