"""`module:name` and `file.py:name` lead to what they say, or to a sentence."""

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

from fedkeep.core.errors import ConfigError
from fedkeep.loading import load_object


def test_files_of_one_name_in_two_folders_are_two_modules(tmp_path: Path) -> None:
    for place, folder in enumerate(("one", "two")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.py").write_text(f"PLACE = {place}\n")
    assert [load_object(f"{tmp_path}/{folder}/mine.py:PLACE") for folder in ("one", "two")] == [
        0,
        1,
    ]


def test_a_file_called_like_a_library_is_the_file(tmp_path: Path) -> None:
    (tmp_path / "random.py").write_text("MINE = 'mine'\n")
    assert load_object(f"{tmp_path}/random.py:MINE") == "mine"
    with ProcessPoolExecutor(
        1, get_context("spawn")
    ) as workers:  # which import the library of that name
        assert workers.submit(abs, -1).result() == 1


def test_a_file_may_import_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "a_neighbour_of_it.py").write_text("VALUE = 7\n")
    (tmp_path / "asking.py").write_text("from a_neighbour_of_it import VALUE\n")
    assert load_object(f"{tmp_path}/asking.py:VALUE") == 7


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "there is no file .*mine.py"),
        ("def broken(:\n", "cannot import .* in line 1"),
        ("import no_such_library_at_all\n", "No module named 'no_such_library_at_all'"),
        ("Polcy = 1\n", "has no 'Policy': did you mean 'Polcy'?"),
    ],
)
def test_a_file_that_cannot_be_used_is_reported_in_a_sentence(
    tmp_path: Path, text: str | None, message: str
) -> None:
    if text is not None:
        (tmp_path / "mine.py").write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_object(f"{tmp_path}/mine.py:Policy")
