"""The conditions of rules: a small strict grammar, read by hand and never by `eval`.

    condition  = both {"or" both}
    both       = negated {"and" negated}
    negated    = "not" negated | comparison
    comparison = sum [("==" | "!=" | "<" | "<=" | ">" | ">=") sum | ["not"] "in" list]
    sum        = product {("+" | "-") product}
    product    = factor {("*" | "/") factor}
    factor     = "-" factor | number | text | name | "has" "(" name ")" | "(" condition ")"
    list       = "(" literal {"," literal} ")"

A name is a field of the record, or one of `BUILTINS`. What a record lacks, or has as another kind,
makes every comparison false. A condition is read once, and evaluated for a whole batch in numpy.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from operator import eq, ge, gt, itemgetter, le, lt, ne
from typing import Any, NamedTuple, Protocol

import numpy as np

from fedkeep.core.types import AnyArray, BoolArray, FloatArray

LONGEST, _DEEPEST = 1000, 50
"""Characters of a condition, and brackets within each other."""
BUILTINS = ("label", "prediction", "confidence", "loss", "time", "hour", "weekday", "source")
_TEXTS = ("source",)
_LABELS = ("label", "prediction")
_WORDS = ("and", "or", "not", "in", "has", "true", "false")
_TOKEN = re.compile(
    r"""\s*(?:(?P<number>(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)
    |(?P<text>"[^"\n]*"|'[^'\n]*')
    |(?P<name>[A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z0-9_]+)*)
    |(?P<quoted>`[^`\n]+`)
    |(?P<sign>==|!=|<=|>=|[<>()+\-*/,]))""",
    re.VERBOSE,
)
_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "==": eq, "!=": ne, "<": lt, "<=": le, ">": gt, ">=": ge,
}  # fmt: skip
_ARITHMETIC: dict[str, Callable[[Any, Any], Any]] = {
    "+": np.add, "-": np.subtract, "*": np.multiply, "/": np.divide,
}  # fmt: skip


class ConditionError(ValueError):
    """A mistake in a condition, and its place.

    >>> print(ConditionError("expected a number", "speed > 'fast'", 8))
    expected a number
        speed > 'fast'
                ^
    """

    def __init__(self, mistake: str, text: str, place: int) -> None:
        line_start = text.rfind("\n", 0, place) + 1
        line = text[line_start:].partition("\n")[0].replace("\t", " ")
        super().__init__(f"{mistake}\n    {line}\n    {' ' * (place - line_start)}^")
        self.mistake, self.place = mistake, place


class Columns(Protocol):
    """What is known of a batch, column by column; NaN and None stand for what is not there."""

    def __len__(self) -> int: ...

    def numbers(self, name: str) -> FloatArray:
        """Give a field's numbers, (n,); flags are 0 and 1."""

    def texts(self, name: str) -> Sequence[str | None]:
        """Give a field's texts."""

    def present(self, name: str) -> BoolArray:
        """Tell whose record has the field at all."""


class _Kind(Enum):
    NUMBER = "a number"
    TEXT = "a text"
    TRUTH = "a condition"
    FIELD = "a field"


_Evaluate = Callable[[Columns], Any]


class _Part(NamedTuple):
    """A part of a condition: of what kind it is, where it begins, and how it is evaluated."""

    kind: _Kind
    place: int
    evaluate: _Evaluate
    name: str = ""
    value: Any = None


class _Token(NamedTuple):
    kind: str
    text: str
    place: int


@dataclass(frozen=True)
class Condition:
    """A condition that was read.

    Examples
    --------
    >>> condition = parse('speed > 3 and not (unit in ("V", "A"))')
    >>> sorted(condition.names)
    ['speed', 'unit']
    """

    text: str
    names: frozenset[str]
    """The fields and builtins that it looks at."""
    _evaluate: _Evaluate

    def holds(self, columns: Columns) -> BoolArray:
        """Tell for each sample of a batch whether the condition holds, (n,)."""
        with np.errstate(all="ignore"):
            return self.holds_quietly(columns)

    def holds_quietly(self, columns: Columns) -> BoolArray:
        """Tell the same where the caller has silenced numpy, once for many conditions."""
        found = self._evaluate(columns)
        if isinstance(found, np.ndarray) and found.shape == (len(columns),):
            return found
        return np.broadcast_to(np.asarray(found, dtype=bool), len(columns))


def parse(text: str, labels: Sequence[str] = ()) -> Condition:
    """Read a condition.

    Parameters
    ----------
    text : str
        The condition.
    labels : sequence of str
        The names of the labels, which `label` and `prediction` may be compared with.

    Raises
    ------
    ConditionError
        With the place of the first mistake.
    """
    return _Parser(text, labels).condition()


class _Parser:
    """Reads tokens from left to right; each method reads what the grammar calls by its name."""

    def __init__(self, text: str, labels: Sequence[str]) -> None:
        self._text = text
        self._numbers: Mapping[str, int] = {name: number for number, name in enumerate(labels)}
        self._names: set[str] = set()
        self._next = self._depth = 0
        if len(text) > LONGEST:
            raise self._error(f"a condition has at most {LONGEST} characters", LONGEST)
        self._tokens = self._split()

    def condition(self) -> Condition:
        """Read the whole text."""
        found = self._or()
        if self._token.kind != "end":
            raise self._unexpected("'and', 'or' or the end")
        truth = self._truth(found)
        return Condition(self._text, frozenset(self._names), truth.evaluate)

    def _split(self) -> list[_Token]:
        tokens, place, text = [], 0, self._text
        while place < len(text.rstrip()):
            match = _TOKEN.match(text, place)
            if match is None:
                place += len(text[place:]) - len(text[place:].lstrip())
                wrong = text[place]
                hint = "write == to compare" if wrong == "=" else f"{wrong!r} has no meaning here"
                if wrong in "\"'`":
                    hint = f"there is no closing {wrong}"
                raise self._error(hint, place)
            kind = str(match.lastgroup)
            tokens.append(_Token(kind, match[kind], match.start(kind)))
            place = match.end()
        return [*tokens, _Token("end", "", len(text.rstrip()))]

    @property
    def _token(self) -> _Token:
        return self._tokens[self._next]

    def _error(self, mistake: str, place: int) -> ConditionError:
        return ConditionError(mistake, self._text, place)

    def _unexpected(self, wanted: str) -> ConditionError:
        token = self._token
        shown = "the end" if token.kind == "end" else f"'{token.text}'"
        return self._error(f"expected {wanted}, found {shown}", token.place)

    def _takes(self, *texts: str) -> str:
        """Go on where one of these words or signs comes next; which one, else nothing."""
        token = self._token
        if token.kind in ("name", "sign") and token.text in texts:
            self._next += 1
            return token.text
        return ""

    def _needs(self, sign: str) -> None:
        if not self._takes(sign):
            raise self._unexpected(f"'{sign}'")

    def _or(self) -> _Part:
        return self._joined("or", self._and, np.logical_or)

    def _and(self) -> _Part:
        return self._joined("and", self._not, np.logical_and)

    def _joined(
        self, word: str, read: Callable[[], _Part], join: Callable[[Any, Any], Any]
    ) -> _Part:
        found = read()
        while self._takes(word):
            left, right = self._truth(found), self._truth(read())
            found = _Part(_Kind.TRUTH, left.place, partial(_both, join, left, right))
        return found

    def _not(self) -> _Part:
        place = self._token.place
        if not self._takes("not"):
            return self._comparison()
        with_depth = self._deeper(self._not)
        inner = self._truth(with_depth)
        return _Part(_Kind.TRUTH, place, lambda columns: np.logical_not(inner.evaluate(columns)))

    def _comparison(self) -> _Part:
        left = self._sum()
        before = self._next
        negated = bool(self._takes("not"))
        if self._takes("in"):
            return self._listed(left, negated=negated)
        if negated:
            self._next = before
            raise self._unexpected("'and', 'or' or the end")
        sign = self._takes(*_COMPARISONS)
        if not sign:
            return left
        right = self._sum()
        if self._token.text in _COMPARISONS:
            raise self._error("compare two things at a time, and join by 'and'", self._token.place)
        return self._compared(left, sign, right)

    def _compared(self, left: _Part, sign: str, right: _Part) -> _Part:
        left, right = self._label(left, right), self._label(right, left)
        compare = _COMPARISONS[sign]
        is_text = [part.kind is _Kind.TEXT or part.name in _TEXTS for part in (left, right)]
        if any(is_text):
            if sign not in ("==", "!="):
                raise self._error(f"texts are compared by == and !=, not by {sign}", right.place)
            sides = self._text_of(left), self._text_of(right)
            evaluate: _Evaluate = partial(_texts_compared, compare, *sides)
        else:
            sides = self._number(left), self._number(right)
            evaluate = partial(_numbers_compared, compare, *sides)
        return _Part(_Kind.TRUTH, left.place, evaluate)

    def _listed(self, left: _Part, *, negated: bool) -> _Part:
        place = self._token.place
        self._needs("(")
        parts = [self._literal(left)]
        while self._takes(","):
            parts.append(self._literal(left))
        self._needs(")")
        if len({part.kind for part in parts}) > 1:
            raise self._error("a list has numbers or texts, not both", place)
        values = frozenset(part.value for part in parts)
        is_text = parts[0].kind is _Kind.TEXT
        read = self._text_of(left) if is_text else self._number(left)
        return _Part(_Kind.TRUTH, left.place, partial(_among, read, values, negated))

    def _literal(self, left: _Part) -> _Part:
        """Read a number or a text of a list."""
        part = self._factor()
        if part.value is None:
            raise self._error("a list has numbers or texts only", part.place)
        return self._label(part, left)

    def _sum(self) -> _Part:
        return self._calculated(("+", "-"), self._product)

    def _product(self) -> _Part:
        return self._calculated(("*", "/"), self._factor)

    def _calculated(self, signs: tuple[str, str], read: Callable[[], _Part]) -> _Part:
        found = read()
        while sign := self._takes(*signs):
            left, right = self._number(found), self._number(read())
            evaluate = partial(_both, _ARITHMETIC[sign], left, right)
            found = _Part(_Kind.NUMBER, left.place, evaluate)
        return found

    def _factor(self) -> _Part:
        token = self._token
        if self._takes("-"):
            inner = self._number(self._deeper(self._factor))
            value = None if inner.value is None else -inner.value
            return _Part(
                _Kind.NUMBER, token.place, lambda columns: -inner.evaluate(columns), value=value
            )
        if self._takes("("):
            found = self._deeper(self._or)
            self._needs(")")
            return found._replace(value=None)
        if self._takes("has"):
            self._needs("(")
            name = self._name()
            self._needs(")")
            return _Part(_Kind.TRUTH, token.place, lambda columns: columns.present(name))
        if token.kind == "number":
            self._next += 1
            number = float(token.text)
            return _Part(_Kind.NUMBER, token.place, lambda _: number, value=number)
        if token.kind == "text":
            self._next += 1
            text = token.text[1:-1]
            return _Part(_Kind.TEXT, token.place, lambda _: text, value=text)
        if truth := self._takes("true", "false"):
            is_true = float(truth == "true")
            return _Part(_Kind.FIELD, token.place, lambda _: is_true, value=is_true)
        name = self._name()
        return _Part(_Kind.FIELD, token.place, lambda columns: columns.numbers(name), name)

    def _name(self) -> str:
        token = self._token
        if token.kind not in ("name", "quoted") or token.text in _WORDS:
            raise self._unexpected("a field, a number or a text")
        self._next += 1
        name = token.text.strip("`")
        if self._token.text == "(":
            raise self._error(f"'{name}' is no function: there is only has(field)", token.place)
        self._names.add(name)
        return name

    def _deeper(self, read: Callable[[], _Part]) -> _Part:
        self._depth += 1
        if self._depth > _DEEPEST:
            raise self._error(f"a condition is at most {_DEEPEST} deep", self._token.place)
        found = read()
        self._depth -= 1
        return found

    def _truth(self, part: _Part) -> _Part:
        """Take a part for a condition: a field counts as a flag."""
        if part.kind is _Kind.TRUTH:
            return part
        if part.kind is _Kind.FIELD and part.name not in BUILTINS:
            return part._replace(kind=_Kind.TRUTH, evaluate=partial(_flag, part.evaluate))
        what = f"'{part.name}'" if part.name else part.kind.value
        raise self._error(f"expected a condition, found {what}: compare it", part.place)

    def _number(self, part: _Part) -> _Part:
        if part.kind in (_Kind.NUMBER, _Kind.FIELD) and part.name not in _TEXTS:
            return part
        what = f"'{part.name}', a text" if part.name else part.kind.value
        raise self._error(f"expected a number, found {what}", part.place)

    def _text_of(self, part: _Part) -> _Part:
        if part.kind is _Kind.TEXT:
            return part
        if part.kind is _Kind.FIELD and part.name and part.name not in set(BUILTINS) - {*_TEXTS}:
            name = part.name
            return part._replace(evaluate=lambda columns: columns.texts(name))
        what = f"'{part.name}', a number" if part.name else part.kind.value
        raise self._error(f"expected a text, found {what}", part.place)

    def _label(self, part: _Part, other: _Part) -> _Part:
        """Read a text that is compared with a label as the label's number."""
        if part.kind is not _Kind.TEXT or other.name not in _LABELS:
            return part
        if part.value not in self._numbers:
            known = ", ".join(self._numbers) or "numbers only: [samples] names is not set"
            raise self._error(f"no label is called {part.value!r}; labels are {known}", part.place)
        number = float(self._numbers[part.value])
        return _Part(_Kind.NUMBER, part.place, lambda _: number, value=number)


def _both(join: Callable[[Any, Any], Any], left: _Part, right: _Part, columns: Columns) -> Any:
    return join(left.evaluate(columns), right.evaluate(columns))


def _flag(evaluate: _Evaluate, columns: Columns) -> BoolArray:
    """Whether a flag is there and not 0: NaN, for what is not there, is no flag."""
    values = np.asarray(evaluate(columns))
    return np.asarray((values != 0) & (values == values))  # noqa: PLR0124 - NaN differs from itself


def _numbers_compared(
    compare: Callable[[Any, Any], Any], left: _Part, right: _Part, columns: Columns
) -> Any:
    one, other = left.evaluate(columns), right.evaluate(columns)
    found = compare(one, other)
    if compare is not ne:
        return found
    return found & (one == one) & (other == other)  # noqa: PLR0124 - NaN differs from itself


def _texts_compared(
    compare: Callable[[Any, Any], Any], left: _Part, right: _Part, columns: Columns
) -> BoolArray:
    one, other = left.evaluate(columns), right.evaluate(columns)
    if isinstance(one, str):
        one, other = other, one
    if not isinstance(other, str):
        pairs = zip(one, other, strict=True)
        return np.array([None not in pair and compare(*pair) for pair in pairs], dtype=bool)
    if isinstance(one, str):
        return np.full(len(columns), compare(one, other))
    equal = np.array([value == other for value in one], dtype=bool)
    if compare is not ne:
        return equal
    known = np.array([value is not None for value in one], dtype=bool)
    return np.asarray(known & ~equal)


def _among(read: _Part, values: frozenset[Any], negated: bool, columns: Columns) -> BoolArray:
    found = read.evaluate(columns)
    if isinstance(found, np.ndarray):
        found = found.tolist()
    elif isinstance(found, float | str):
        found = [found] * len(columns)
    listed = np.array([value in values for value in found], dtype=bool)
    if not negated:
        return listed
    known = [value is not None and value == value for value in found]  # noqa: PLR0124 - NaN
    return np.asarray(np.array(known, dtype=bool) & ~listed)


_NUMBERS = frozenset({int, float, bool})


def _alike(fields: Sequence[Mapping[str, Any]] | None) -> dict[str, Sequence[Any]] | None:
    """Give the fields of records column by column, where all have the same; else None.

    >>> _alike([{"a": 1, "b": 2}, {"b": 3, "a": 4}])
    {'a': (1, 4), 'b': (2, 3)}
    >>> _alike([{"a": 1}, {"b": 2}]) is None
    True
    """
    if not fields or not fields[0]:
        return None if fields and any(fields) else {}
    names = [*fields[0]]
    if {*map(len, fields)} != {len(names)}:
        return None
    try:
        rows = [*map(itemgetter(*names), fields)]
    except KeyError:
        return None
    return dict(zip(names, [rows] if len(names) == 1 else zip(*rows, strict=True), strict=True))


class NumberedColumns:
    """Columns of a batch: the records' own fields, and what the device knows of each sample.

    Parameters
    ----------
    count : int
        The samples of the batch.
    fields : sequence of mapping, optional
        What each record says of itself; None: nothing.
    known : mapping
        Functions that give the builtins, by name, when they are first looked at.
    source : str
        Where the batch comes from.
    """

    def __init__(
        self,
        count: int,
        fields: Sequence[Mapping[str, Any]] | None,
        known: Mapping[str, Callable[[], AnyArray]],
        source: str = "",
    ) -> None:
        self._count, self._fields, self._known, self._source = count, fields, known, source
        self._numbers: dict[str, FloatArray] = {}
        self._texts: dict[str, Sequence[str | None]] = {}
        self._columns = _alike(fields)
        """The values of each field, where all records have the same; else None."""

    def __len__(self) -> int:
        return self._count

    def numbers(self, name: str) -> FloatArray:
        """Give a field's numbers; see `Columns`."""
        if name not in self._numbers:
            if name in self._known:
                found = np.asarray(self._known[name](), dtype=np.float64)
            elif name in BUILTINS or (values := self._values(name)) is None:
                found = np.full(self._count, np.nan)
            else:
                if not _NUMBERS.issuperset(map(type, values)):
                    values = [v if isinstance(v, int | float) else np.nan for v in values]
                found = np.array(values, dtype=np.float64)
            self._numbers[name] = found
        return self._numbers[name]

    def _values(self, name: str) -> Sequence[Any] | None:
        """Give what records say under a name; None where none of them does."""
        if self._columns is not None:
            return self._columns.get(name)
        return [record.get(name) for record in self._fields or ()]

    def texts(self, name: str) -> Sequence[str | None]:
        """Give a field's texts; see `Columns`."""
        if name == "source":
            return [self._source] * self._count
        if name not in self._texts:
            values = self._values(name) or (None,) * self._count
            if {*map(type, values)} != {str}:
                values = [value if isinstance(value, str) else None for value in values]
            self._texts[name] = values
        return self._texts[name]

    def present(self, name: str) -> BoolArray:
        """Tell whose record has the field; see `Columns`."""
        if name == "source":
            return np.full(self._count, bool(self._source))
        if name in BUILTINS:
            return ~np.isnan(self.numbers(name))
        if self._columns is not None:
            return np.full(self._count, name in self._columns)
        return np.array([name in r for r in self._fields or ({},) * self._count], dtype=bool)
