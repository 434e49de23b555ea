"""The `fedkeep` command: gathers the verbs."""

from typing import Annotated, Any

import click
import typer
import typer.core

import fedkeep
from fedkeep.cli.advise import advise
from fedkeep.cli.agent import agent
from fedkeep.cli.check import check
from fedkeep.cli.demo import demo
from fedkeep.cli.explain import explain, list_
from fedkeep.cli.export import export
from fedkeep.cli.fleet import fleet, provision, serve
from fedkeep.cli.keyholder import keyholder
from fedkeep.cli.paper import paper
from fedkeep.cli.plan import plan
from fedkeep.cli.report import report
from fedkeep.cli.run import run
from fedkeep.cli.watch import watch

typer.core.HAS_RICH = False  # else it writes "\\[default: 5]" into plain help, with rich's escapes


class CommandGroup(typer.core.TyperGroup):
    """A group of commands that names the nearest one to a misspelt one, once."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        # click has suggestions of its own since 8.4, and would print them beside typer's.
        self.suggest_commands = not hasattr(click.exceptions, "NoSuchCommand")


app = typer.Typer(
    name="fedkeep",
    cls=CommandGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(fedkeep.__version__)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Decides what a federated device keeps of its stream."""


for verb in (demo, advise, run, paper, report, watch, plan, check, export, provision, serve):
    app.command()(verb)
app.command("list")(list_)
app.command()(explain)
app.add_typer(agent, name="agent", cls=CommandGroup)
app.add_typer(fleet, name="fleet", cls=CommandGroup)
app.add_typer(keyholder, name="keyholder", cls=CommandGroup)
