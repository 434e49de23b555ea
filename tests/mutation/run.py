"""The mutation score of an area: `python -m tests.mutation.run core --per-file 20`.

mutmut and cosmic-ray start an interpreter per mutant, which takes a second or two of imports each.
Here the libraries are imported once and each mutant is a fork of that process; it runs only the
tests that execute the changed lines, quickest first, until one fails. Mutants are spread evenly
over each file, and hypothesis draws the same examples in each run: the score repeats.
"""

import argparse
import contextlib
import importlib
import importlib.abc
import importlib.machinery
import json
import os
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any

import pytest

from tests.mutation.operators import Mutant, mutants

SRC = Path("src").resolve()
CORE_TESTS = [
    "tests/core",
    "tests/contract",
    "tests/paper",
    "tests/agent/test_orders.py",
    "tests/flower/test_codec.py",
]
AREAS: dict[str, tuple[list[str], list[str]]] = {
    "core": (["src/fedkeep/core"], CORE_TESTS),
    "agent": (
        [
            "src/fedkeep/agent/arrivals.py",
            "src/fedkeep/agent/durable_store.py",
            "src/fedkeep/agent/record.py",
        ],
        [
            "tests/agent/test_arrivals.py",
            "tests/agent/test_durable_store.py",
            "tests/agent/test_agent_gist.py",
            "tests/agent/test_store_commands.py",
        ],
    ),
    "privacy": (
        [
            "src/fedkeep/privacy/accountant.py",
            "src/fedkeep/privacy/mechanism.py",
            "src/fedkeep/privacy/release.py",
        ],
        [
            "tests/privacy/test_accountant.py",
            "tests/privacy/test_mechanism.py",
            "tests/privacy/test_shared_gist.py",
            "tests/privacy/test_simulated_privacy.py",
        ],
    ),
}
SHARED_LIBRARIES = ["numpy", "msgspec", "hypothesis", "hypothesis.extra.numpy", "torch"]
TIMEOUT = 60
_QUIET = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", "--no-header", "--tb=no"]
_QUIET += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]

Coverage = dict[str, dict[int, set[str]]]
_AT_IMPORT = ""
"""Stands for a test's name where lines are executed by an import."""


class _LineTracer:
    """A pytest plugin: which lines of the area's files each test executes, and for how long."""

    def __init__(self, files: set[str]) -> None:
        self._files = files
        self.lines: dict[str, list[tuple[str, int]]] = {}
        self.seconds: dict[str, float] = {}

    @pytest.hookimpl(hookwrapper=True)
    def pytest_collection(self) -> Iterator[None]:
        with self._traced(_AT_IMPORT):
            yield

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        with self._traced(item.nodeid):
            yield

    @contextlib.contextmanager
    def _traced(self, name: str) -> Iterator[None]:
        executed: set[tuple[str, int]] = set()

        def trace_lines(frame: FrameType, event: str, _: object) -> Callable[..., Any]:
            executed.add((frame.f_code.co_filename, frame.f_lineno))
            return trace_lines

        def trace(frame: FrameType, event: str, _: object) -> Callable[..., Any] | None:
            return trace_lines if frame.f_code.co_filename in self._files else None

        start = time.perf_counter()
        sys.settrace(trace)
        yield
        sys.settrace(None)
        self.lines[name] = sorted(executed)
        self.seconds[name] = time.perf_counter() - start


class _MutantFinder(importlib.abc.MetaPathFinder):
    """Import one module from a changed source, everything else as usual."""

    def __init__(self, module: str, source: str) -> None:
        self._module, self._source = module, source

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._module:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        assert spec is not None
        assert spec.origin is not None
        spec.loader = _MutantLoader(fullname, spec.origin, self._source)
        return spec


class _MutantLoader(importlib.machinery.SourceFileLoader):
    def __init__(self, fullname: str, path: str, source: str) -> None:
        super().__init__(fullname, path)
        self._mutant = source

    def get_code(self, fullname: str) -> CodeType:
        return compile(self._mutant, self.path, "exec")


def _fork(work: Callable[[], int], timeout: int) -> int | None:
    """Run work in a child in a process group of its own; its exit code, None after a timeout."""
    child = os.fork()
    if child == 0:
        os.setsid()
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(timeout)
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        code = 3
        try:
            code = work()
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)
    return None if os.WIFSIGNALED(status) else os.waitstatus_to_exitcode(status)


def _repeatable() -> None:
    """Let hypothesis draw the same examples each time, and shrink nothing."""
    from hypothesis import Phase, settings

    phases = [Phase.explicit, Phase.generate]
    settings.register_profile("mutants", derandomize=True, database=None, phases=phases)
    settings.load_profile("mutants")


def measure_coverage(
    files: Sequence[Path], tests: Sequence[str]
) -> tuple[Coverage, dict[str, set[int]], dict[str, float]]:
    """Run the tests once: which execute each line, which lines imports do, and each's seconds."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "lines.json")

        def work() -> int:
            _repeatable()
            tracer = _LineTracer({str(file) for file in files})
            code = pytest.main([*_QUIET, *tests], plugins=[tracer])
            report.write_text(json.dumps([tracer.lines, tracer.seconds]), encoding="utf-8")
            return int(code)

        if _fork(work, 1800) != 0:
            raise SystemExit("The tests fail without any mutant: run them alone first.")
        lines, seconds = json.loads(report.read_text(encoding="utf-8"))
    covered: Coverage = defaultdict(lambda: defaultdict(set))
    imported: dict[str, set[int]] = defaultdict(set)
    for test, places in lines.items():
        for file, line in places:
            if test == _AT_IMPORT:
                imported[file].add(line)
            else:
                covered[file][line].add(test)
    return covered, imported, seconds


def tests_of(
    mutant: Mutant, covered: dict[int, set[str]], imported: set[int], seconds: dict[str, float]
) -> list[str]:
    """Choose the tests that execute the changed lines, quickest first.

    Lines that run at import alone (a default, a decorator's body) are tested by whatever touches
    the file; those of a function that nothing calls are tested by nothing.
    """
    first, last = mutant.lines
    chosen = set().union(*(covered.get(line, set()) for line in range(first, last + 1)))
    if not chosen and (mutant.at_import or first in imported):
        chosen = set().union(*covered.values())
    return sorted(chosen, key=lambda test: (seconds[test], test))


def survives(module: str, mutant: Mutant, tests: Sequence[str]) -> bool:
    """Whether all the tests pass with the mutant in the module's place."""
    if not tests:
        return True

    def work() -> int:
        _repeatable()
        sys.meta_path.insert(0, _MutantFinder(module, mutant.source))
        return int(pytest.main([*_QUIET, *tests]))

    return _fork(work, TIMEOUT) == 0


def main() -> None:
    """Print the survivors and the score of each file and of the area."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("area", choices=AREAS)
    parser.add_argument("--per-file", type=int, default=20, help="mutants of each file")
    parser.add_argument("--only", nargs="*", default=[""], help="files whose path contains one")
    chosen = parser.parse_args()
    os.nice(10)
    sources, tests = AREAS[chosen.area]
    files = [
        file.resolve()
        for source in map(Path, sources)
        for file in (sorted(source.rglob("*.py")) if source.is_dir() else [source])
        if any(part in str(file) for part in chosen.only)
    ]
    for library in SHARED_LIBRARIES:
        importlib.import_module(library)
    covered, imported, seconds = measure_coverage(files, tests)
    killed = total = 0
    for file in files:
        module = ".".join(file.relative_to(SRC).with_suffix("").parts).removesuffix(".__init__")
        made = mutants(file.read_text(encoding="utf-8"), chosen.per_file)
        alive = []
        for mutant in made:
            name = str(file)
            found = tests_of(mutant, covered[name], imported[name], seconds)
            if survives(module, mutant, found):
                alive.append((mutant, found))
        killed, total = killed + len(made) - len(alive), total + len(made)
        print(f"{file.relative_to(SRC)}: {len(made) - len(alive)} of {len(made)}", flush=True)
        for mutant, found in alive:
            note = "" if found else " (no test executes it)"
            print(f"    line {mutant.lines[0]}: {mutant.change}{note}", flush=True)
    print(f"{chosen.area}: {killed} of {total} mutants killed, {killed / max(1, total):.1%}")


if __name__ == "__main__":
    main()
