"""The name of a command that has left the package."""

from __future__ import annotations

import typer

from adaponder.cli.app import app
from adaponder.errors import InputError


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def reproduce(context: typer.Context) -> None:
    """Moved: run python -m experiments in a checkout (list, next, claim NAME, run LABEL, results, corpus)."""
    raise InputError(
        "adaponder reproduce has moved: in a checkout, run python -m experiments list, next, claim NAME, run LABEL "
        "or results"
    )
