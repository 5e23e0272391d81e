"""Commands that measure: ours and the plain version in one run."""

from __future__ import annotations

from adaponder.cli.app import app
from adaponder.cli.parsing import App
from adaponder.commands.options import (
    DecodeBenchOptions,
    OpsBenchOptions,
    PrefillBenchOptions,
    ServeBenchOptions,
    TrainBenchOptions,
)

bench = App(
    help="Measure speed and memory: ours beside a plain PonderLM (stock modules, eager), in one run, with a record.\n\n"
    "Runs from a checkout: the plain version lives in benchmarks/, and records (hardware, versions, commit, figures) "
    "go to benchmarks/records/. The operations' tests run first; if one fails, nothing is measured.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)
app.add_typer(bench, name="bench")


@bench.taking(TrainBenchOptions)
def train(options: TrainBenchOptions) -> None:
    """Time a training step: plain PonderLM, our ponder, and adaponder compiled, eager and checkpointed.

    [dim]adaponder bench train --device cuda --batch 32 --largest[/]

    [dim]adaponder bench train --device cuda --batch 32 --keep 1,.5,.5,.5[/]
    """
    from adaponder.commands import bench as command

    command.run_train(options)


@bench.taking(PrefillBenchOptions)
def prefill(options: PrefillBenchOptions) -> None:
    """Time reading a prompt of which a share halts: skipping their work (compact) against computing all (dense).

    [dim]adaponder bench prefill --device cuda --batch 8 --keep 1,.5,.5,.5[/]
    """
    from adaponder.commands import bench as command

    command.run_prefill(options)


@bench.taking(OpsBenchOptions)
def ops(options: OpsBenchOptions) -> None:
    """Time the operations over the vocabulary by themselves, against the device's own matmul and copy.

    [dim]adaponder bench ops --device cuda --size 65536,512,50304[/]
    """
    from adaponder.commands import bench as command

    command.run_ops(options)


@bench.taking(DecodeBenchOptions)
def decode(options: DecodeBenchOptions) -> None:
    """Time decoding in the engine: one stream and many lanes, contexts, depths; beside generate and Hugging Face's.

    [dim]adaponder bench decode --device cuda --subset[/]

    [dim]adaponder bench decode --device cuda --scenario ouro[/]
    """
    from adaponder.commands import bench_decode as command

    command.run(options)


@bench.taking(ServeBenchOptions)
def serve(options: ServeBenchOptions) -> None:
    """Load a server with requests that arrive at random times, at rates that rise: tokens/s, waiting times, failures.

    [dim]adaponder bench serve runs/demo --new 32[/]

    [dim]adaponder bench serve --url http://127.0.0.1:8000 --rates 1,2,4,8[/]

    [dim]adaponder bench serve --stand-in 64,8 --stand-in 256,8[/]
    """
    from adaponder.commands import bench_serve as command

    command.run(options)
