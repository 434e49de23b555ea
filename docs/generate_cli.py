"""Writes docs/cli.md from the command line itself; a test fails when the page is stale."""

import inspect
from collections.abc import Iterator
from pathlib import Path

import click
from typer.main import get_command

from fedkeep.cli.app import app

PAGE = Path(__file__).with_name("cli.md")
INTRODUCTION = """# Command line

This page is generated from the commands themselves (`make docs`). `fedkeep --help` and
`fedkeep VERB --help` print the same. A mistake ends in one sentence and exit code 2. Notes go to
standard error, progress bars only to a terminal; standard output holds the result alone. `NO_COLOR`
is respected. `fedkeep --install-completion` teaches your shell the verbs and options.
"""


def page() -> str:
    """The whole page."""
    root = click.Context(get_command(app), info_name="fedkeep")
    return INTRODUCTION + "".join(_section(context) for context in verbs(root))


def verbs(context: click.Context) -> Iterator[click.Context]:
    """Every command below a group, groups before their members."""
    assert isinstance(context.command, click.Group)
    for name, command in context.command.commands.items():
        below = click.Context(command, info_name=name, parent=context)
        yield below
        if isinstance(command, click.Group):
            yield from verbs(below)


def _section(context: click.Context) -> str:
    level = "#" * (1 + len(context.command_path.split()) - 1)
    usage = " ".join(context.command.collect_usage_pieces(context))
    text = inspect.cleandoc(context.command.help or "")
    command = context.command_path
    head = f"\n{level} `{command}`\n\n{text}\n\n```text\n{command} {usage}\n```\n"
    rows = [row for parameter in context.command.params if (row := _row(parameter, context))]
    return head + ("\n| | |\n|---|---|\n" + "\n".join(rows) + "\n" if rows else "")


def _row(parameter: click.Parameter, context: click.Context) -> str | None:
    record = parameter.get_help_record(context)
    if record is None or parameter.name == "help":
        return None
    name, text = record
    words = (
        " ".join(text.removesuffix("[required]").split())
        if isinstance(parameter, click.Argument)
        else text
    )
    return f"| `{_cell(name)}` | {_cell(' '.join(words.split()))} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
