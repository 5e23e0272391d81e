"""adaponder export: a checkpoint as a folder that transformers opens without this package, with a measured card."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from adaponder.commands.evaluate import forced, own_label, scored, show_scorings
from adaponder.commands.options import ExportOptions
from adaponder.commands.options.shared import CheckpointOptions
from adaponder.commands.subject import Subject, open_subject
from adaponder.conversion.open import describe
from adaponder.errors import InputError
from adaponder.evaluation.scoring import ScoringOptions
from adaponder.export.card import Card, Measured, Row
from adaponder.export.folder import export, require_exportable, require_room
from adaponder.export.history import training_of
from adaponder.export.hub import push, require_name
from adaponder.terminal import console, line, table, write_json


def run(options: ExportOptions) -> dict[str, Any]:
    """Exports ``options.checkpoint`` to ``options.out``, and to the hub with ``options.push``.

    Returns what ``--json`` writes.
    """
    if options.push is not None:
        require_name(options.push)
    elif options.private:
        raise InputError("--private means nothing without --push")
    require_room(options.out)
    require_exportable(describe(options.checkpoint), options.checkpoint)
    subject = open_subject(CheckpointOptions(checkpoint=options.checkpoint, device=options.device, dtype=options.dtype))
    measured = None if options.data is None else measure(subject, options)
    card = Card(
        name=options.push or options.out.resolve().name,
        config=subject.model.config,
        dtype=str(subject.model.dtype).removeprefix("torch."),
        training=training_of(subject.folder),
        measured=measured,
        license=options.license,
    )
    with console.status(f"exporting {options.checkpoint} …"):
        checks = export(subject.model, subject.folder, options.out, card=card.text)
    rows = [
        (check.what, f"{check.difference:.1e}", "—" if check.bound is None else f"{check.bound:.1e}")
        for check in checks
    ]
    console.print(table("The exported file against the package", ("check", "difference", "allowed"), rows))
    console.print(line("written: ", (str(options.out), "bold")), soft_wrap=True)
    result: dict[str, Any] = {
        "checkpoint": options.checkpoint,
        "out": str(options.out),
        "files": sorted(path.name for path in options.out.iterdir()),
        "checks": [asdict(check) for check in checks],
        "training": None if card.training is None else asdict(card.training),
        "measured": None if measured is None else asdict(measured),
        "pushed": None,
    }
    if options.push is not None:
        result["pushed"] = _push(options.out, options.push, private=options.private)
    write_json(options.json, result)
    return result


def _push(out: Path, name: str, *, private: bool) -> str:
    with console.status(f"uploading {out} to {name} …"):
        address = push(out, name, private=private)
    console.print(line("uploaded: ", (address, "bold")), soft_wrap=True)
    return address


def measure(subject: Subject, options: ExportOptions) -> Measured:
    """The text ``options.data`` scored at the model's own depths and at every depth, printed as ``eval`` does."""
    assert options.data is not None
    windows, how = subject.windows(options), ScoringOptions(seed=options.seed)
    text = subject.text(options.data, options)
    depths = range(1, subject.model.config.iterations + 1)
    by_label = {own_label(subject, how): how} | forced(subject, depths, how)
    scorings = [scored(subject, text, windows, label, one, options.batch_size) for label, one in by_label.items()]
    show_scorings(options.checkpoint, scorings)
    rows = [
        Row(
            label=scoring.label,
            loss=scoring.summary.loss,
            perplexity=scoring.summary.perplexity,
            bits_per_byte=scoring.summary.bits_per_byte,
            depth=scoring.summary.depth,
            flops=scoring.scores.spent.as_dict()["flops_per_token"],
            ratio=scoring.scores.spent.cost.ratio,
        )
        for scoring in scorings
    ]
    path = Path(options.data)
    split = options.split if (path / "manifest.json").is_file() else None
    # Where a file lay is nobody's business.
    return Measured(
        path.resolve().name if path.exists() else options.data, split, scorings[0].summary.tokens, str(windows), rows
    )
