"""The application that commands register with."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from adaponder.cli.parsing import App
from adaponder.terminal import quiet_libraries
from adaponder.version import __version__

# Every command, in the order in which a newcomer meets them, below the heading that ``--help`` shows them under.
PANELS = {
    "Try it": ("demo", "generate", "puzzle", "serve"),
    "Train": ("prepare", "recipes", "train", "sweep"),
    "Measure": ("eval", "compare", "analyze", "policies", "calibrate", "bench"),
    "Checkpoints": ("inspect", "doctor", "convert", "export"),
    "The paper": ("reproduce",),
}


class Commands(TyperGroup):
    """Commands as :data:`PANELS` has them."""

    def __init__(self, *arguments: Any, **named: Any):
        super().__init__(*arguments, **named)
        for panel, names in PANELS.items():
            for name in names:
                self.commands[name].rich_help_panel = panel

    def list_commands(self, ctx: Any) -> list[str]:
        return [name for names in PANELS.values() for name in names]


app = App(
    name="adaponder",
    cls=Commands,
    help="Language models that read hard tokens more often.\n\n"
    "A stock Hugging Face decoder is read up to K times per token; a gate decides, token by token, when it is enough. "
    "Start with [bold]adaponder puzzle[/] (seconds) or [bold]adaponder demo[/] (minutes), or convert a checkpoint you "
    "have.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    add_completion=False,
)


def show_version(version: bool) -> None:
    """Prints the version and ends the command if ``--version`` is there."""
    if version:
        typer.echo(f"adaponder {__version__}")
        raise typer.Exit


@app.callback()
def before_any_command(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=show_version, help="Say which version this is.")
    ] = False,
) -> None:
    quiet_libraries()
