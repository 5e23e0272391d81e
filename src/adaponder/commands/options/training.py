"""Options of the commands that turn text into shards, shards into a model, and claims into records."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from adaponder.commands.options import values
from adaponder.commands.options.option import Option
from adaponder.commands.options.shared import RECIPE, Device, Json


@dataclass(frozen=True, kw_only=True)
class PrepareOptions(Json):
    """``adaponder prepare``."""

    inputs: Annotated[
        Sequence[str],
        Option(
            argument=True,
            several=True,
            metavar="INPUT…",
            help="Files, folders, .jsonl (all also .gz .xz .bz2 .zst), .parquet, hf:NAME, stdlib, hops, mano.",
        ),
    ]
    tokenizer: Annotated[
        str | None,
        Option(metavar="NAME", help="Folder or hub name, a tokenizer.json, train-bpe:N; hops and mano need none."),
    ] = None
    out: Annotated[
        Path,
        Option(metavar="DIR", help="Where the shards go; the same command again continues.", check=values.folder),
    ]
    validation: Annotated[
        float,
        Option(metavar="X", help="Share of documents held out, by hash, from 0 up to 1.", check=values.share),
    ] = 0.01
    workers: Annotated[int | None, Option(metavar="N", min=1, max=1024, help="Processes; default: one per core.")] = (
        None
    )
    end_token: Annotated[
        str | None,
        Option(metavar="TEXT", help="Ends each document; default: the tokenizer's own, else <|endoftext|>."),
    ] = None
    shard_tokens: Annotated[int, Option(metavar="N", min=1, help="Tokens per shard file, about.")] = 2**25
    chat: Annotated[
        Sequence[str],
        Option(
            metavar="FIELD",
            help="Records are conversations: their field of messages, or PROMPT,COMPLETION.",
            read=values.names,
        ),
    ] = ()
    chat_template: Annotated[
        Path | None,
        Option(metavar="FILE", help="Jinja template that writes them; default: the tokenizer's own."),
    ] = None


@dataclass(frozen=True, kw_only=True)
class TrainOptions(Device, Json):
    """``adaponder train``."""

    recipe: Annotated[str, RECIPE]
    overrides: Annotated[
        Sequence[str],
        Option(flags=("--set",), several=True, metavar="a.b=c", help="Change one field; may be repeated."),
    ] = ()
    out: Annotated[
        Path | None, Option(metavar="DIR", help="The run folder; default runs/NAME.", check=values.folder)
    ] = None
    resume: Annotated[
        str | None,
        Option(
            metavar="DIR",
            help="auto: from the newest whole checkpoint, or start; a finished run stays. Or a folder.",
        ),
    ] = None
    weights_only: Annotated[bool, Option(flags=("--weights-only",), help="Take only weights from --resume.")] = False
    allow_changes: Annotated[
        bool, Option(flags=("--allow-changes",), help="Resume although the recipe or the world differs.")
    ] = False
    wandb: Annotated[str | None, Option(metavar="PROJECT", help="Log to this Weights & Biases project too.")] = None
    verbose: Annotated[bool, Option(flags=("--verbose",), help="Show every field of the recipe.")] = False


@dataclass(frozen=True, kw_only=True)
class SweepOptions(Device, Json):
    """``adaponder sweep``."""

    recipe: Annotated[str, RECIPE]
    grid: Annotated[
        Sequence[str],
        Option(several=True, metavar="a.b=x,y,…", help="One axis and its values; may be repeated."),
    ] = ()
    one_at_a_time: Annotated[
        bool, Option(flags=("--one-at-a-time",), help="Vary each axis around the recipe's own value.")
    ] = False
    overrides: Annotated[
        Sequence[str],
        Option(flags=("--set",), several=True, metavar="a.b=c", help="Change one field in every run."),
    ] = ()
    seeds: Annotated[
        Sequence[int], Option(metavar="0,1,…", help="Every run with each seed.", read=values.numbers(least=0))
    ] = ()
    out: Annotated[
        Path | None,
        Option(metavar="DIR", help="A folder per run; default runs/NAME-sweep.", check=values.folder),
    ] = None
    dry_run: Annotated[bool, Option(flags=("--dry-run",), help="Show the runs and their commands; do nothing.")] = False


@dataclass(frozen=True, kw_only=True)
class RecipesOptions(Json):
    """``adaponder recipes``."""

    name: Annotated[
        str | None,
        Option(argument=True, metavar="RECIPE", help="Show this one, field by field; default: list all."),
    ] = None


@dataclass(frozen=True, kw_only=True)
class DemoOptions(Json):
    """``adaponder demo``."""

    out: Annotated[
        Path, Option(metavar="DIR", help="The run folder; the same command again goes on.", check=values.folder)
    ] = Path("runs/demo")
    overrides: Annotated[
        Sequence[str],
        Option(flags=("--set",), several=True, metavar="a.b=c", help="Change one field of cpu/demo."),
    ] = ()
