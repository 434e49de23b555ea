"""A document as a list of blocks, written as Markdown with pictures beside it or as one HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import TypeAlias

_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:62rem;margin:2rem auto;padding:0 1rem}"
    "body{color:#222;background:#fff}"
    "table{border-collapse:collapse;margin:1rem 0;font-variant-numeric:tabular-nums}"
    "th,td{border-bottom:1px solid #8884;padding:.25rem .6rem;text-align:right}"
    "th:first-child,td:first-child,.words th,.words td{text-align:left;vertical-align:top}"
    ".wide{overflow-x:auto}code{font-size:.9em}"
    "@media(prefers-color-scheme:dark){body{color:#ddd;background:#181818}}"
)


@dataclass(frozen=True)
class Heading:
    text: str
    level: int = 2


@dataclass(frozen=True)
class Text:
    text: str


@dataclass(frozen=True)
class Sheet:
    """A table; the first column holds names."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numbers: bool = True
    """Whether the other columns hold numbers, which stand to the right."""


@dataclass(frozen=True)
class Picture:
    name: str
    """A file name without its ending."""
    svg: str
    says: str


Block: TypeAlias = Heading | Text | Sheet | Picture


def markdown(blocks: Sequence[Block], pictures: str) -> str:
    """The document as Markdown; `pictures` is the folder of the pictures, as seen from the document."""
    return "\n".join(_markdown(block, pictures) for block in blocks)


def html(blocks: Sequence[Block], title: str) -> str:
    """The document as one page that needs nothing else."""
    body = "\n".join(map(_html, blocks))
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    head += f"<title>{escape(title)}</title><style>{_STYLE}</style>"
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{body}</body></html>\n'


def _markdown(block: Block, pictures: str) -> str:
    match block:
        case Heading():
            return f"{'#' * block.level} {block.text}\n"
        case Text():
            return f"{block.text}\n"
        case Sheet():
            lines = [
                block.columns,
                ("---",) + ("---:" if block.numbers else "---",) * (len(block.columns) - 1),
                *block.rows,
            ]
            return "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines) + "\n"
        case Picture():
            return f"![{block.says}]({pictures}/{block.name}.svg)\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _html(block: Block) -> str:
    match block:
        case Heading():
            return f"<h{block.level}>{escape(block.text)}</h{block.level}>"
        case Text():
            return f"<p>{_inline(block.text)}</p>"
        case Sheet():
            head = "".join(f"<th>{_inline(cell)}</th>" for cell in block.columns)
            rows = "".join(
                "<tr>" + "".join(f"<td>{_inline(cell)}</td>" for cell in row) + "</tr>" for row in block.rows
            )
            kind = "" if block.numbers else ' class="words"'
            return f'<div class="wide"><table{kind}><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
        case Picture():
            return f"<figure>{block.svg}</figure>"


def _inline(text: str) -> str:
    """Backticks to code; all else as it is."""
    parts = escape(text).split("`")
    return "".join(f"<code>{part}</code>" if place % 2 else part for place, part in enumerate(parts))
