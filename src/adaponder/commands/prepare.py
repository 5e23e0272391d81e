"""adaponder prepare: turns text into token shards; the same command again goes on after an interruption."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from rich.filesize import decimal
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from adaponder.commands.options import PrepareOptions
from adaponder.data.journal import Journal
from adaponder.data.manifest import JOURNAL, MANIFEST, Manifest
from adaponder.data.prepare import Progress, prepare
from adaponder.terminal import console, table, write_json

_STAGES = {
    "inputs": "reading the inputs",
    "tokenizer": "training the tokenizer",
    "tokens": "tokenising",
    "done": "tokenising",
}


def run(options: PrepareOptions) -> dict[str, Any]:
    """Prepares ``options.inputs`` in ``options.out``, if that is not done yet; returns what ``--json`` writes."""
    finished_before = os.path.isfile(options.out / MANIFEST)
    if not finished_before and _has_shards(options.out):
        console.print(f"{options.out} was begun before: going on after the last complete shard")
    begun = time.monotonic()
    with _bar() as bar:
        line = bar.add_task("reading", total=None, tokens="")

        def show_progress(now: Progress) -> None:
            tokens = f"{now.documents:,} documents, {now.tokens:,} tokens" if now.tokens else ""
            # A hub dataset has no size in bytes: without a total the bar only shows that it lives.
            bar.update(line, description=_STAGES[now.stage], completed=now.read, total=now.total or None, tokens=tokens)

        manifest = prepare(
            options.inputs,
            out=options.out,
            tokenizer=options.tokenizer,
            end_token=options.end_token,
            validation=options.validation,
            workers=options.workers or os.cpu_count() or 1,
            shard_tokens=options.shard_tokens,
            chat=options.chat,
            chat_template=options.chat_template,
            progress=show_progress,
        )
    seconds = time.monotonic() - begun
    show(manifest, options.out)
    if finished_before:
        console.print("Nothing to do: it was prepared before, with the same arguments.")
    else:
        console.print(f"done in {seconds:.1f} s")
    result = {"out": str(options.out), "finished_before": finished_before, "seconds": seconds, **manifest.as_dict()}
    write_json(options.json, result)
    return result


def _has_shards(out: Path) -> bool:
    """Whether an earlier run, interrupted since, has left a complete shard."""
    return os.path.isfile(out / JOURNAL) and any(Journal.load(out).shards.values())


def _bar() -> Bar:
    return Bar(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TextColumn("{task.fields[tokens]}"),
        TimeElapsedColumn(),
        TextColumn("ETA"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )


def show(manifest: Manifest, out: Path) -> None:
    """Prints documents, tokens and bytes of each split, and the manifest's remarks."""
    rows = []
    for split, shards in manifest.splits.items():
        tokens, size = manifest.total(split, "tokens"), manifest.total(split, "utf8_bytes")
        per_token = f"{size / tokens:.2f}" if tokens else "—"
        rows.append(
            (split, f"{manifest.total(split, 'documents'):,}", f"{tokens:,}", decimal(size), per_token, len(shards))
        )
    columns = ("split", "documents", "tokens", "text", "bytes/token", "shards")
    console.print(table(f"{out}: vocabulary {manifest.vocab_size:,}, {manifest.dtype}", columns, rows))
    for remark in manifest.remarks():
        console.print(remark)
