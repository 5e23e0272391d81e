"""Commands that turn text into shards and shards into a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from adaponder.cli.app import Device, Json, app
from adaponder.cli.values import folder, numbers, share


@app.command()
def prepare(
    inputs: Annotated[
        list[str],
        typer.Argument(
            metavar="INPUT…", help="Files, folders, .jsonl (all also .gz .xz .bz2 .zst), .parquet, hf:NAME, stdlib."
        ),
    ],
    tokenizer: Annotated[
        str, typer.Option(metavar="NAME", help="Folder or hub name, a tokenizer.json, or train-bpe:N.")
    ],
    out: Annotated[
        Path,
        typer.Option(metavar="DIR", help="Where the shards go; the same command again continues.", callback=folder),
    ],
    validation: Annotated[
        float, typer.Option(metavar="X", help="Share of documents held out, by hash, from 0 up to 1.", callback=share)
    ] = 0.01,
    workers: Annotated[
        int | None, typer.Option(metavar="N", min=1, max=1024, help="Processes; default: one per core.")
    ] = None,
    end_token: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="Ends each document; default: the tokenizer's own, else <|endoftext|>."),
    ] = None,
    shard_tokens: Annotated[int, typer.Option(metavar="N", min=1, help="Tokens per shard file, about.")] = 2**25,
    json: Json = None,
) -> None:
    """Turn text into token shards that training reads."""
    from adaponder.commands import prepare as command

    command.run(
        inputs,
        tokenizer=tokenizer,
        out=out,
        validation=validation,
        workers=workers,
        end_token=end_token,
        shard_tokens=shard_tokens,
        json=json,
    )


@app.command()
def train(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A name from adaponder recipes, or a YAML file.")],
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="a.b=c", help="Change one field; may be repeated.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The run folder; default runs/NAME.", callback=folder)
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(
            metavar="DIR", help="auto: from the newest whole checkpoint, or start; a finished run stays. Or a folder."
        ),
    ] = None,
    weights_only: Annotated[bool, typer.Option("--weights-only", help="Take only weights from --resume.")] = False,
    allow_changes: Annotated[
        bool, typer.Option("--allow-changes", help="Resume although the recipe or the world differs.")
    ] = False,
    wandb: Annotated[
        str | None, typer.Option(metavar="PROJECT", help="Log to this Weights & Biases project too.")
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show every field of the recipe.")] = False,
    device: Device = "cpu",
    json: Json = None,
) -> None:
    """Train a recipe: on this machine, or on many with torchrun in front.

    [dim]adaponder train cpu/demo --set train.steps=100[/]

    [dim]torchrun --nproc-per-node 8 -m adaponder train paper/adaponder-70m --device cuda --resume auto[/]
    """
    from adaponder.commands import train as command

    done = command.run(
        recipe,
        overrides=overrides or [],
        out=out,
        resume=resume,
        device=device,
        weights_only=weights_only,
        allow_changes=allow_changes,
        wandb=wandb,
        verbose=verbose,
        json=json,
    )
    if done.final is None:
        raise typer.Exit(130)


@app.command()
def sweep(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A name from adaponder recipes, or a YAML file.")],
    grid: Annotated[
        list[str] | None, typer.Option("--grid", metavar="a.b=x,y,…", help="One axis and its values; may be repeated.")
    ] = None,
    one_at_a_time: Annotated[
        bool, typer.Option("--one-at-a-time", help="Vary each axis around the recipe's own value.")
    ] = False,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="a.b=c", help="Change one field in every run.")
    ] = None,
    seeds: Annotated[str | None, typer.Option(metavar="0,1,…", help="Every run with each seed.")] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="A folder per run; default runs/NAME-sweep.", callback=folder)
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the runs and their commands; do nothing.")] = False,
    device: Device = "cpu",
    json: Json = None,
) -> None:
    """Train a grid of recipes, or go on with it; then one table and one figure.

    [dim]adaponder sweep cpu/demo --grid train.ponder_weight=0,0.1,0.2 --grid train.k_max=0.1,0.2 --one-at-a-time[/]
    """
    from adaponder.commands import sweep as command

    done = command.run(
        recipe,
        grids=grid or [],
        overrides=overrides or [],
        one_at_a_time=one_at_a_time,
        seeds=numbers("--seeds", seeds, least=0),
        out=out,
        device=device,
        dry_run=dry_run,
        json=json,
    )
    raise typer.Exit(done.exit_code)


@app.command()
def recipes(
    name: Annotated[
        str | None, typer.Argument(metavar="RECIPE", help="Show this one, field by field; default: list all.")
    ] = None,
    json: Json = None,
) -> None:
    """List the recipes that ship, or show one with every field and where its value is from."""
    from adaponder.commands import recipes as command

    if name is None:
        command.list_recipes(json=json)
    else:
        command.describe(name, json=json)


@app.command()
def demo(
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="The run folder; the same command again goes on.", callback=folder)
    ] = Path("runs/demo"),
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="a.b=c", help="Change one field of cpu/demo.")
    ] = None,
    json: Json = None,
) -> None:
    """Pretrain a small AdaPonderLM on the Python standard library and show what it learned: minutes, no download."""
    from adaponder.commands import demo as command

    command.run(out=out, overrides=overrides or [], json=json)
