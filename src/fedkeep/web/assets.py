"""The page's files: plain scripts that share one scope, so that a report can join them into one file."""

from importlib import resources

_SCRIPTS = (
    "format elements series axes download chart matrix device gallery overview settings panels members source main"
)
SCRIPTS = tuple(f"{name}.js" for name in _SCRIPTS.split())
"""In the order in which they are loaded."""


def asset(name: str) -> str:
    """The text of one of the page's files."""
    return (resources.files("fedkeep.web") / "page" / name).read_text(encoding="utf-8")


def index() -> str:
    """The live page: the skeleton with references to its style and scripts."""
    tags = "\n".join(f'<script defer src="{name}"></script>' for name in SCRIPTS)
    head = f'<link rel="icon" href="icon.svg">\n<link rel="stylesheet" href="style.css">\n{tags}'
    return asset("skeleton.html").replace("<!-- head -->", head)
