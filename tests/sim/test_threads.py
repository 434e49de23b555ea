"""The threads of numerical libraries while rounds are played."""

import numpy as np
import pytest
from threadpoolctl import threadpool_info

from fedkeep.sim.threads import LARGE_MODEL, ThreadLimit

VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def threads() -> list[int]:
    """Of every library that is loaded; numpy's is."""
    assert np.ones((2, 2)) @ np.ones(2) is not None
    return [library["num_threads"] for library in threadpool_info()]


@pytest.fixture
def two_threads(monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    from threadpoolctl import threadpool_limits

    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    with threadpool_limits(2):
        yield


@pytest.mark.usefixtures("two_threads")
def test_a_small_model_is_worked_on_by_one_thread_and_then_all_are_back() -> None:
    limit = ThreadLimit(610)
    for _ in range(2):
        with limit:
            assert set(threads()) == {1}
        assert set(threads()) == {2}


@pytest.mark.usefixtures("two_threads")
def test_a_large_model_uses_what_the_libraries_choose() -> None:
    with ThreadLimit(LARGE_MODEL):
        assert set(threads()) == {2}


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("name", VARIABLES)
def test_whoever_sets_a_variable_decides(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "2")
    with ThreadLimit(610):
        assert set(threads()) == {2}
