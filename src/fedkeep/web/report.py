"""The page's files, and the HTML report: one file that needs no server.

The scripts are plain and share one scope, so that a report can concatenate them.
"""

from base64 import b64encode
from collections.abc import Sequence
from hashlib import sha256
from importlib import resources

import msgspec

from fedkeep.records import Comparison, Run
from fedkeep.web.digest import Digest
from fedkeep.web.feed import Update, compared

_SCRIPTS = (
    "format elements series axes download chart matrix device gallery overview settings panels "
    "members source main"
)
SCRIPTS = tuple(f"{name}.js" for name in _SCRIPTS.split())
"""In the order in which they are loaded."""
DEVICES = 12
"""Limit of the devices of a run whose stores a report shows."""


def asset(name: str) -> str:
    """Return the text of one of the page's files."""
    return (resources.files("fedkeep.web") / "page" / name).read_text(encoding="utf-8")


def index() -> str:
    """Return the live page: the skeleton with references to its style and scripts."""
    tags = "\n".join(f'<script defer src="{name}"></script>' for name in SCRIPTS)
    head = f'<link rel="icon" href="icon.svg">\n<link rel="stylesheet" href="style.css">\n{tags}'
    return asset("skeleton.html").replace("<!-- head -->", head)


def html(runs: Sequence[Run], comparison: Comparison, title: str, words: Sequence[str] = ()) -> str:
    """Return a self-contained page of runs.

    Its content security policy allows its own script and style only.

    Parameters
    ----------
    runs : sequence of Run
        The runs to show.
    comparison : Comparison
        Its base methods come first on the page.
    title : str
        Heading of the page.
    words : sequence of str
        A recommendation, shown above the runs.

    Examples
    --------
    >>> from fedkeep.records import compare
    >>> "Keep the gist." in html([], compare([]), "No run yet", words=["Keep the gist."])
    True
    """
    views, devices = [], {}
    for place, run in enumerate(runs):
        digest, key = Digest(run.header), f"{place}-{run.header.run}"
        for line in (*run.lines, *run.timings):
            digest.add(line)
        digest.devices = {
            device: digest.devices[device] for device in sorted(digest.devices)[:DEVICES]
        }
        views.append(digest.view(key, modified=0.0))
        devices[key] = list(digest.devices.values())
    against = compared(runs, comparison.bases)
    update = Update(
        title=title,
        version=1,
        keys=tuple(devices),
        views=tuple(views),
        comparison=against,
        words=tuple(words),
    )
    script = "\n".join(asset(name) for name in SCRIPTS)
    style = asset("style.css")
    policy = (
        f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; "
        "base-uri 'none'"
    )
    data = (
        msgspec.json.encode({"update": update, "devices": devices}).decode().replace("<", "\\u003c")
    )
    head = (
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f"<style>{style}</style>\n"
        f'<script type="application/json" id="snapshot">{data}</script>'
    )
    start, end = asset("skeleton.html").split("</body>")
    return start.replace("<!-- head -->", head) + f"<script>{script}</script>\n</body>" + end


def _digest(text: str) -> str:
    """Return the name of an inline script or style in a content security policy."""
    return f"sha256-{b64encode(sha256(text.encode()).digest()).decode()}"
