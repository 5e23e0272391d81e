"""Options of the command that writes folders for the hub."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from adaponder.commands.options import values
from adaponder.commands.options.option import Option
from adaponder.commands.options.shared import CHECKPOINT, DATA, BatchSize, OpenedModel, WindowOptions


@dataclass(frozen=True, kw_only=True)
class _Sending:
    """Where the folder goes beside ``--out``, and under which licence."""

    push: Annotated[
        str | None, Option(metavar="NAME", help="Also upload it to the hub as OWNER/MODEL; without, nothing is sent.")
    ] = None
    private: Annotated[bool, Option(flags=("--private",), help="A repository that --push makes is private.")] = False
    license: Annotated[
        str | None, Option(metavar="ID", help="Of the model, as the hub spells it: apache-2.0, mit, …")
    ] = None


@dataclass(frozen=True, kw_only=True)
class ExportOptions(_Sending, WindowOptions, BatchSize, OpenedModel):
    """``adaponder export``."""

    checkpoint: Annotated[str, CHECKPOINT]
    out: Annotated[Path, Option(metavar="DIR", help="Where to write; must be new or empty.", check=values.folder)]
    data: Annotated[
        str | None, Option(metavar="TEXT", help=f"Measure loss, depth and cost on it for the card. {DATA}")
    ] = None
