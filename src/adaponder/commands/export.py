"""adaponder export: writes a checkpoint and its model card to a folder that transformers opens without this package."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from adaponder.commands import shared
from adaponder.commands.evaluate import forced, own_label, scored, show_scorings
from adaponder.commands.shared import opt
from adaponder.errors import InputError
from adaponder.terminal import console, line, write_json


@shared.command
def export(
    checkpoint: shared.Checkpoint,
    *,
    out: Annotated[Path, shared.folder("Where to write; must be new or empty.")],
    data: Annotated[str | None, opt(f"Text on which to measure the card's numbers. {shared.DATA}", "TEXT")] = None,
    push: Annotated[
        str | None, opt("Also upload it to the hub as OWNER/MODEL; by default nothing is sent.", "NAME")
    ] = None,
    private: Annotated[bool, opt("Make the repository of --push private.", flag="--private")] = False,
    license: Annotated[str | None, opt("License of the model, as the hub spells it: apache-2.0, mit, …", "ID")] = None,
    json: shared.Json = None,
    reading: shared.Reading,
    place: shared.Place,
) -> dict[str, Any]:
    """Write a checkpoint as a folder for the hub, with code and a model card; transformers opens it without adaponder.

    [dim]adaponder export runs/demo --data data/stdlib-train-bpe-2048 --out demo-hub[/]
    [dim]adaponder export runs/demo --out demo-hub --license apache-2.0 --push me/demo[/]
    """
    from adaponder.conversion.card import card_text, training_of
    from adaponder.conversion.convert import require_empty
    from adaponder.conversion.export import export as write_folder
    from adaponder.conversion.export import push as upload
    from adaponder.conversion.export import require_exportable, require_name
    from adaponder.conversion.open import describe

    if push is not None:
        require_name(push)
    elif private:
        raise InputError("--private has no effect without --push")
    require_empty(out)
    require_exportable(describe(checkpoint), checkpoint)
    subject = shared.open_subject(checkpoint, place)
    measured = None if data is None else measure(subject, data, reading)
    training = training_of(subject.folder)
    card = partial(
        card_text,
        push or out.resolve().name,
        subject.model.config,
        dtype=str(subject.model.dtype).removeprefix("torch."),
        training=training,
        measured=measured,
        license=license,
    )
    with console.status(f"exporting {checkpoint} …"):
        checks = write_folder(subject.model, subject.folder, out, card=card)
    shared.show_checks("The exported code against the package", checks)
    console.print(line("written: ", (str(out), "bold")), soft_wrap=True)
    result: dict[str, Any] = {
        "checkpoint": checkpoint,
        "out": str(out),
        "files": sorted(path.name for path in out.iterdir()),
        "checks": [asdict(check) for check in checks],
        "training": training,
        "measured": measured,
        "pushed": None,
    }
    if push is not None:
        with console.status(f"uploading {out} to {push} …"):
            result["pushed"] = upload(out, push, private=private)
        console.print(line("uploaded: ", (result["pushed"], "bold")), soft_wrap=True)
    write_json(json, result)
    return result


def measure(subject: shared.Subject, data: str, reading: shared.Reading) -> dict[str, Any]:
    """Scores the text at the model's own and at each fixed depth; prints eval's tables, returns the card's numbers."""
    from adaponder.data.manifest import MANIFEST
    from adaponder.evaluation.scoring import ScoringOptions

    windows, text = reading.windows(subject), reading.text(subject, data)
    how = ScoringOptions(seed=reading.seed)
    depths = range(1, subject.model.config.iterations + 1)
    by_label = {own_label(subject, how): how} | forced(subject, depths, how)
    score = partial(scored, subject, text, windows, batch_size=reading.batch_size)
    scorings = [score(label, options) for label, options in by_label.items()]
    show_scorings(subject.name, scorings)
    rows = []
    for scoring in scorings:
        values = scoring.as_dict()
        row = {key: values[key] for key in ("label", "loss", "perplexity", "bits_per_byte", "depth")}
        rows.append(row | {"flops": values["cost"]["flops_per_token"], "ratio": values["cost"]["flops_ratio"]})
    path = Path(data)
    return {
        "data": path.resolve().name if path.exists() else data,  # local paths are left out of the card
        "split": reading.split if (path / MANIFEST).is_file() else None,
        "tokens": scorings[0].summary.tokens,
        "windows": str(windows),
        "rows": rows,
    }
