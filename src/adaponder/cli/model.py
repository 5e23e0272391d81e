"""Commands that make, look at and use a model."""

from __future__ import annotations

import typer

from adaponder.cli.app import app
from adaponder.cli.ending import FAILED
from adaponder.cli.parsing import refuse
from adaponder.commands.options import ConvertOptions, DoctorOptions, GenerateOptions, InspectOptions, PuzzleOptions
from adaponder.errors import InputError


@app.taking(ConvertOptions)
def convert(options: ConvertOptions) -> None:
    """Make a checkpoint a member of the family, or a plain backbone again, and check that it still is what it was.

    [dim]adaponder convert EleutherAI/pythia-70m --method adaponder --out pythia-70m-ada[/]
    """
    from adaponder.commands import convert as command

    command.run(options)


@app.taking(GenerateOptions)
def generate(options: GenerateOptions) -> None:
    """Write on from prompts, each token coloured by how often it was read.

    [dim]adaponder generate runs/demo --prompt "import " --policy fixed:2[/]

    [dim]adaponder generate runs/demo --prompt-file prompts.jsonl --samples 4 --json out.json[/]

    [dim]echo "def main" | adaponder generate runs/demo --stop "return" --greedy[/]

    [dim]adaponder generate runs/demo --interactive[/]

    [dim]adaponder generate runs/chat --interactive --chat[/]
    """
    from adaponder.commands import generate as command

    if options.interactive:
        asked = {"prompt": options.prompt, "prompt_file": options.prompt_file, "json": options.json}
        refuse("--interactive", **asked, samples=options.samples > 1)
    command.run(options)


@app.taking(InspectOptions)
def inspect(options: InspectOptions) -> None:
    """Show shapes, parameters with and without what the method adds, and the cost of a token at each depth."""
    from adaponder.commands import inspect as command

    command.run(options)


@app.taking(PuzzleOptions)
def puzzle(options: PuzzleOptions) -> None:
    """Show a checkpoint at puzzles whose needed depth is known: easy words are read once, hard ones again and again.

    [dim]adaponder puzzle --seed 5[/]
    """
    from adaponder.commands import puzzle as command

    command.run(options)


@app.taking(DoctorOptions)
def doctor(options: DoctorOptions) -> None:
    """Show versions, devices, which kernels would run, and whether the meter agrees with torch.

    Of a checkpoint: whether every file is as it was written, nothing in it asks to run code, and its settings agree.
    """
    if options.checkpoint is not None:
        from adaponder.commands import checkup

        result = checkup.run(options)
    elif options.seal:
        raise InputError("--seal: name the checkpoint to seal")
    else:
        from adaponder.commands import doctor as command

        result = command.run(options)
    if result["problems"]:
        raise typer.Exit(FAILED)
