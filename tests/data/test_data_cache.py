"""Files found, fetched, resumed and refused, against a real server on loopback."""

import gzip
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from hashlib import md5, sha256
from pathlib import Path

import numpy as np
import pytest

from fedkeep.core.errors import DataError
from fedkeep.data.cache import RemoteFile, check, find, obtain, places, remembered, user_cache

CONTENT = bytes(range(256)) * 14
SCRIPT = Path(__file__).with_name("file_server.py")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("FEDKEEP_DATA", raising=False)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "cache" / "fedkeep"


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[[str], str]]:
    started: list[subprocess.Popen[str]] = []
    folder = tmp_path / "served"
    folder.mkdir()
    (folder / "numbers.bin").write_bytes(CONTENT)

    def start(mode: str) -> str:
        command = [sys.executable, str(SCRIPT), str(folder), mode]
        started.append(process := subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        assert process.stdout is not None
        return f"http://127.0.0.1:{process.stdout.readline().strip()}"

    yield start
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def remote(
    address: str | None, name: str = "numbers.bin", checksum: str | None = None
) -> RemoteFile:
    url = f"{address}/{name}" if address else None
    return RemoteFile(
        "toys", name, url, checksum or sha256(CONTENT).hexdigest(), how="ask the author for it"
    )


def requests(tmp_path: Path) -> list[str]:
    return (tmp_path / "served" / "requests.log").read_text().splitlines()


def test_a_missing_file_is_fetched_once_with_progress(
    serve: Callable[[str], str], cache: Path, tmp_path: Path
) -> None:
    file = remote(serve("ranges"))
    seen: list[tuple[str, int, int | None]] = []
    path = obtain(file, lambda *step: seen.append(step))
    assert path == cache / "toys" / "numbers.bin"
    assert path.read_bytes() == CONTENT
    assert seen[-1] == ("numbers.bin", len(CONTENT), len(CONTENT))
    assert obtain(file) == path
    assert len(requests(tmp_path)) == 1
    assert {p.name for p in path.parent.iterdir()} == {"numbers.bin", ".lock"}


def test_a_broken_download_goes_on_where_it_stopped(
    serve: Callable[[str], str], cache: Path, tmp_path: Path
) -> None:
    part = cache / "toys" / "numbers.bin.part"
    part.parent.mkdir(parents=True)
    part.write_bytes(CONTENT[:1234])
    seen: list[int] = []
    assert (
        obtain(remote(serve("ranges")), lambda _, have, __: seen.append(have)).read_bytes()
        == CONTENT
    )
    assert requests(tmp_path) == ["/numbers.bin bytes=1234-"]
    assert seen[0] > 1234


def test_a_server_without_ranges_sends_all_again(serve: Callable[[str], str], cache: Path) -> None:
    part = cache / "toys" / "numbers.bin.part"
    part.parent.mkdir(parents=True)
    part.write_bytes(b"something else")
    assert obtain(remote(serve("plain"))).read_bytes() == CONTENT


def test_dropped_connections_are_survived(serve: Callable[[str], str], tmp_path: Path) -> None:
    assert obtain(remote(serve("drops"))).read_bytes() == CONTENT
    assert requests(tmp_path)[1:] == [f"/numbers.bin bytes={n}000-" for n in (1, 2, 3)]


def test_endless_drops_end_in_a_sentence_and_keep_what_came(
    serve: Callable[[str], str], cache: Path, tmp_path: Path
) -> None:
    address = serve("drops")
    (tmp_path / "served" / "long.bin").write_bytes(CONTENT * 3)
    with pytest.raises(DataError, match="what came is kept, try again"):
        obtain(remote(address, "long.bin"))
    assert (cache / "toys" / "long.bin.part").stat().st_size == 5000


def test_a_complete_part_is_taken_as_it_is(serve: Callable[[str], str], cache: Path) -> None:
    part = cache / "toys" / "numbers.bin.part"
    part.parent.mkdir(parents=True)
    part.write_bytes(CONTENT)
    assert obtain(remote(serve("ranges"))).read_bytes() == CONTENT


def test_a_wrong_download_is_refused_with_both_checksums_and_thrown_away(
    serve: Callable[[str], str], cache: Path
) -> None:
    with pytest.raises(DataError, match="expected " + "0" * 64) as refused:
        obtain(remote(serve("ranges"), checksum="0" * 64))
    assert sha256(CONTENT).hexdigest() in str(refused.value)
    assert [p.name for p in (cache / "toys").iterdir()] == [".lock"]


def test_two_processes_that_want_the_same_file_fetch_it_once(
    serve: Callable[[str], str], tmp_path: Path
) -> None:
    file = remote(serve("ranges"))
    code = (
        "import sys; from fedkeep.data.cache import RemoteFile, obtain; "
        "print(obtain(RemoteFile('toys', 'numbers.bin', sys.argv[1], sys.argv[2])))"
    )
    command = [sys.executable, "-c", code, str(file.url), file.checksum]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    answers = {process.communicate()[0] for process in processes}
    assert len(answers) == 1
    assert Path(answers.pop().strip()).read_bytes() == CONTENT
    assert len(requests(tmp_path)) == 1


def test_a_404_is_one_sentence(serve: Callable[[str], str]) -> None:
    with pytest.raises(DataError, match=r"cannot download .*/nothing\.bin: 404"):
        obtain(remote(serve("ranges"), "nothing.bin"))


def test_no_server_is_one_sentence() -> None:
    with pytest.raises(DataError, match="cannot download"):
        obtain(remote("http://127.0.0.1:9"))


def test_a_file_only_the_user_can_fetch_says_how_and_where(cache: Path) -> None:
    with pytest.raises(DataError, match="ask the author for it") as refused:
        obtain(remote(None))
    assert str(cache / "toys" / "numbers.bin") in str(refused.value)


@pytest.mark.parametrize("inside", ["toys/numbers.bin", "numbers.bin"])
def test_the_users_folder_comes_first_laid_out_or_flat(
    inside: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDKEEP_DATA", str(tmp_path / "mine"))
    (path := tmp_path / "mine" / inside).parent.mkdir(parents=True)
    path.write_bytes(CONTENT)
    assert find(remote(None)) == path
    assert obtain(remote(None)) == path
    assert places() == (tmp_path / "mine", user_cache(), Path("/usr/share/datasets"))


def test_a_wrong_file_in_the_users_folder_is_named_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDKEEP_DATA", str(tmp_path))
    (tmp_path / "numbers.bin").write_bytes(b"wrong")
    with pytest.raises(DataError, match="is not the file it should be"):
        obtain(remote(None))
    assert (tmp_path / "numbers.bin").read_bytes() == b"wrong"


def test_checksums_may_cover_what_is_inside(tmp_path: Path) -> None:
    for level in (1, 9):
        (tmp_path / "a.gz").write_bytes(gzip.compress(CONTENT, level))
        check(
            tmp_path / "a.gz",
            RemoteFile("", "", None, md5(CONTENT).hexdigest(), "md5", "gzip content"),
        )
    expected = sha256(b"a.csv1,2b.csv3,4").hexdigest()
    for names in (("x/b.csv", "x/a.csv", "x/readme"), ("a.csv", "y/z/b.csv")):
        with zipfile.ZipFile(tmp_path / "t.zip", "w") as archive:
            for name in names:
                archive.writestr(name, "1,2" if name.endswith("a.csv") else "3,4")
        check(tmp_path / "t.zip", RemoteFile("", "", None, expected, of="zipped CSV files"))
        with pytest.raises(
            DataError, match=f"sha256 of the zipped CSV files is {expected}, expected 00"
        ):
            check(tmp_path / "t.zip", RemoteFile("", "", None, "00", of="zipped CSV files"))


@pytest.mark.parametrize("of", ["gzip content", "zipped CSV files"])
def test_a_damaged_archive_is_refused(of: str, tmp_path: Path) -> None:
    (tmp_path / "bad").write_bytes(gzip.compress(CONTENT)[:-20])
    with pytest.raises(DataError, match="is damaged"):
        check(tmp_path / "bad", RemoteFile("", "", None, "00", of=of))  # type: ignore[arg-type]


def test_parsed_data_is_made_once_and_made_anew_when_damaged(cache: Path) -> None:
    made = []

    def make() -> dict[str, np.ndarray]:
        made.append(1)
        return {"a": np.arange(3)}

    for _ in range(2):
        assert remembered("toy-1", make)["a"].tolist() == [0, 1, 2]
    assert len(made) == 1
    (cache / "parsed" / "toy-1.npz").write_bytes(b"PK damaged")
    assert remembered("toy-1", make)["a"].tolist() == [0, 1, 2]
    assert len(made) == 2
    assert {p.name for p in (cache / "parsed").iterdir()} == {"toy-1.npz", ".lock"}


def test_a_cache_that_cannot_be_written_does_not_stop_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert remembered("toy-1", lambda: {"a": np.arange(2)})["a"].tolist() == [0, 1]
    with pytest.raises(DataError, match="cannot write"):
        obtain(remote("http://127.0.0.1:9"))
