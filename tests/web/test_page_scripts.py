"""The page's scripts share one global scope, where the last of two equal names wins."""

import re
from collections import Counter
from pathlib import Path

import fedkeep.web

DECLARATION = re.compile(r"^(?:async )?(?:function|const|let|class) (\w+)", re.MULTILINE)


def test_no_name_is_declared_twice() -> None:
    scripts = sorted((Path(fedkeep.web.__file__).parent / "page").glob("*.js"))
    declared = [name for path in scripts for name in DECLARATION.findall(path.read_text("utf-8"))]
    assert "withInterval" in declared
    assert [name for name, count in Counter(declared).items() if count > 1] == []
