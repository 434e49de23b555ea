"""The files that `test_wrong_inputs` gives to fedkeep: each is wrong in one way."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as arrow
from pyarrow import parquet

GOOD = "device,label,a,b\n" + "".join(
    f"d{i % 3},{'ok' if i % 2 else 'no'},{i * 0.1:.1f},{i % 7}\n" for i in range(60)
)
EXPERIMENT = 'task = { name = "demo", devices = 4 }\ntrain = { rounds = 2, participation = 1.0 }\n'
AGENT = """samples = { shape = [3], labels = 2 }
model = { name = "softmax" }
store = { path = "a.store", budget = 150_000 }
agent = { socket = "a.sock" }
source = [{ kind = "lines" }]
"""
FLEET = """samples = { shape = [3], labels = 2 }
model = { name = "softmax" }
train = { rounds = 2 }
"""
SOURCES = """
def empty(): return iter(())
def number(): return 5
def needs(a): return []
def pairs(): yield 1, 2
def shapes():
    yield "a", [1.0], 0
    yield "a", [1.0, 2.0], 1
def broken():
    yield "a", [1.0], 0
    raise KeyError("pump")
def raises(): return {}["pump"]
def words():
    for i in range(40): yield "a", ["warm"], i % 2
def nothing():
    for i in range(40): yield None, [1.0], i % 2
def ragged():
    for i in range(40): yield "a", [[1.0], [1.0, 2.0]], i % 2
thing = 5
"""
POLICIES = """
from fedkeep.core.policy import SelectionPolicy
class NoScore(SelectionPolicy): pass
class Plain: pass
class Needs(SelectionPolicy):
    size: int
    def score(self, batch, view): return [0.0] * len(batch)
"""
_BINARY = bytes(range(256)) * 8
_TEXTS = {
    "good.csv": GOOD,
    "empty.csv": "",
    "header.csv": "device,label,a\n",
    "ragged.csv": GOOD + "d1,ok,1\n",
    "long.csv": GOOD + "d1,ok,1,2,3\n",
    "twice.csv": GOOD.replace("a,b", "a,a", 1),
    "text.csv": GOOD + "d1,ok,warm,2\n",
    "nan.csv": GOOD + "d1,ok,nan,2\n",
    "inf.csv": GOOD + "d1,ok,inf,2\n",
    "blank.csv": GOOD + "d1,ok,,2\n",
    "huge.csv": GOOD + "d1,ok,1e300,2\n",
    "nolabel.csv": GOOD + "d1,,1,2\n",
    "nodevice.csv": GOOD + ",ok,1,2\n",
    "onelabel.csv": GOOD.replace("no", "ok"),
    "unnamed.csv": GOOD.replace("a,b", ",b", 1),
    "semicolon.csv": GOOD.replace(",", ";"),
    "commas.csv": GOOD.replace(",", ";").replace(".", ","),
    "tabs.csv": GOOD.replace(",", "\t"),
    "onlylabels.csv": "device,label\n" + "a,b\na,c\n" * 5,
    "three.csv": "device,label,a\nx,p,1\ny,q,2\nx,q,3\n",
    "nul.csv": GOOD + "d1,ok,1\0,2\n",
    "quote.csv": GOOD + 'd1,"ok,1,2\n',
    "bigcell.csv": GOOD + "d1," + "k" * 200_000 + ",1,2\n",
    "nowheader.csv": GOOD.split("\n", 1)[1],
    "data.txt": GOOD,
    "sources.py": SOURCES,
    "policies.py": POLICIES,
    "syntax.py": "def broken(:\n",
    "importing.py": "import nothing_of_the_kind\n",
    "failing.py": "1 / 0\n",
    "quits.py": "raise SystemExit(3)\n",
    "good.toml": EXPERIMENT,
    "custom.toml": 'task = { name = "custom" }\ntrain = { rounds = 2, participation = 1.0 }\n',
    "empty.toml": "",
    "broken.toml": "task = {",
    "dupe.toml": EXPERIMENT + "seed = 1\nseed = 2\n",
    "selfbase.toml": 'base = "selfbase.toml"\n' + EXPERIMENT,
    "nobase.toml": 'base = "missing.toml"\n' + EXPERIMENT,
    "numbase.toml": "base = 5\n" + EXPERIMENT,
    "deep.toml": "x = " + "[" * 3000 + "]" * 3000,
    "norun/a.jsonl": "\x01\x02",
    "emptyrun/a.jsonl": "",
    "jsonrun/a.jsonl": '{"x": 1}\n',
    "listrun/a.jsonl": "[1, 2]\n",
    "badapp/pyproject.toml": "[tool\n",
    "fleet.json": '{"capacity": [4, 2], "velocity": [[1, 2], [0, 1]]}',
    "key.short": "abc",
    "notkey": "zz" * 32,
}
_PROFILES = {
    "p_nocap.json": '{"velocity": [[1]]}',
    "p_short.json": '{"capacity": [4], "velocity": [[1], [2]]}',
    "p_wide.json": '{"capacity": [4, 2], "velocity": [[1], [2, 3]]}',
    "p_minus.json": '{"capacity": [4], "velocity": [[-1]]}',
    "p_zerocap.json": '{"capacity": [0], "velocity": [[1]]}',
    "p_text.json": '{"capacity": ["a"], "velocity": [[1]]}',
    "p_nan.json": '{"capacity": [4], "velocity": [[NaN]]}',
    "p_emptyfleet.json": '{"capacity": [], "velocity": []}',
    "p_list.json": "[1]",
    "p_extra.json": '{"capacity": [4], "velocity": [[1]], "speed": 1}',
    "p_hugecap.json": '{"capacity": [1e400], "velocity": [[1]]}',
    "p_bigcap.json": '{"capacity": [99999999999999999999], "velocity": [[1]]}',
    "p_dupe.json": '{"capacity": [4], "capacity": [5], "velocity": [[1]]}',
    "p_bool.json": '{"capacity": [true], "velocity": [[1]]}',
    "p_cut.json": '{"capacity": [4',
    "p_head.csv": "a,b\n1,2\n",
    "p_twice.csv": "device,capacity,x\na,1,1\na,1,1\n",
    "p_text.csv": "device,capacity,x\na,1,fast\n",
    "p_empty.csv": "",
    "p_norow.csv": "device,capacity,x\n",
    "p_ragged.csv": "device,capacity,x,y\na,1,1\n",
    "p_labeltwice.csv": "device,capacity,x,x\na,1,1,1\n",
    "p_noname.csv": "device,capacity,x\n,1,1\n",
    "p_frac.csv": "device,capacity,x\na,1.5,1\n",
}
_BYTES = {
    **{f"binary.{ending}": _BINARY for ending in ("csv", "npz", "parquet", "toml", "json")},
    "empty.npz": b"",
    "empty.parquet": b"",
    "utf16.csv": GOOD.encode("utf-16"),
    "utf16.toml": EXPERIMENT.encode("utf-16"),
    "latin.csv": GOOD.replace("ok", "\u00e9t\u00e9").encode("latin-1"),
    "random.store": os.urandom(20_000),
    "empty.store": b"",
    "zeros.store": bytes(150_000),
}
_FOLDERS = ("folder.csv", "folder.npz", "folder.toml", "folder.json", "emptydir", "noapp")


def make_files(root: Path) -> None:
    """Write all of them."""
    for name in _FOLDERS:
        (root / name).mkdir()
    for name, text in (_TEXTS | _PROFILES | dict(_tables())).items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    for name, content in _BYTES.items():
        (root / name).write_bytes(content)
    for name, arrays in _arrays().items():
        np.savez(root / name, allow_pickle=True, **arrays)
    (root / "truncated.npz").write_bytes((root / "good.npz").read_bytes()[:400])
    flipped = bytearray((root / "good.npz").read_bytes())
    flipped[300] ^= 255
    (root / "flipped.npz").write_bytes(bytes(flipped))
    with (root / "plain.npz").open("wb") as file:
        np.save(file, _x())
    for name, columns in _parquet().items():
        parquet.write_table(arrow.table(columns), root / name)
    (root / "key.short").chmod(0o644)


def _tables() -> Iterator[tuple[str, str]]:
    """CSV files whose rows are computed."""
    rows = range(60)
    yield "regress.csv", "device,label,a\n" + _lines(f"d{i % 3},{i * 0.37:.2f},{i}" for i in rows)
    times = (f"d{i % 3},{i % 2},{1_700_000_000 + i},{i}" for i in rows)
    yield "unix.csv", "device,label,t,a\n" + _lines(times)
    for name, flag in (("testcol", "maybe"), ("alltest", "1"), ("notest", "0")):
        flagged = (f"d{i % 3},{i % 2},{flag},{i}" for i in rows)
        yield f"{name}.csv", "device,label,test,a\n" + _lines(flagged)


def _lines(rows: Iterator[str]) -> str:
    return "".join(f"{row}\n" for row in rows)


def _x() -> Any:
    return np.random.default_rng(0).normal(size=(60, 3))


def _arrays() -> dict[str, dict[str, Any]]:
    x, y, d = _x(), np.arange(60) % 2, np.arange(60) % 3
    good = {"x": x, "y": y, "device": d}
    return {
        "good.npz": good,
        "nox.npz": {"features": x, "y": y, "device": d},
        "noy.npz": {"x": x, "device": d},
        "nod.npz": {"x": x, "y": y},
        "short.npz": good | {"y": y[:5]},
        "scalar.npz": good | {"y": np.int64(1)},
        "xscalar.npz": good | {"x": np.float64(1)},
        "objects.npz": good | {"x": np.array([{}] * 60, dtype=object)},
        "text.npz": good | {"x": np.array(["a"] * 60)},
        "complex.npz": good | {"x": x + 1j},
        "y2.npz": good | {"y": np.stack([y, y], 1)},
        "zero.npz": {name: array[:0] for name, array in good.items()},
        "nofeature.npz": good | {"x": x[:, :0]},
        "big.npz": good | {"x": x * 1e300},
        "none.npz": {},
        "floaty.npz": good | {"y": y + 0.5},
        "floatd.npz": good | {"device": d + 0.5},
        "lost.npz": good | {"device": d + 2.0**60},
        "dates.npz": good | {"x": x.astype("datetime64[s]")},
        "held_out_labels.npz": {"x": x, "y": y + 7},
    }


def _parquet() -> dict[str, dict[str, Any]]:
    good: dict[str, Any] = {"device": ["a", "b"] * 30, "label": ["p", "q"] * 30, "a": [1.0] * 60}
    return {
        "nested.parquet": good | {"a": [[1.0, 2.0]] * 60},
        "null.parquet": good | {"a": [None, 2.0] * 30},
        "nulllabel.parquet": good | {"label": ["p", None] * 30},
        "nolabel.parquet": {"device": good["device"], "a": good["a"]},
    }
