"""Commands that work through the paper's claims."""

from __future__ import annotations

import typer

from adaponder.cli.app import app
from adaponder.commands.options import ReproduceOptions


@app.taking(ReproduceOptions)
def reproduce(options: ReproduceOptions) -> None:
    """Train the runs that a claim of the paper needs; one record each, what has one is skipped.

    [dim]adaponder reproduce --list[/]

    [dim]adaponder reproduce lr --seeds 0,1 --device cuda --jobs 3[/]

    [dim]adaponder reproduce --next --minutes 25 --device cuda --jobs 3[/]

    [dim]adaponder reproduce --results[/]
    """
    from adaponder.commands import reproduce as command

    raise typer.Exit(command.run(options))
