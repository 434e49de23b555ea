"""Counts what docs/design.md says of the house in numbers, and writes it there; a test fails when it is off."""

import ast
import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = Path(__file__).with_name("design.md")


def counted() -> dict[str, int]:
    """The rows of the table, over `src` and `experiments/lab`."""
    package, lab = ([*(ROOT / place).rglob("*.py")] for place in ("src", "experiments/lab"))
    texts = [path.read_text(encoding="utf-8") for path in (*package, *lab)]
    lines = [len(text.splitlines()) for text in texts]
    public = [
        node
        for text in texts
        for node in ast.parse(text).body
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_")
    ]
    classes = Counter(node.name for node in public if isinstance(node, ast.ClassDef))
    return {
        "lines of the package": sum(lines[: len(package)]),
        "lines of package and lab": sum(lines),
        "files": len(texts),
        "public classes and functions of modules": len(public),
        "public class names with two meanings": sum(count > 1 for count in classes.values()),
        "files under 40 lines": sum(count < 40 for count in lines),
        "files with worked examples": sum(">>> " in text for text in texts),
    }


def row(name: str) -> re.Pattern[str]:
    """A row of the table; the number between its two groups is that of now."""
    return re.compile(rf"^(\| {re.escape(name)} \| [\d,]+ \| )([\d,]+)(?= \|)", re.MULTILINE)


if __name__ == "__main__":
    text = PAGE.read_text(encoding="utf-8")
    for name, count in counted().items():
        text = row(name).sub(lambda found, count=count: f"{found[1]}{count:,}", text)  # type: ignore[misc]
    PAGE.write_text(text, encoding="utf-8")
