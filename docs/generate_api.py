"""Writes docs/api/index.md from `fedkeep.__all__`; a test fails when it is stale."""

from pathlib import Path

import fedkeep

PAGE = Path(__file__).parent / "api" / "index.md"
GROUPS = {
    "Compare and simulate": ("compare", "simulate", "load_records", "Experiment", "Simulator"),
    "Advice on your own data": ("advise",),
    "Methods": ("SelectionPolicy", "Device", "Server"),
    "Flower": ("Keeper", "KeeperStrategy"),
    "Errors": ("errors",),
}
INTRODUCTION = """# Public names

`import fedkeep` gives these names and no others; each is imported when it is first used. All else
is importable by its module, and may change with a minor version. This page is generated from
`fedkeep.__all__` (`python docs/generate_api.py`).
"""


def page() -> str:
    """Return the whole page."""
    parts = [INTRODUCTION]
    for title, names in GROUPS.items():
        parts.append(f"\n## {title}\n")
        for name in names:
            parts.append(_entry(where(name), f"fedkeep.{name}"))
            if name == "compare":
                parts.append(_entry("fedkeep.api.MethodComparison", "What compare returns"))
    methods = "\n".join(f"| `{name}` | {text} |" for name, text in named_methods())
    parts.append(f"\n## Registered methods\n\n| name | |\n|---|---|\n{methods}\n")
    return "".join(parts)


def _entry(path: str, heading: str) -> str:
    return f"\n::: {path}\n    options:\n      heading_level: 3\n      heading: {heading}\n"


def where(name: str) -> str:
    """Return the path that a public name is defined at."""
    thing = getattr(fedkeep, name)
    if name == "errors":
        return str(thing.__name__)
    return f"{thing.__module__}.{thing.__qualname__}"


def named_methods() -> list[tuple[str, str]]:
    """Return the methods that `compare`, experiments and the demo take by name."""
    from fedkeep.config.methods import DEFAULT_METHOD, METHODS

    found = [(name, method.summary) for name, method in METHODS.items()]
    return [*found, ("default", f"Another name for `{DEFAULT_METHOD}`.")]


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
