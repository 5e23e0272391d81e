"""Commands that work through the paper's claims."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from adaponder.cli.app import Device, Json, app
from adaponder.cli.values import folder, numbers


@app.command()
def reproduce(
    claim: Annotated[str | None, typer.Argument(metavar="CLAIM", help="Which runs; --list shows the claims.")] = None,
    following: Annotated[bool, typer.Option("--next", help="The next runs of the whole queue, in its order.")] = False,
    listed: Annotated[bool, typer.Option("--list", help="Show runs, states and results; do nothing.")] = False,
    one: Annotated[str | None, typer.Option("--run", metavar="LABEL", help="One run, in this process.")] = None,
    seeds: Annotated[str | None, typer.Option(metavar="0,1,…", help="These seeds instead of the queue's.")] = None,
    minutes: Annotated[
        float | None, typer.Option(metavar="X", min=0.1, max=1e6, help="Start only what ends within so many minutes.")
    ] = None,
    jobs: Annotated[
        int,
        typer.Option(
            metavar="N", min=1, max=64, help="Runs that share the device; small models leave most of it idle."
        ),
    ] = 1,
    data: Annotated[Path | None, typer.Option(metavar="DIR", help="Prepared text; default: the queue's.")] = None,
    queue: Annotated[
        Path | None, typer.Option(metavar="YAML", help="The queue; default: the checkout's experiments/queue.yaml.")
    ] = None,
    records: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where records are; default: beside the queue.", callback=folder)
    ] = None,
    runs: Annotated[Path, typer.Option(metavar="DIR", help="Run folders and logs.", callback=folder)] = Path(
        "runs/reproduce"
    ),
    commit: Annotated[
        str | None, typer.Option(metavar="NAME", help="The commit to name in records, where there is no git.")
    ] = None,
    beside: Annotated[int, typer.Option(min=0, hidden=True)] = 0,
    device: Device = "cpu",
    json: Json = None,
) -> None:
    """Train the runs that a claim of the paper needs; one record each, what has one is skipped.

    [dim]adaponder reproduce --list[/]

    [dim]adaponder reproduce lr --seeds 0,1 --device cuda --jobs 3[/]

    [dim]adaponder reproduce --next --minutes 25 --device cuda --jobs 3[/]
    """
    from adaponder.commands import reproduce as command

    code = command.run(
        claim,
        seeds=numbers("--seeds", seeds, least=0),
        listed=listed,
        following=following,
        one=one,
        minutes=minutes,
        jobs=jobs,
        queue=queue,
        data=data,
        runs=runs,
        records=records,
        device=device,
        commit=commit,
        beside=beside,
        json=json,
    )
    raise typer.Exit(code)
