"""Bounds of options: the same sentence wherever a number is out of them."""

from math import inf, isfinite
from operator import index

from fedkeep.core.errors import ConfigError


def check_range(
    options: object,
    *names: str,
    least: float = -inf,
    above: float = -inf,
    most: float = inf,
    below: float | None = None,
) -> None:
    """Check that these fields are in their bounds; None is in all of them, NaN in none.

    >>> from types import SimpleNamespace
    >>> check_range(SimpleNamespace(rounds=0, dropout=0.5), "rounds", "dropout", least=0, below=1)
    >>> check_range(SimpleNamespace(rounds=0), "rounds", least=1)
    Traceback (most recent call last):
    ValueError: rounds must be 1 or more, got 0
    """
    lower = f"at least {least}" if isfinite(least) else f"above {above}"
    upper = f"at most {most}" if below is None else f"below {below}"
    must = f"be {lower} and {upper}"
    if below == inf:
        must = f"be a finite number {lower}"
    elif below is None and most == inf:
        must = f"be {least} or more" if isfinite(least) else f"be {lower}"
    elif below is None and least == above == -inf:
        must = f"be {upper}"
    elif below is None and isfinite(least):
        must = f"be between {least} and {most}"
    for name in names:
        value = getattr(options, name)
        if value is not None and not (
            least <= value <= most and above < value and (below is None or value < below)
        ):
            raise ValueError(f"{name} must {must}, got {value}")


def check_whole(name: str, value: object, least: int = 0) -> int:
    """Return an argument that must be a whole number, of whatever integer type.

    >>> check_whole("rounds", 5, least=1)
    5
    >>> check_whole("rounds", "many", least=1)
    Traceback (most recent call last):
    fedkeep.core.errors.ConfigError: rounds must be a whole number of at least 1, got 'many'
    """
    try:
        number = index(value)  # type: ignore[arg-type]
    except TypeError:
        number = least - 1
    if number < least or isinstance(value, bool):
        raise ConfigError(f"{name} must be a whole number of at least {least}, got {value!r}")
    return number


def check_number(name: str, value: object, above: float = 0.0) -> float:
    """Return an argument that must be a finite number above a bound.

    >>> check_number("minutes", float("nan"))
    Traceback (most recent call last):
    fedkeep.core.errors.ConfigError: minutes must be a finite number above 0, got nan
    """
    if isinstance(value, int | float) and above < value < inf and not isinstance(value, bool):
        return float(value)
    raise ConfigError(f"{name} must be a finite number above {above:g}, got {value!r}")
