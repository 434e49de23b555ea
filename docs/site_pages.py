"""What the site adds to the pages of `docs`: RESULTS with its figures, and links that end in it.

Links from pages to files that the site does not hold become plain text; on the repository's own
pages they stay links.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
RESULTS = "experiments/RESULTS.md"
PLOTS = "experiments/results/plots"
LINK = re.compile(r"(!?)\[([^\]]*)\]\((\.\.?/[^)#\s]+|[\w./-]+)(#[^)]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Add RESULTS as the page `results.md`, and its figures."""
    text = (ROOT / RESULTS).read_text(encoding="utf-8")
    files.append(File.generated(config, "results.md", content=text))
    for plot in sorted((ROOT / PLOTS).glob("*.svg")):
        uri = f"results/plots/{plot.name}"
        files.append(File.generated(config, uri, abs_src_path=str(plot)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return the page with links that lead somewhere on the site, or are plain text."""
    folder = posixpath.dirname(page.file.src_uri)

    def link(found: re.Match[str]) -> str:
        image, words, target, anchor = found.groups()
        whole = posixpath.normpath(posixpath.join("docs", folder, target))
        if whole.startswith("docs/"):
            return found[0]
        if whole == RESULTS:
            target = posixpath.relpath("results.md", folder or ".")
        elif whole.startswith(PLOTS):
            name = posixpath.basename(whole)
            target = posixpath.relpath(f"results/plots/{name}", folder or ".")
        else:
            return words
        return f"{image}[{words}]({target}{anchor or ''})"

    return LINK.sub(link, markdown)
