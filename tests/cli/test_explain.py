"""`fedkeep list NAME` and `fedkeep explain KEY`: what classes document, and nothing missing."""

from dataclasses import dataclass
from typing import Literal

import pytest
from typer.testing import CliRunner

from fedkeep.cli.app import app
from fedkeep.config.components import COMPONENTS
from fedkeep.config.experiment import TABLES
from fedkeep.config.methods import METHODS
from fedkeep.config.reference import Key, keys_of
from fedkeep.core.errors import ConfigError


@dataclass(frozen=True)
class Options:
    """Options, with `b` described here; and no more."""

    a: int = 3
    """How many,
    on two lines."""
    b: Literal["x", "y"] = "x"
    c: tuple[int, ...] | None = None


def printed(*arguments: str) -> str:
    result = CliRunner().invoke(app, [*arguments])
    assert result.exit_code == 0, result.exception
    return " ".join(result.output.split())


def test_keys_are_read_from_the_class_itself() -> None:
    assert keys_of(Options) == [
        Key("a", "a whole number", "3", "How many, on two lines."),
        Key("b", 'one of "x", "y"', '"x"', "Options, with `b` described here."),
        Key("c", "a list, each a whole number, or left out", "left out", ""),
    ]


@pytest.mark.parametrize(
    "owner", [*TABLES.values(), *(cls for kind in COMPONENTS.values() for cls in kind.values())]
)
def test_every_key_is_documented(owner: type) -> None:
    assert [key.name for key in keys_of(owner) if not key.text] == []


def test_a_key_has_its_type_its_default_and_the_papers_name() -> None:
    text = printed("explain", "storage.capacity")
    assert "takes a whole number" in text
    assert "default: 10" in text
    assert "|B_c| of the paper" in text


def test_a_key_lists_its_value_in_each_preset() -> None:
    assert 'Preset paper, every policy: estimator.name = "incremental"' in printed(
        "explain", "estimator.name"
    )


def test_a_name_shows_all_that_it_takes() -> None:
    text = printed("list", "ode")
    assert text.startswith('policy = { name = "ode" }')
    assert "Eq. 6" in text
    assert "sharpness 0.5" in text
    assert "the higher, the nearer to `greatest`). (a number)" in text


def test_examples_for_python_are_not_shown() -> None:
    assert ">>>" in (COMPONENTS["task"]["demo"].__doc__ or "")
    assert ">>>" not in printed("list", "demo")


def test_a_class_of_ones_own_is_shown_whatever_it_is() -> None:
    for custom, key in (
        ("fedkeep.core.policies.ode:Ode", "sharpness"),
        ("fedkeep.core.planning.greedy:Greedy", "quantities"),
    ):
        text = printed("list", custom)
        assert text.startswith(f'name = "{custom}"')
        assert key in text


def test_every_table_and_every_name_can_be_shown() -> None:
    for table in (*TABLES, *COMPONENTS, "seed", "sweep", "methods"):
        assert printed("explain", table)
    for kind, members in COMPONENTS.items():
        for name in members:
            assert f'{kind} = {{ name = "{name}" }}' in printed("list", name)


def test_methods_are_listed_by_name_with_what_they_are_made_of() -> None:
    output = CliRunner().invoke(app, ["list"]).output
    listed = [line.split()[1] for line in output.splitlines() if line.startswith("method")]
    assert listed == [*METHODS], "in their order, from simple to elaborate"
    shown = printed("list", "balanced-fifo")
    assert 'methods = ["balanced-fifo"]' in shown
    assert 'storage = { quotas = "hard" }' in shown
    assert METHODS["gist-shared"].summary.split(":")[0] in printed("list", "default")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("explain", "storge"), "did you mean 'storage'?"),
        (
            ("explain", "storage.capcity"),
            "'storage' has no key 'capcity': did you mean 'capacity'?",
        ),
        (("list", "odd"), "nothing is called 'odd': did you mean 'ode'?"),
    ],
)
def test_an_unknown_name_is_reported(arguments: tuple[str, ...], message: str) -> None:
    error = CliRunner().invoke(app, [*arguments]).exception
    assert isinstance(error, ConfigError)
    assert message in str(error)
