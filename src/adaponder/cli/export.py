"""The command that hands a checkpoint to others."""

from __future__ import annotations

from adaponder.cli.app import app
from adaponder.commands.options import ExportOptions


@app.taking(ExportOptions)
def export(options: ExportOptions) -> None:
    """Write a checkpoint as a folder for the hub, which opens in transformers alone, with its code and a model card.

    [dim]adaponder export runs/demo --data data/stdlib-train-bpe-2048 --out demo-hub[/]

    [dim]adaponder export runs/demo --out demo-hub --license apache-2.0 --push me/demo[/]
    """
    from adaponder.commands import export as command

    command.run(options)
