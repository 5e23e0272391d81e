"""adaponder convert: turns a checkpoint into a model of the family, or back, and checks it against its source."""

from __future__ import annotations

import os
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from adaponder.commands.shared import Dtype, Json, Seed, arg, folder, one_of, opt, show_checks
from adaponder.errors import InputError
from adaponder.fields import Recurrence, option
from adaponder.registry import DEFAULT_METHOD, method_names
from adaponder.terminal import console, line, table, write_json

if TYPE_CHECKING:
    from adaponder.conversion.convert import Conversion

_SETTINGS = "Settings of the recurrence (default: as the source was trained, else the config's)"
_SCALE = "Factor on embeddings"
_TEXT = "A text or text file on which to show the loss at each depth."
_setting = partial(option, kind=Recurrence, rich_help_panel=_SETTINGS)


def _check_method(name: str) -> str | None:
    return one_of(*method_names(), "backbone")(name)  # methods may have been registered since the import


def convert(
    source: Annotated[str, arg("A stock, PonderLM, Ouro or AdaPonder checkpoint: folder or hub name.", "SRC")],
    *,
    out: Annotated[Path, folder("Where to save; must be new or empty.")],
    method: Annotated[
        str | None,
        opt(
            f"{', '.join(method_names())}; or backbone, to remove the method. Default: a looped model's own, else "
            f"{DEFAULT_METHOD}.",
            "NAME",
            check=_check_method,
        ),
    ] = None,
    text: Annotated[str | None, opt(_TEXT, "TEXT|FILE")] = None,
    revision: Annotated[str | None, opt("Branch, tag or commit of a hub source.", "NAME")] = None,
    json: Json = None,
    iterations: Annotated[int | None, _setting("iterations")] = None,
    tau: Annotated[float | None, _setting("tau")] = None,
    gate_width: Annotated[int | None, _setting("gate_width")] = None,
    gate_bias: Annotated[float | None, _setting("gate_bias")] = None,
    embedding_scale: Annotated[float | None, _setting("embedding_scale", help=_SCALE, metavar="X")] = None,
    seed: Seed = 0,
    dtype: Dtype = "auto",
) -> Any:
    """Convert a checkpoint to a method of the family, or back to a plain backbone, and check it against its source.

    [dim]adaponder convert EleutherAI/pythia-70m --method adaponder --out pythia-70m-ada[/]
    """
    from adaponder.conversion.convert import convert as converted
    from adaponder.files import read_bytes

    if text is not None and os.path.isfile(text):
        text = read_bytes(Path(text), InputError).decode(errors="replace")
    with console.status(f"converting {source} …"):
        conversion = converted(
            source,
            out,
            method=method,
            text=text,
            revision=revision,
            seed=seed,
            dtype=dtype,
            iterations=iterations,
            tau=tau,
            gate_width=gate_width,
            gate_bias=gate_bias,
            embedding_scale=embedding_scale,
        )
    show(conversion)
    write_json(json, asdict(conversion))
    return conversion


def show(conversion: Conversion) -> None:
    """Prints what was converted, the checks of equality, and the losses on the text, if given."""
    source, out = (conversion.source, "bold"), (conversion.out, "bold")
    console.print(line(source, f" ({conversion.kind}) → ", out, f" ({conversion.method}, K = {conversion.iterations})"))
    added = f", {conversion.added:,} of them added by the method" if conversion.added else ""
    console.print(f"{conversion.parameters:,} parameters{added}")
    for remark in conversion.remarks:
        console.print(f"so that config, generation config and tokenizer agree, {remark}", soft_wrap=True)
    if conversion.gates_open is not None:
        console.print(f"gates start open: s = {conversion.gates_open:.6f}")
    if conversion.checks:
        show_checks("Equality on random tokens", conversion.checks)
    else:
        console.print("no equality to check: these options change the function that the source was trained to compute")
    if conversion.losses:
        rows = [(depth, f"{loss:.4f}") for depth, loss in enumerate(conversion.losses, 1)]
        console.print(table("Loss on the given text", ("read", "loss"), rows))
