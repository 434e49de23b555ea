"""What one rule says, as a table `[[rule]]` describes it."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeAlias

from fedkeep.core.bounds import check_range
from fedkeep.core.errors import ConfigError
from fedkeep.core.rules.grammar import Condition, ConditionError, parse

Group: TypeAlias = Literal["label", "source", "minute", "hour", "day"]
MOST_RULES = 64
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,31}")
_HOLDING = ("slots", "before", "after", "ttl_days")
"""What only rules say that keep samples in slots of their own."""


@dataclass(frozen=True)
class Rule:
    """One rule: which samples, and what becomes of them."""

    name: str
    """How `why`, metrics and messages call it: letters, digits, - and _."""
    when: str
    """The condition on fields of the record, `label`, `prediction`, `confidence`, `loss`, `time`,
    `hour`, `weekday` and `source`."""
    action: Literal["keep", "never", "least", "most"] = "keep"
    """`keep` holds all that match, in slots of their own; `least` holds at least `n` of each
    group; `most` lets at most `n` of each group take part in what the policy keeps; `never`: what
    matches is not stored, measured or counted."""
    slots: int | None = None
    """Slots that are reserved: when they are full, the lowest values leave. `keep` must say it,
    and `least` but for `per = "label"`, where it is `n` for each label."""
    n: int | None = None
    """Samples of each group; with `keep` at most so many of each are held."""
    per: Group | None = None
    """What a group is: a label, a source, or a minute, an hour, a day of the samples' own time."""
    before: int = 0
    """Samples of the same source that are held, too, if they came so shortly before one that
    matches."""
    after: int = 0
    """The same of those that come after it."""
    ttl_days: float | None = None
    """Days for which what the rule holds is stored at the most; None: as [store] says."""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(
                "name must be 1 to 32 letters, digits, - and _, beginning with one of the first "
                f"two, got {self.name!r}"
            )
        check_range(self, "slots", "n", least=1, most=1 << 24)
        check_range(self, "before", "after", least=0, most=4096)
        check_range(self, "ttl_days", above=0)
        if (self.n is None) != (self.per is None):
            raise ValueError("n and per go together: n samples of each label, source, hour, ...")
        if self.action in ("least", "most") and self.n is None:
            raise ValueError(f"action '{self.action}' needs n and per")
        if self.action == "never" and self.n is not None:
            raise ValueError("action 'never' takes no n and per")
        if self.action in ("never", "most"):
            defaults = {field.name: field.default for field in fields(self)}
            for key in _HOLDING:
                if getattr(self, key) != defaults[key]:
                    raise ValueError(f"action '{self.action}' reserves no slots: remove {key}")
        elif self.slots is None and not (self.action == "least" and self.per == "label"):
            raise ValueError(
                f"action '{self.action}' needs slots: how many samples it may hold at once"
            )

    @property
    def holds(self) -> bool:
        """Whether the rule keeps samples in slots of its own."""
        return self.action in ("keep", "least")

    def reserved(self, labels: int) -> int:
        """Give the slots that the rule takes from the policy.

        >>> Rule("rare", "label == 3", "least", n=5, per="label").reserved(labels=4)
        20
        """
        if not self.holds:
            return 0
        return self.slots if self.slots is not None else (self.n or 0) * labels


def check_rules(rules: Sequence[Rule]) -> None:
    """Raise a ConfigError where rules have the same name, or are too many."""
    names = [rule.name for rule in rules]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"two rules are called '{name}': give each [[rule]] its own name")
    if len(rules) > MOST_RULES:
        raise ConfigError(f"there are at most {MOST_RULES} rules, got {len(rules)}")


def conditions(rules: Sequence[Rule], labels: Sequence[str] = ()) -> list[Condition]:
    """Read the conditions of all rules.

    Raises
    ------
    ConfigError
        With the rule's name, and the place of the mistake.

    Examples
    --------
    >>> len(conditions([Rule("alarms", "alarm", slots=5), Rule("hot", "heat > 90", slots=2)]))
    2
    """
    found: list[Condition] = []
    for rule in rules:
        try:
            found.append(parse(rule.when, labels))
        except ConditionError as error:
            raise ConfigError(f"rule '{rule.name}': {error}") from None
    return found


def described(rules: Sequence[Rule]) -> list[dict[str, Any]]:
    """Give rules as plain data, without what is at its default."""
    return [
        {
            field.name: value
            for field in fields(rule)
            if (value := getattr(rule, field.name)) != field.default
        }
        for rule in rules
    ]
