"""adaponder prepare: turns text into token shards; the same command again resumes after an interruption."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.filesize import decimal

from adaponder.checkpoints.shipped import SAMPLE
from adaponder.commands.shared import Json, arg, folder, listed, opt, within
from adaponder.terminal import console, progress_bars, table, write_json

if TYPE_CHECKING:
    from adaponder.data.manifest import Manifest
    from adaponder.data.prepare import Progress

_STAGES = {"checksums": "hashing the inputs", "tokenizer": "training the tokenizer"}


def prepare(
    inputs: Annotated[
        list[str],
        arg("Files, folders, .jsonl (all also .gz .xz .bz2 .zst), .parquet, hf:NAME, stdlib, hops, mano.", "INPUT…"),
    ],
    *,
    out: Annotated[Path, folder("Where to write shards; running the command again resumes.")],
    tokenizer: Annotated[
        str | None, opt("Folder or hub name, a tokenizer.json, train-bpe:N; hops and mano need none.", "NAME")
    ] = None,
    validation: Annotated[
        float, opt("Share of documents held out, by hash, from 0 up to 1.", "X", check=within("[0, 1)"))
    ] = 0.01,
    workers: Annotated[int | None, opt("Processes; default: one per core.", "N", min=1, max=1024)] = None,
    end_token: Annotated[
        str | None, opt("Token that ends each document; default: the tokenizer's, else <|endoftext|>.", "TEXT")
    ] = None,
    shard_tokens: Annotated[int, opt("Tokens per shard file, about.", "N", min=1)] = 2**25,
    chat: Annotated[
        str | None, opt("Records are conversations in this field, or in the fields PROMPT,COMPLETION.", "FIELD")
    ] = None,
    chat_template: Annotated[Path | None, opt("Jinja chat template; default: the tokenizer's own.", "FILE")] = None,
    json: Json = None,
) -> dict[str, Any]:
    """Turn text into token shards that training reads."""
    from adaponder.data.manifest import MANIFEST
    from adaponder.data.prepare import prepare as prepared
    from adaponder.data.shards import WriterState

    finished_before = os.path.isfile(out / MANIFEST)
    unfinished = None if finished_before else WriterState.load(out)
    if unfinished is not None and any(unfinished.shards.values()):
        console.print(f"{out} is unfinished: resuming after its last complete shard")
    started = time.monotonic()
    with progress_bars("tokens") as bar:
        task = bar.add_task("reading the inputs", total=None, tokens="")

        def show_progress(now: Progress) -> None:
            tokens = f"{now.documents:,} documents, {now.tokens:,} tokens" if now.tokens else ""
            stage = _STAGES.get(now.stage, "tokenising")
            # A hub dataset has no size in bytes: without a total the bar only shows activity.
            bar.update(task, description=stage, completed=now.read, total=now.total or None, tokens=tokens)

        manifest = prepared(
            inputs,
            out=out,
            tokenizer=tokenizer,
            end_token=end_token,
            validation=validation,
            workers=workers or os.cpu_count() or 1,
            shard_tokens=shard_tokens,
            chat=listed("--chat", chat, str),
            chat_template=chat_template,
            progress=show_progress,
        )
    seconds = time.monotonic() - started
    show(manifest, out)
    if finished_before:
        console.print("Nothing to do: already prepared with the same arguments.")
    else:
        console.print(f"done in {seconds:.1f} s")
    recipe = f"finetune/{'chat' if chat else 'text'}" if tokenizer == SAMPLE else "cpu/demo"
    console.print_next("train", recipe, "--set", f"data.source={out}")
    result = {"out": str(out), "finished_before": finished_before, "seconds": seconds, **manifest.as_dict()}
    write_json(json, result)
    return result


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
