"""Commands that turn text into shards and shards into a model."""

from __future__ import annotations

import typer

from adaponder.cli.app import app
from adaponder.cli.ending import INTERRUPTED
from adaponder.commands.options import DemoOptions, PrepareOptions, RecipesOptions, SweepOptions, TrainOptions


@app.taking(PrepareOptions)
def prepare(options: PrepareOptions) -> None:
    """Turn text into token shards that training reads."""
    from adaponder.commands import prepare as command

    command.run(options)


@app.taking(TrainOptions)
def train(options: TrainOptions) -> None:
    """Train a recipe: on this machine, or on many with torchrun in front.

    [dim]adaponder train cpu/demo --set train.steps=100[/]

    [dim]torchrun --nproc-per-node 8 -m adaponder train paper/adaponder-70m --device cuda --resume auto[/]
    """
    from adaponder.commands import train as command

    if command.run(options).final is None:
        raise typer.Exit(INTERRUPTED)


@app.taking(SweepOptions)
def sweep(options: SweepOptions) -> None:
    """Train a grid of recipes, or go on with it; then one table and one figure.

    [dim]adaponder sweep cpu/demo --grid train.ponder_weight=0,0.1,0.2 --grid train.k_max=0.1,0.2 --one-at-a-time[/]
    """
    from adaponder.commands import sweep as command

    raise typer.Exit(command.run(options).exit_code)


@app.taking(RecipesOptions)
def recipes(options: RecipesOptions) -> None:
    """List the recipes that ship, or show one with every field and where its value is from."""
    from adaponder.commands import recipes as command

    command.run(options)


@app.taking(DemoOptions)
def demo(options: DemoOptions) -> None:
    """Pretrain a small AdaPonderLM on the Python standard library and show what it learned: minutes, no download."""
    from adaponder.commands import demo as command

    command.run(options)
