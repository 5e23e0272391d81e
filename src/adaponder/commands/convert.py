"""adaponder convert: turns a checkpoint into a model of the family, and checks what must be equal."""

from __future__ import annotations

import os
from dataclasses import fields
from pathlib import Path

from adaponder.commands.options import ConvertOptions
from adaponder.commands.options.model import NewSettings
from adaponder.conversion.convert import Conversion, convert
from adaponder.errors import InputError
from adaponder.files import read_bytes
from adaponder.terminal import console, line, table, write_json


def run(options: ConvertOptions) -> Conversion:
    """Converts ``options.source`` into ``options.out`` and prints what was checked."""
    text = options.text
    if text is not None and os.path.isfile(text):
        text = read_bytes(Path(text), InputError).decode(errors="replace")
    with console.status(f"converting {options.source} …"):
        done = convert(
            options.source,
            options.out,
            method=options.method,
            text=text,
            revision=options.revision,
            seed=options.seed,
            dtype=options.dtype,
            **{field.name: getattr(options, field.name) for field in fields(NewSettings)},
        )
    show(done)
    write_json(options.json, done.as_dict())
    return done


def show(done: Conversion) -> None:
    """Prints what was converted, the checks of equality, and the losses on the text if there is one."""
    source, out = (done.source, "bold"), (done.out, "bold")
    console.print(line(source, f" ({done.kind}) → ", out, f" ({done.method}, K = {done.iterations})"))
    added = f", of which the method adds {done.added:,}" if done.added else ""
    console.print(f"{done.parameters:,} parameters{added}")
    for remark in done.remarks:
        console.print(f"so that config, generation config and tokenizer agree, {remark}", soft_wrap=True)
    if done.gates_open is not None:
        console.print(f"gates start open: s = {done.gates_open:.6f}")
    rows = [
        (check.what, f"{check.difference:.1e}", "—" if check.bound is None else f"{check.bound:.1e}")
        for check in done.checks
    ]
    if rows:
        console.print(table("Equality on random tokens", ("check", "relative difference", "allowed"), rows))
    else:
        console.print("no equality to check: these options change the function the source was trained to be")
    if done.losses:
        rows = [(depth, f"{loss:.4f}") for depth, loss in enumerate(done.losses, 1)]
        console.print(table("Loss on the given text", ("read", "loss"), rows))
