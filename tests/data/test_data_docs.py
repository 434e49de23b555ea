"""The page on one's own data: its code runs, and its experiments resolve and load."""

import re
import sys
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest

from fedkeep.config.experiment import expand
from fedkeep.data.custom import Custom

PAGE = Path(__file__).parents[2] / "docs" / "own-data.md"
BLOCK = re.compile(r"```(\w+)\n(.*?)```", re.DOTALL)


def test_everything_on_the_page_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "my_samples", raising=False)  # of another test
    blocks = BLOCK.findall(PAGE.read_text())
    for language, text in blocks:
        named = re.match(r"# (\w+\.py)\n", text)
        if language == "csv":
            Path("mine.csv").write_text(text)
        elif language == "python" and named:
            Path(named[1]).write_text(text)
        elif language == "python":
            exec(text, {})
    experiments = [tomllib.loads(text) for language, text in blocks if language == "toml"]
    for experiment in experiments:
        for cell in expand({**experiments[0], **experiment}):
            assert cell.experiment.task.load(seed=0).devices in (12, 30)
    assert len(experiments) == 4
    assert (
        Custom(path="mine.csv").load(seed=0).label_names
        == Custom(source="my_samples:read").load(seed=0).label_names
    )


def test_every_key_of_the_task_is_on_the_page() -> None:
    page = PAGE.read_text()
    assert [field.name for field in fields(Custom) if f"`{field.name}`" not in page] == []
