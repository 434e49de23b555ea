"""Turns links from pages to repository files that the site does not hold into plain text."""

import re
from typing import Any

OUTWARD = re.compile(r"\[([^\]]+)\]\(\.\./[^)]+\)")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The page as the site shows it; pages in folders of `docs/` may link to those beside them."""
    return markdown if "/" in page.file.src_uri else OUTWARD.sub(r"\1", markdown)
