"""The application that commands register with."""

from __future__ import annotations

from typing import Annotated

import typer

from adaponder.cli.parsing import App
from adaponder.terminal import quiet_libraries
from adaponder.version import __version__

app = App(
    name="adaponder",
    help="Language models that read hard tokens more often.\n\n"
    "A stock Hugging Face decoder is read up to K times per token; a gate decides, token by token, when it is enough. "
    "Start with [bold]adaponder demo[/], or convert a checkpoint you have.",
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
