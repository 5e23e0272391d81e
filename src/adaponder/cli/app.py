"""The application that commands register with, and the options that several of them share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from adaponder.cli.values import App, between, file, one_of
from adaponder.terminal import quiet_libraries
from adaponder.version import __version__

app = App(
    name="adaponder",
    help="Language models that read hard tokens more often.\n\n"
    "A stock Hugging Face decoder is read up to K times per token; a gate decides, token by token, when it is enough. "
    "Start with [bold]adaponder demo[/], or convert a checkpoint you have.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    add_completion=False,
)


POLICIES = (
    "gate:0.01  gate:0.1,0.2,0.3  fixed:2  entropy:2.5  kl:0.01  change:0.1  random:0.5  exit:0.9  router  "
    "ranked-uniform:0.8  ranked-geometric:0.8"
)
Checkpoint = Annotated[
    str,
    typer.Argument(
        metavar="CKPT",
        help="A model folder, a run folder, a step folder or a hub name. Its checksums are compared first, a second "
        "or two for each gigabyte; ADAPONDER_VERIFY=0 leaves that out.",
    ),
]
Json = Annotated[
    Path | None,
    typer.Option("--json", metavar="PATH", help="Write the result here as JSON too.", callback=file),
]
Seed = Annotated[int, typer.Option(metavar="N", min=0, help="Everything random follows this.")]
Device = Annotated[str, typer.Option(metavar="NAME", help="cpu, cuda, cuda:1, …")]
DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")
Dtype = Annotated[
    str,
    typer.Option(
        metavar="NAME", help="float32, bfloat16, float16, float64, or auto: as saved.", callback=one_of(*DTYPES)
    ),
]
Tau = Annotated[
    float | None,
    typer.Option(metavar="X", help="Another threshold for the learned gate, 0 to 1.", callback=between(0, 1)),
]
PolicyText = Annotated[str | None, typer.Option("--policy", metavar="RULE", help=POLICIES)]
Profile = Annotated[str | None, typer.Option(metavar="NAME", help="A budget that adaponder calibrate stored.")]
MaxIterations = Annotated[int | None, typer.Option(metavar="N", min=1, help="Read no token more often than this.")]
Tokenizer = Annotated[
    str | None, typer.Option(metavar="NAME", help="Folder or hub name; default: the checkpoint's own.")
]


def show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"adaponder {__version__}")
        raise typer.Exit


@app.callback()
def before_any_command(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=show_version, help="Say which version this is.")
    ] = False,
) -> None:
    quiet_libraries()
