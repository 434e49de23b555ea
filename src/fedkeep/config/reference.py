"""What a configuration's dataclass says of its own keys: type, default, and the words that stand below each."""

import ast
import dataclasses
import inspect
import json
import re
import textwrap
from collections.abc import Mapping
from itertools import pairwise
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints


@dataclasses.dataclass(frozen=True)
class Key:
    """One key of a table."""

    name: str
    takes: str
    default: str
    text: str


def keys_of(options: type[Any]) -> list[Key]:
    """The keys that a dataclass gives to its table, in their order.

    >>> from fedkeep.core.policies.ode import Ode
    >>> [key.name for key in keys_of(Ode)][:2], keys_of(Ode)[0].default
    (['value', 'clip'], '"projection"')
    """
    hints, texts = get_type_hints(options), _texts(options)
    found = []
    for field in dataclasses.fields(options):
        default, factory = field.default, field.default_factory
        if factory is not dataclasses.MISSING:
            default = factory()
        if field.init:
            value = "needed" if default is dataclasses.MISSING else toml(default)
            text = texts.get(field.name) or _mentioned(field.name, options)
            found.append(Key(field.name, _in_words(hints[field.name]), value, text))
    return found


def about(thing: Any) -> str:
    """The whole docstring but its examples, a line a paragraph; none where it is one that dataclass made."""
    text = inspect.getdoc(thing) or ""
    made = text.startswith(f"{getattr(thing, '__name__', '')}(")
    told = (part for part in text.split("\n\n") if not part.startswith(">>> "))
    return "" if made else "\n\n".join(" ".join(part.split()) for part in told)


def toml(value: Any) -> str:
    """A value as it would stand in the file.

    >>> print(toml({"name": "custom", "shape": (1, 28), "label names": ['5" disk', True]}))
    { name = "custom", shape = [1, 28], "label names" = ["5\\" disk", true] }
    """
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace(
            "\x7f", "\\u007f"
        )  # the one escape that JSON leaves out
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml, value))}]"
    if isinstance(value, Mapping):
        return (
            "{ " + ", ".join(f"{bare(key)} = {toml(one)}" for key, one in value.items()) + " }"
            if value
            else "{}"
        )
    return "left out" if value is None else f"{value!r}"


def bare(key: str) -> str:
    """A key as it would stand in the file, quoted where it has to be."""
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else toml(key)


def _texts(options: type[Any]) -> dict[str, str]:
    """The string below each field, those of base classes included."""
    found: dict[str, str] = {}
    for cls in reversed(options.__mro__):
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
        except (OSError, TypeError):  # made at run time: nobody wrote anything below its fields
            continue
        for pair in pairwise(getattr(tree.body[0], "body", ())):
            match pair:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=text)),
                ):
                    found[name] = " ".join(str(text).split())
    return found


def _mentioned(name: str, options: type[Any]) -> str:
    """The sentences of the class's own words that speak of a key."""
    sentences = re.split(
        r"[.;](?: +|$)(?![^()]*\))", about(options).replace("\n\n", " ")
    )  # not within brackets
    return " ".join(f"{sentence}." for sentence in sentences if f"`{name}`" in sentence)


def _in_words(hint: Any) -> str:
    words = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
    if hint in words:
        return words[hint]
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Literal:
        return "one of " + ", ".join(map(toml, parts))
    if origin is UnionType and NoneType not in parts:
        return " or ".join(map(_in_words, parts))
    if NoneType in parts:
        return (
            " or ".join(_in_words(part) for part in parts if part is not NoneType) + ", or left out"
        )
    if origin in (list, tuple):
        return f"a list, each {_in_words(parts[0])}" if parts else "a list"
    return "a table" if inspect.isclass(origin) and issubclass(origin, Mapping) else str(hint)
