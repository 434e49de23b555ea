"""Ids are exact, in namespaces, and stores of the first format keep the numbers that they have."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedkeep.agent.arrivals import Arrival
from fedkeep.agent.sample_ids import SampleIds, exact_id, sample_id
from fedkeep.agent.service import Service
from fedkeep.protocol.client import AgentClient
from fedkeep.protocol.messages import Erase
from tests.agent.builders import SHAPE, make_agent

TWO = {"a": "a", "b": "b"}
ANY_ID = st.one_of(
    st.none(),
    st.integers(),
    st.integers(1 << 59, 1 << 65),
    st.text(),
    st.from_regex(r"\A0*[0-9]{1,20}\Z"),
    st.floats(allow_nan=False),
    st.binary(),
    st.booleans(),
)


def key(given_id: Any) -> tuple[str, str]:
    return type(given_id).__name__, repr(given_id)


@given(ANY_ID, ANY_ID, st.sampled_from("ab"), st.sampled_from("ab"))
def test_ids_are_one_only_where_type_bytes_and_namespace_are(
    one: Any, other: Any, here: str, there: str
) -> None:
    ids = SampleIds(TWO)
    numbers = ids.number(here, one, b"content"), ids.number(there, other, b"content")
    assert all(0 <= number < 1 << 63 for number in numbers)
    assert (numbers[0] == numbers[1]) == ((key(one), here) == (key(other), there))


def test_what_is_written_alike_differs() -> None:
    ids = SampleIds(TWO)
    written = [
        "007",
        "7",
        "\u0667",
        7,
        7.0,
        b"7",
        True,
        "7 ",
        (1 << 60) + 1,
        (1 << 60),
        str(1 << 60),
    ]
    numbers = {ids.number(source, id_, b"") for source in TWO for id_ in written}
    assert len(numbers) == 2 * len(written)
    assert ids.number("a", (1 << 60) + 1, b"") == (1 << 60) + 1


def test_sources_that_name_a_namespace_share_their_ids() -> None:
    ids = SampleIds({"mill": "plant", "spare": "plant", "pump": "pump"})
    assert ids.number("mill", "x", b"") == ids.number("spare", "x", b"")
    assert ids.number("mill", "x", b"") != ids.number("pump", "x", b"")


@given(st.one_of(st.integers(0, 1 << 61), st.text()))
def test_every_id_is_found_as_people_write_it(id_: Any) -> None:
    ids = SampleIds(TWO)
    for source in TWO:
        number = ids.number(source, id_, b"")
        assert number in ids.matches(str(id_))
        assert number in ids.matches(str(id_), namespace=source)
    assert ids.number("a", id_, b"") not in ids.matches(str(id_), namespace="b")


def test_the_plain_namespace_is_that_of_the_store_and_not_of_the_configuration() -> None:
    first = SampleIds({"a": "a"})
    assert first.number("a", 7, b"") == 7
    later = SampleIds({"b": "b", "a": "a"})
    later.restore(first.snapshot())
    assert later.number("a", 7, b"") == 7
    assert later.number("b", 7, b"") == exact_id("b", 7, b"")


def offer(agent: Any, id_: Any, source: str, label: int = 0, seed: int = 0) -> str:
    x = np.random.default_rng(seed).standard_normal(SHAPE).astype(np.float32)
    fates: list[str] = []
    agent.intake.offer(Arrival(x, label, id_, source, fates.append), wait=True)
    agent.step(0.0)
    agent.commit()
    (fate,) = fates
    return fate


def test_the_same_number_from_two_sources_is_two_samples(tmp_path: Path) -> None:
    assembly = make_agent(tmp_path, store={"commit_ms": 10_000})
    agent = assembly.agent
    service = Service(agent)
    assert [offer(agent, 7, source) for source in ("a", "b", "a")] == ["kept", "kept", "refreshed"]
    assert [offer(agent, id_, "a") for id_ in ("7", "007", "\u0667")] == ["kept"] * 3
    with AgentClient(str(tmp_path / "a.sock")) as client:
        assert [line.verdict for line in client.why("7").decisions].count("kept") == 3
        assert client.why("7", "b").stored
        assert not client.why("7", "c").stored
        assert client.erase(Erase(id="7", namespace="b")) == 1
        assert not client.why("7", "b").stored
        assert client.why("7", "a").stored
        assert client.erase(Erase(id="7", label=1)) == 0
        assert client.why("7", "a").stored, "no sample has both this id and this label"
        assert client.erase(Erase(id="7")) == 2, "the number and the text of source a"
    assert [offer(agent, 7, s) for s in "ab"] == ["refused.erased"] * 2
    assert offer(agent, "7", "a") == "refused.erased"
    assert offer(agent, "007", "a") == "refreshed"
    service.close()
    assembly.disk.close()


def as_before(agent: Any) -> None:
    """Makes a store as the version before namespaces left it."""
    agent._parts = {name: part for name, part in agent._parts.items() if name != "ids"}
    agent.ids.number = lambda source, given, content: sample_id(given, content)


@pytest.mark.parametrize("source", ["a", "b"])
def test_a_store_of_before_knows_its_samples_and_its_erased_ones(
    tmp_path: Path, source: str
) -> None:
    assembly = make_agent(tmp_path)
    as_before(assembly.agent)
    for number, id_ in enumerate((7, "8", "name", "gone")):
        assert offer(assembly.agent, id_, source, seed=number) == "kept"
    assembly.agent.erase([sample_id("gone", b"")])
    assembly.disk.close()
    sources = [{"kind": "lines", "name": "a"}, {"kind": "lines", "name": "b"}]
    for _ in range(2):
        assembly = make_agent(tmp_path, source=sources)
        agent = assembly.agent
        assert agent.ids.earlier
        for number, id_ in enumerate((7, "8", "name")):
            assert offer(agent, id_, source, seed=number) == "refreshed", id_
        for other in "ab":
            assert offer(agent, "gone", other) == "refused.erased"
        assert len(agent.store) == 3
        agent.commit()
        assembly.disk.close()


def test_a_new_store_is_not_taken_for_one_of_before(tmp_path: Path) -> None:
    for _ in range(2):
        assembly = make_agent(tmp_path)
        offer(assembly.agent, "7", "a")
        assert not assembly.agent.ids.earlier
        assert list(assembly.agent.store.records) == [exact_id("a", "7", b"")]
        assembly.agent.commit()
        name = assembly.agent.identity.name
        assembly.disk.close()
    again = make_agent(tmp_path)
    assert again.agent.identity.name == name, "the broker keeps messages for this name"
    again.disk.close()
