"""Commands that measure: ours and the plain version in one run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from adaponder.cli.app import Device, Json, app
from adaponder.cli.values import App, decimals, numbers, one_of
from adaponder.errors import InputError

if TYPE_CHECKING:
    from adaponder.bench.ops import Size
    from adaponder.commands.bench import How

bench = App(
    help="Measure speed and memory: ours beside a plain PonderLM (stock modules, eager), in one run, with a record.\n\n"
    "Runs from a checkout: the plain version lives in benchmarks/, and records (hardware, versions, commit, figures) "
    "go to benchmarks/records/. The operations' tests run first; if one fails, nothing is measured.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)
app.add_typer(bench, name="bench")

RecipeName = Annotated[
    str | None,
    typer.Option(
        "--recipe", metavar="RECIPE", help="Whose model; default paper/adaponder-70m on a GPU, cpu/demo on a CPU."
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="a.b=c", help="Change one field of the recipe; may be repeated."),
]
Batch = Annotated[
    int | None,
    typer.Option(
        metavar="N", min=1, help="Sequences at once; default: the recipe's micro_batch, else its global_batch."
    ),
]
SHARES = "Share of tokens read at each iteration; random tokens halt."
Compiles = Annotated[
    bool, typer.Option("--compile/--no-compile", help="Measure compiled variants too (needs a C++ compiler on a CPU).")
]
Repeats = Annotated[int, typer.Option(metavar="N", min=1, max=100_000, help="Timed repetitions; their median counts.")]
Warmup = Annotated[
    int, typer.Option(metavar="N", min=0, max=100_000, help="Repetitions before, not timed: compilation and caches.")
]
SeedOrOwn = Annotated[
    int | None,
    typer.Option("--seed", metavar="N", min=0, help="Of weights and tokens; default: the recipe's; 0 for ops."),
]
Commit = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", help="Which commit is measured; default: what git says. Needed where there is no git."
    ),
]
Record = Annotated[bool, typer.Option("--record/--no-record", help="Keep a record under benchmarks/records/.")]
Trust = Annotated[bool, typer.Option("--trust", help="Do not run the operations' tests first; the record says so.")]

Only = Annotated[
    list[str] | None,
    typer.Option(
        metavar="WORD",
        help="Measure only plain and variants whose name contains WORD (for example: compiled; ops: ours); may be "
        "repeated. Keeps no record.",
    ),
]


@bench.command()
def train(
    recipe: RecipeName = None,
    overrides: Overrides = None,
    batch: Batch = None,
    keep: Annotated[
        str | None,
        typer.Option(
            metavar="1,.5,…", help=f"{SHARES} Compares training that skips halted tokens with dense training."
        ),
    ] = None,
    compiles: Compiles = True,
    largest: Annotated[
        bool, typer.Option("--largest", help="Search the largest batch too, in multiples of --batch (GPU only).")
    ] = False,
    repeats: Repeats = 10,
    warmup: Warmup = 3,
    only: Only = None,
    trust: Trust = False,
    commit: Commit = None,
    record: Record = True,
    seed: SeedOrOwn = None,
    device: Device = "cpu",
    json: Json = None,
) -> None:
    """Time a training step: plain PonderLM, our ponder, and adaponder compiled, eager and checkpointed.

    [dim]adaponder bench train --device cuda --batch 32 --largest[/]

    [dim]adaponder bench train --device cuda --batch 32 --keep 1,.5,.5,.5[/]
    """
    from adaponder.commands import bench as command

    command.run_train(
        _how(device, seed, warmup, repeats, commit, record, trust, only, json),
        recipe=recipe,
        overrides=overrides or [],
        batch=batch,
        keep=decimals("--keep", keep, most=1),
        compiles=compiles,
        largest=largest,
    )


@bench.command()
def prefill(
    recipe: RecipeName = None,
    overrides: Overrides = None,
    batch: Batch = None,
    keep: Annotated[
        str | None, typer.Option(metavar="1,.5,…", help=f"{SHARES} Default: all once, half of them to the end.")
    ] = None,
    compiles: Compiles = True,
    repeats: Repeats = 10,
    warmup: Warmup = 3,
    only: Only = None,
    trust: Trust = False,
    commit: Commit = None,
    record: Record = True,
    seed: SeedOrOwn = None,
    device: Device = "cpu",
    json: Json = None,
) -> None:
    """Time reading a prompt of which a share halts: skipping their work (compact) against computing all (dense).

    [dim]adaponder bench prefill --device cuda --batch 8 --keep 1,.5,.5,.5[/]
    """
    from adaponder.commands import bench as command

    command.run_prefill(
        _how(device, seed, warmup, repeats, commit, record, trust, only, json),
        recipe=recipe,
        overrides=overrides or [],
        batch=batch,
        keep=decimals("--keep", keep, most=1),
        compiles=compiles,
    )


@bench.command()
def ops(
    size: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TOKENS,D,VOCABULARY",
            help="May be repeated; default 65536,512,50304 and 16384,1024,50304 on a GPU, 1024,128,4096 on a CPU.",
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="bfloat16 (autocast) or float32; default: the first on a GPU, else the second.",
            callback=one_of("bfloat16", "float32"),
        ),
    ] = None,
    repeats: Repeats = 10,
    warmup: Warmup = 3,
    only: Only = None,
    trust: Trust = False,
    commit: Commit = None,
    record: Record = True,
    seed: SeedOrOwn = None,
    device: Device = "cpu",
    json: Json = None,
) -> None:
    """Time the operations over the vocabulary by themselves, against the device's own matmul and copy.

    [dim]adaponder bench ops --device cuda --size 65536,512,50304[/]
    """
    from adaponder.commands import bench as command

    command.run_ops(
        _how(device, seed, warmup, repeats, commit, record, trust, only, json),
        sizes=[_size(text) for text in size or []],
        dtype=dtype,
    )


def _how(
    device: str,
    seed: int | None,
    warmup: int,
    repeats: int,
    commit: str | None,
    record: bool,
    trust: bool,
    only: list[str] | None,
    json: Path | None,
) -> How:
    from adaponder.commands.bench import How

    return How(
        device=device,
        seed=seed,
        warmup=warmup,
        repeats=repeats,
        commit=commit,
        record=record,
        trust=trust,
        only=tuple(only or ()),
        json=json,
    )


def _size(text: str) -> Size:
    from adaponder.bench.ops import Size

    parts = numbers("--size", text)
    if len(parts) != 3:
        raise InputError(f"--size {text}: tokens, d and vocabulary are needed, as in 65536,512,50304")
    return Size(*parts)
