"""A document as a list of blocks of Markdown and pictures, written with the pictures beside it or as one HTML page."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import TypeAlias

import markdown as renderer

_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:62rem;margin:2rem auto;padding:0 1rem}"
    "body{color:#222;background:#fff}"
    "table{border-collapse:collapse;margin:1rem 0;font-variant-numeric:tabular-nums;display:block;overflow-x:auto}"
    "th,td{border-bottom:1px solid #8884;padding:.25rem .6rem;text-align:left;vertical-align:top}"
    "code{font-size:.9em}@media(prefers-color-scheme:dark){body{color:#ddd;background:#181818}}"
)


@dataclass(frozen=True)
class Picture:
    name: str
    """A file name without its ending."""
    svg: str
    says: str


Block: TypeAlias = str | Picture


def heading(text: str, level: int = 2) -> str:
    return f"{'#' * level} {text}"


def sheet(columns: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: bool = True) -> str:
    """A table; the first column holds names, the others numbers, which stand to the right, unless told otherwise."""
    rule = ["---"] + ["---:" if numbers else "---"] * (len(columns) - 1)
    lines = ([cell.replace("|", "\\|") for cell in line] for line in (columns, rule, *rows))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def markdown(blocks: Iterable[Block], pictures: str) -> str:
    """The document as Markdown; `pictures` is the folder of the pictures, as seen from the document."""
    words = (b if isinstance(b, str) else f"![{b.says}]({pictures}/{b.name}.svg)" for b in blocks)
    return "\n\n".join(words) + "\n"


def html(blocks: Iterable[Block], title: str) -> str:
    """The document as one page that needs nothing else."""
    words = (b if isinstance(b, str) else f"<figure>{b.svg}</figure>" for b in blocks)
    body = renderer.markdown("\n\n".join(words), extensions=["tables"])
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    head += f"<title>{escape(title)}</title><style>{_STYLE}</style>"
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{body}</body></html>\n'
