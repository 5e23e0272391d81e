"""Options of the commands that make, look at and use a model."""

from dataclasses import dataclass, make_dataclass
from pathlib import Path
from typing import Annotated, Any, get_args

from adaponder.checkpoints.shipped import HOPS, full_name
from adaponder.commands.options import values
from adaponder.commands.options.option import Option
from adaponder.commands.options.shared import CHECKPOINT, Dtype, Json, Seed
from adaponder.fields import Recurrence, fields_of
from adaponder.registry import DEFAULT_METHOD, method_names


def _new_settings() -> Any:
    """An options class of every setting of the list that is an option; ``None`` leaves it as source or method has it.

    Names, types, ranges and help are the list's (:class:`adaponder.settings.Recurrence`).
    """
    options = []
    for name in ("iterations", "tau", "gate_width", "gate_bias", "embedding_scale"):
        field = fields_of(Recurrence)[name]
        kind = next(part for part in (field.type, *get_args(field.type)) if part in (int, float))
        option = Option(metavar="N" if kind is int else "X", help=field.meaning, check=values.allowed(field))
        options.append((name, Annotated[kind | None, option], None))
    return make_dataclass("NewSettings", options, frozen=True, kw_only=True)


NewSettings: Any = _new_settings()


@dataclass(frozen=True, kw_only=True)
class _Source:
    """Which source, and on which text the new model is tried."""

    text: Annotated[str | None, Option(metavar="TEXT", help="Text, or a file of it: shows the loss at each depth.")] = (
        None
    )
    revision: Annotated[str | None, Option(metavar="NAME", help="Branch, tag or commit of a hub source.")] = None


@dataclass(frozen=True, kw_only=True)
class ConvertOptions(NewSettings, _Source, Seed, Dtype, Json):
    """``adaponder convert``."""

    source: Annotated[
        str,
        Option(argument=True, metavar="SRC", help="A stock, PonderLM or AdaPonder checkpoint: folder or hub name."),
    ]
    out: Annotated[Path, Option(metavar="DIR", help="Where to save; must be new or empty.", check=values.folder)]
    method: Annotated[
        str,
        Option(
            metavar="NAME",
            help=f"{', '.join(method_names())}; or backbone: back to plain.",
            check=lambda name: values.one_of(*method_names(), "backbone")(name),  # by then there may be more
        ),
    ] = DEFAULT_METHOD


@dataclass(frozen=True, kw_only=True)
class InspectOptions(Json):
    """``adaponder inspect``."""

    checkpoint: Annotated[str, CHECKPOINT]
    context: Annotated[
        int | None,
        Option(metavar="N", min=0, help="Tokens before the one counted; default 2048, or the backbone's positions."),
    ] = None


@dataclass(frozen=True, kw_only=True)
class PuzzleOptions(Json):
    """``adaponder puzzle``."""

    checkpoint: Annotated[
        str, Option(argument=True, metavar="CKPT", help="Trained on hops; default: the one that comes with adaponder.")
    ] = full_name(HOPS)
    seed: Annotated[
        int | None, Option(metavar="N", min=0, max=2**31 - 1, help="Of the puzzles; default: others each time.")
    ] = None
    puzzles: Annotated[int, Option(metavar="N", min=1, max=10_000, help="How many; the first is shown.")] = 64


@dataclass(frozen=True, kw_only=True)
class DoctorOptions(Json):
    """``adaponder doctor``: of the installation, or of ``checkpoint``."""

    checkpoint: Annotated[
        str | None,
        Option(argument=True, metavar="CKPT", help="Examine this checkpoint instead of the installation."),
    ] = None
    seal: Annotated[
        bool,
        Option(
            flags=("--seal",),
            help="Take the checkpoint's files as they are: the tokenizer decides on end and padding, "
            "checksums are written anew.",
        ),
    ] = False
