"""Shows docstrings, which are written as plain text, as Markdown."""

import re
from typing import Any

from griffe import Extension, Object

EXAMPLE = re.compile(r"^>>> .*?(?=^\s*$|\Z)", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"(```.*?```|`[^`]*`)", re.DOTALL)


class PlainDocstrings(Extension):
    """Fences examples, which would be quotations, and keeps `<g, G>` from being taken for a tag."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring is not None:
            fenced = EXAMPLE.sub(_fenced, obj.docstring.value)
            parts = CODE.split(fenced)
            parts[::2] = [part.replace("<", "&lt;") for part in parts[::2]]
            obj.docstring.value = "".join(parts)


def _fenced(example: re.Match[str]) -> str:
    return f"```pycon\n{example[0].rstrip()}\n```\n"
