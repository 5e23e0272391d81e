"""Command name to typed function: this file parses, and nothing else."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from adaponder.errors import AdaPonderError, ConfigError, InputError
from adaponder.terminal import errors, quiet_libraries

app = typer.Typer(
    name="adaponder",
    help="Language models that read hard tokens more often.\n\n"
    "A stock Hugging Face decoder is read up to K times per token; a gate decides, token by token, when it is enough. "
    "Start with [bold]adaponder demo[/], or convert a checkpoint you have.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    add_completion=False,
)

Checkpoint = Annotated[
    str, typer.Argument(metavar="CKPT", help="A model folder, a run folder, a step folder or a hub name.")
]
Json = Annotated[Path | None, typer.Option("--json", metavar="PATH", help="Write the result here as JSON too.")]
Seed = Annotated[int, typer.Option(help="Everything random follows this.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, …")]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16, float16, float64, or auto: as saved.")]


@app.callback()
def before_any_command() -> None:
    quiet_libraries()


@app.command()
def convert(
    source: Annotated[
        str, typer.Argument(metavar="SRC", help="A stock, PonderLM or AdaPonder checkpoint: folder or hub name.")
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where to save; must be new or empty.")],
    method: Annotated[
        str, typer.Option(help="adaponder, ponder, loop, pause, mor, ouro, vanilla; or backbone: back to plain.")
    ] = "adaponder",
    iterations: Annotated[int | None, typer.Option(help="K; default 4, or what the source was trained with.")] = None,
    gate_bias: Annotated[float | None, typer.Option(help="Gates start at sigmoid of this; default 4.")] = None,
    gate_width: Annotated[int | None, typer.Option(help="Gate width in hidden sizes; 0 is linear; default 4.")] = None,
    tau: Annotated[float | None, typer.Option(help="A token halts below this; default 1e-4.")] = None,
    embedding_scale: Annotated[float | None, typer.Option(help="Default: as the source was trained.")] = None,
    text: Annotated[str | None, typer.Option(help="Text, or a file of it: shows the loss at each depth.")] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub source.")] = None,
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
def prepare(
    inputs: Annotated[
        list[str],
        typer.Argument(metavar="INPUT…", help="Files, folders, .jsonl[.gz|.xz|.zst], .parquet, hf:NAME, stdlib."),
    ],
    tokenizer: Annotated[str, typer.Option(help="Folder or hub name, a tokenizer.json, or train-bpe:N.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where the shards go; the same command again continues.")],
    validation: Annotated[float, typer.Option(help="Share of documents held out, by hash.")] = 0.01,
    workers: Annotated[int | None, typer.Option(help="Processes; default: one per core.")] = None,
    json: Json = None,
) -> None:
    """Turn text into token shards that training reads."""
    from adaponder.commands import prepare as command

    command.run(inputs, tokenizer=tokenizer, out=out, validation=validation, workers=workers, json=json)


@app.command()
def train(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A name from adaponder recipes, or a YAML file.")],
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="a.b=c", help="Change one field; may be repeated.")
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="The run folder; default runs/NAME.")] = None,
    resume: Annotated[
        str | None, typer.Option(help="auto: from the newest whole checkpoint, or start; or a checkpoint folder.")
    ] = None,
    weights_only: Annotated[bool, typer.Option("--weights-only", help="Take only weights from --resume.")] = False,
    allow_changes: Annotated[
        bool, typer.Option("--allow-changes", help="Resume although the recipe or the world differs.")
    ] = False,
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
        json=json,
    )
    if done.final is None:
        raise typer.Exit(130)


@app.command()
def recipes(json: Json = None) -> None:
    """List the recipes that ship."""
    from adaponder.commands import train as command

    command.list_recipes(json=json)


@app.command()
def generate(
    checkpoint: Checkpoint,
    prompt: Annotated[str, typer.Option(help="What to go on from.")],
    tokenizer: Annotated[str | None, typer.Option(help="Folder or hub name; default: the checkpoint's own.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="How many tokens to add.")] = 64,
    temperature: Annotated[float, typer.Option(help="Of the sampling.")] = 1.0,
    top_p: Annotated[float, typer.Option(help="Sample from the likeliest tokens of this total probability.")] = 1.0,
    greedy: Annotated[bool, typer.Option("--greedy", help="Always the likeliest token.")] = False,
    tau: Annotated[float | None, typer.Option(help="Another threshold for the learned gate.")] = None,
    policy: Annotated[
        str | None, typer.Option(help="gate:0.01  gate:0.1,0.2,0.3  fixed:2  random:0.5  entropy:2.5  exit:0.9")
    ] = None,
    max_iterations: Annotated[int | None, typer.Option(help="Read no token more often than this.")] = None,
    depth_colours: Annotated[bool, typer.Option(help="Colour each token by how often it was read.")] = True,
    seed: Seed = 0,
    device: Device = "cpu",
    dtype: Dtype = "auto",
    json: Json = None,
) -> None:
    """Write on from a prompt, each token coloured by how often it was read."""
    from adaponder.commands import generate as command
    from adaponder.policies import parse_policy

    command.run(
        checkpoint,
        prompt=prompt,
        tokenizer=tokenizer,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        greedy=greedy,
        tau=tau,
        policy=None if policy is None else parse_policy(policy),
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
        int | None, typer.Option(help="Tokens before the one counted; default 2048, or the backbone's positions.")
    ] = None,
    json: Json = None,
) -> None:
    """Show shapes, parameters with and without what the method adds, and the cost of a token at each depth."""
    from adaponder.commands import inspect as command

    command.run(checkpoint, context=context, json=json)


@app.command()
def doctor(json: Json = None) -> None:
    """Show versions, devices and which kernels would run."""
    from adaponder.commands import doctor as command

    if command.run(json=json)["problems"]:
        raise typer.Exit(1)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(metavar="DIR", help="The run folder; the same command again goes on.")] = Path(
        "runs/demo"
    ),
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="a.b=c", help="Change one field of cpu/demo.")
    ] = None,
    json: Json = None,
) -> None:
    """Pretrain a small AdaPonderLM on the Python standard library and show what it learned: minutes, no download."""
    from adaponder.commands import demo as command

    command.run(out=out, overrides=overrides or [], json=json)


def main() -> None:
    """The entry point: 0 done, 1 failed, 2 wrong use, 130 interrupted."""
    try:
        app()
    except AdaPonderError as error:
        errors.print(f"[bold red]error:[/] {error}", markup=True, soft_wrap=True)
        sys.exit(2 if isinstance(error, (InputError, ConfigError)) else 1)
    except KeyboardInterrupt:
        errors.print("interrupted")
        sys.exit(130)
