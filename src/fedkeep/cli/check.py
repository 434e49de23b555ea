"""`fedkeep check`: check a user-defined policy."""

from typing import Annotated

import typer

from fedkeep.config.method_components import find_policy
from fedkeep.core.errors import ConfigError, FedkeepError
from fedkeep.testing import ConformanceError, check_policy


def check(
    policy: Annotated[
        str, typer.Argument(metavar="MODULE:CLASS", help="A policy class, or a registered name.")
    ],
) -> None:
    """Check that a policy keeps the rules.

    Its scores must be sound, whatever the chunking and after a restart.
    """
    cls = find_policy(policy)
    try:
        made = cls()
    except TypeError as error:
        raise ConfigError(
            f"{policy} cannot be made without arguments: give every field a default ({error})"
        ) from error
    try:
        report = check_policy(made)
    except ConformanceError as error:
        raise FedkeepError(f"{policy} breaks a rule: {error}") from error
    for passed in report.passed:
        typer.echo(f"ok       {passed}")
    for skipped, reason in report.skipped.items():
        typer.echo(f"skipped  {skipped}: {reason}")
