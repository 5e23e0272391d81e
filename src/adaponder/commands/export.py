"""adaponder export: a checkpoint as a folder that transformers opens without this package, with a measured card."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from adaponder.commands import shared
from adaponder.commands.evaluate import forced, own_label, scored, show_scorings
from adaponder.commands.shared import opt
from adaponder.errors import InputError
from adaponder.terminal import console, line, table, write_json

if TYPE_CHECKING:
    from adaponder.evaluation.text import Text, Windows


def export(
    checkpoint: shared.Checkpoint,
    *,
    out: Annotated[Path, opt("Where to write; must be new or empty.", "DIR", check=shared.output_folder)],
    data: Annotated[str | None, opt(f"Measure loss, depth and cost on it for the card. {shared.DATA}", "TEXT")] = None,
    push: Annotated[
        str | None, opt("Also upload it to the hub as OWNER/MODEL; without, nothing is sent.", "NAME")
    ] = None,
    private: Annotated[bool, opt("Make the repository of --push private.", flag="--private")] = False,
    license: Annotated[str | None, opt("Of the model, as the hub spells it: apache-2.0, mit, …", "ID")] = None,
    json: shared.Json = None,
    split: shared.Split = "validation",
    window: shared.Window = None,
    stride: shared.Stride = None,
    across_documents: shared.AcrossDocuments = True,
    max_tokens: shared.MaxTokens = None,
    batch_size: shared.BatchSize = 8,
    seed: shared.Seed = 0,
    device: shared.Device = "cpu",
    dtype: shared.Dtype = "auto",
) -> dict[str, Any]:
    """Write a checkpoint as a folder for the hub, which opens in transformers alone, with its code and a model card.

    [dim]adaponder export runs/demo --data data/stdlib-train-bpe-2048 --out demo-hub[/]

    [dim]adaponder export runs/demo --out demo-hub --license apache-2.0 --push me/demo[/]
    """
    from adaponder.conversion.card import card_text, training_of
    from adaponder.conversion.convert import require_room
    from adaponder.conversion.export import export as write_folder
    from adaponder.conversion.export import push as upload
    from adaponder.conversion.export import require_exportable, require_name
    from adaponder.conversion.open import describe

    if push is not None:
        require_name(push)
    elif private:
        raise InputError("--private has no effect without --push")
    require_room(out)
    require_exportable(describe(checkpoint), checkpoint)
    subject = shared.open_subject(checkpoint, device=device, dtype=dtype)
    measured = None
    if data is not None:
        windows = subject.windows(window, stride, across_documents)
        text = subject.text(data, split=split, max_tokens=max_tokens)
        measured = measure(subject, text, windows, data=data, split=split, batch_size=batch_size, seed=seed)
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
    rows = [
        (check.what, f"{check.difference:.1e}", "—" if check.bound is None else f"{check.bound:.1e}")
        for check in checks
    ]
    console.print(table("The exported file against the package", ("check", "difference", "allowed"), rows))
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


def measure(
    subject: shared.Subject, text: Text, windows: Windows, *, data: str, split: str, batch_size: int, seed: int
) -> dict[str, Any]:
    """Scores the text at the model's own depths and at every fixed depth, and prints the result as ``eval`` does."""
    from adaponder.evaluation.scoring import ScoringOptions

    how = ScoringOptions(seed=seed)
    depths = range(1, subject.model.config.iterations + 1)
    by_label = {own_label(subject, how): how} | forced(subject, depths, how)
    scorings = [scored(subject, text, windows, label, setting, batch_size) for label, setting in by_label.items()]
    show_scorings(subject.name, scorings)
    rows = [
        {
            "label": scoring.label,
            "loss": scoring.summary.loss,
            "perplexity": scoring.summary.perplexity,
            "bits_per_byte": scoring.summary.bits_per_byte,
            "depth": scoring.summary.depth,
            "flops": scoring.scores.spent.as_dict()["flops_per_token"],
            "ratio": scoring.scores.spent.cost.ratio,
        }
        for scoring in scorings
    ]
    path = Path(data)
    name = path.resolve().name if path.exists() else data  # a card does not tell where a file was
    prepared = (path / "manifest.json").is_file()
    tokens = scorings[0].summary.tokens
    return {
        "data": name,
        "split": split if prepared else None,
        "tokens": tokens,
        "windows": str(windows),
        "rows": rows,
    }
