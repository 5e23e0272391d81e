"""Commands that make, look at and use a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from adaponder.cli.app import (
    Checkpoint,
    Device,
    Dtype,
    Json,
    MaxIterations,
    PolicyText,
    Profile,
    Seed,
    Tau,
    Tokenizer,
    app,
)
from adaponder.cli.values import above, between, folder, one_of, policy_from
from adaponder.errors import InputError
from adaponder.registry import DEFAULT_METHOD, method_names


@app.command()
def convert(
    source: Annotated[
        str, typer.Argument(metavar="SRC", help="A stock, PonderLM or AdaPonder checkpoint: folder or hub name.")
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where to save; must be new or empty.", callback=folder)],
    method: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help=f"{', '.join(method_names())}; or backbone: back to plain.",
            callback=one_of(*method_names(), "backbone"),
        ),
    ] = DEFAULT_METHOD,
    iterations: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="K; default 4, or what the source was trained with.")
    ] = None,
    gate_bias: Annotated[
        float | None, typer.Option(metavar="X", help="Gates start at sigmoid of this; default 4.")
    ] = None,
    gate_width: Annotated[
        int | None, typer.Option(metavar="N", min=0, help="Gate width in hidden sizes; 0 is linear; default 4.")
    ] = None,
    tau: Annotated[
        float | None,
        typer.Option(metavar="X", help="A token halts below this, 0 to 1; default 1e-4.", callback=between(0, 1)),
    ] = None,
    embedding_scale: Annotated[
        float | None, typer.Option(metavar="X", help="Default: as the source was trained.", callback=above(0))
    ] = None,
    text: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Text, or a file of it: shows the loss at each depth.")
    ] = None,
    revision: Annotated[str | None, typer.Option(metavar="NAME", help="Branch, tag or commit of a hub source.")] = None,
    seed: Seed = 0,
    dtype: Dtype = "auto",
    json: Json = None,
) -> None:
    """Make a checkpoint a member of the family, or a plain backbone again, and check that it still is what it was.

    [dim]adaponder convert EleutherAI/pythia-70m --method adaponder --out pythia-70m-ada[/]
    """
    from adaponder.commands import convert as command

    command.run(
        source,
        out=out,
        method=method,
        iterations=iterations,
        gate_bias=gate_bias,
        gate_width=gate_width,
        tau=tau,
        embedding_scale=embedding_scale,
        text=text,
        revision=revision,
        seed=seed,
        dtype=dtype,
        json=json,
    )


@app.command()
def generate(
    checkpoint: Checkpoint,
    prompt: Annotated[str, typer.Option(metavar="TEXT", help="What to go on from.")],
    tokenizer: Tokenizer = None,
    max_new_tokens: Annotated[int, typer.Option(metavar="N", min=1, help="How many tokens to add.")] = 64,
    temperature: Annotated[float, typer.Option(metavar="X", help="Of the sampling.", callback=above(0))] = 1.0,
    top_p: Annotated[
        float,
        typer.Option(
            metavar="X", help="Sample from the likeliest tokens of this total probability.", callback=above(0, most=1)
        ),
    ] = 1.0,
    greedy: Annotated[bool, typer.Option("--greedy", help="Always the likeliest token.")] = False,
    tau: Tau = None,
    policy: PolicyText = None,
    profile: Profile = None,
    max_iterations: MaxIterations = None,
    depth_colours: Annotated[bool, typer.Option(help="Colour each token by how often it was read.")] = True,
    seed: Seed = 0,
    device: Device = "cpu",
    dtype: Dtype = "auto",
    json: Json = None,
) -> None:
    """Write on from a prompt, each token coloured by how often it was read."""
    from adaponder.commands import generate as command

    command.run(
        checkpoint,
        prompt=prompt,
        tokenizer=tokenizer,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        greedy=greedy,
        tau=tau,
        policy=policy_from("--policy", policy),
        profile=profile,
        max_iterations=max_iterations,
        depth_colours=depth_colours,
        seed=seed,
        device=device,
        dtype=dtype,
        json=json,
    )


@app.command()
def inspect(
    checkpoint: Checkpoint,
    context: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=0, help="Tokens before the one counted; default 2048, or the backbone's positions."
        ),
    ] = None,
    json: Json = None,
) -> None:
    """Show shapes, parameters with and without what the method adds, and the cost of a token at each depth."""
    from adaponder.commands import inspect as command

    command.run(checkpoint, context=context, json=json)


@app.command()
def doctor(
    checkpoint: Annotated[
        str | None, typer.Argument(metavar="CKPT", help="Examine this checkpoint instead of the installation.")
    ] = None,
    seal: Annotated[
        bool,
        typer.Option(
            "--seal",
            help="Take the checkpoint's files as they are: the tokenizer decides on end and padding, "
            "checksums are written anew.",
        ),
    ] = False,
    json: Json = None,
) -> None:
    """Show versions, devices, which kernels would run, and whether the meter agrees with torch.

    Of a checkpoint: whether every file is as it was written, nothing in it asks to run code, and its settings agree.
    """
    if checkpoint is not None:
        from adaponder.commands import checkup

        found = checkup.run(checkpoint, seal=seal, json=json)
    elif seal:
        raise InputError("--seal: name the checkpoint to seal")
    else:
        from adaponder.commands import doctor as command

        found = command.run(json=json)
    if found["problems"]:
        raise typer.Exit(1)
