"""Turns inputs into token shards. It may be stopped at any instant: the same command goes on and gives the same bytes.

Shards are complete or absent, ``progress.json`` says which are done, of which inputs, and from which document on each
split is still open, and ``manifest.json`` comes last. A rerun reads past what is done; it encodes only what no complete
shard holds.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from adaponder.checkpoints.manifest import sealed
from adaponder.data import sources
from adaponder.data.chat import ChatFormat, own_template
from adaponder.data.encoding import Encoded, Encoder, Item, content_hash, encode_in_order
from adaponder.data.formats import Conversation
from adaponder.data.generated import is_generated, learns_answers
from adaponder.data.journal import Journal, claimed, finished, owned
from adaponder.data.manifest import (
    CHAT_TEMPLATE,
    JOURNAL,
    MANIFEST,
    SPLITS,
    TOKENIZER,
    DataError,
    Manifest,
    dtype_of,
    is_masked,
)
from adaponder.data.sources import Counts, Document, InputPart
from adaponder.data.symbols import SYMBOLS
from adaponder.data.tokenizers import (
    TRAIN,
    check_tokenizer,
    load_tokenizer,
    special_tokens,
    tokenizer_file,
    tokenizer_hash,
    vocabulary_size,
)
from adaponder.data.writer import ShardWriter
from adaponder.errors import InputError
from adaponder.files import sha256_of, write_whole
from adaponder.terminal import errors

_CHUNK_DOCUMENTS, _CHUNK_CHARACTERS = 1024, 2**20
_MOST_WORKERS = 1024


class Progress(NamedTuple):
    """Where it stands: ``stage`` is inputs, tokenizer, tokens or done; ``read`` of ``total`` bytes, in this stage."""

    stage: str
    documents: int
    tokens: int
    read: int
    total: int


def prepare(
    inputs: Sequence[str],
    *,
    out: Path,
    tokenizer: str | None = None,
    end_token: str | None = None,
    validation: float = 0.01,
    workers: int = 1,
    shard_tokens: int = 2**25,
    chat: Sequence[str] = (),
    chat_template: Path | None = None,
    progress: Callable[[Progress], None] = lambda _: None,
) -> Manifest:
    """Tokenises ``inputs`` into ``out``; equal arguments give equal bytes, however often it was interrupted.

    Each document's tokens are followed by the end token. A document goes to validation iff its hash, as a fraction of
    2**64, lies below ``validation``: the same text always lands on the same side. A finished ``out`` is left as it is.
    Puzzles need no ``tokenizer`` named: theirs is ``symbols``. Of most the answers alone are learned, so that no other
    text can be prepared beside them.

    ``chat`` names the field of each record that holds the messages of a conversation, or two: a prompt and its
    completion. They are written by the tokenizer's chat template, or by ``chat_template``, and what the assistant says
    is learned. The template stays with the tokenizer.
    """
    tokenizer = tokenizer or _tokenizer_of(inputs)
    _check(inputs, out, validation=validation, workers=workers, shard_tokens=shard_tokens)
    if chat_template is not None and not chat:
        raise InputError(f"--chat-template {chat_template}: name the field of the conversations too, with --chat")
    counts = Counts()
    parts = sources.find(inputs, counts)
    puzzles = [part.argument for part in parts if learns_answers(part.argument)]
    if puzzles and len(puzzles) < len(parts):
        raise InputError(f"input {puzzles[0]}: its answers alone are learned (answers=0: all); prepare others apart")
    if not os.path.isfile(out / MANIFEST):  # what is finished needs its tokenizer no more
        check_tokenizer(tokenizer, end_token)
    form = ChatFormat.of(chat, tokenizer, end_token, chat_template) if chat else None
    with owned(out):
        fingerprint: dict[str, Any] = {
            # Of every byte: an input that was rewritten since must not be mixed with what was made of it before.
            "inputs": sources.describe(parts, _counting(parts, progress)),
            "tokenizer": tokenizer,
            "tokenizer_file": _file_hash(tokenizer),
            "end_token": end_token,
            "validation": validation,
            "shard_tokens": shard_tokens,
        }
        if form is not None:
            template = hashlib.sha256(form.template.encode()).hexdigest()
            fingerprint["chat"] = {"fields": list(form.fields), "template": template, "begin": form.tokens.begin}
            parts = [form.reader(part) for part in parts]
        if puzzles:
            fingerprint["answers"] = True
        before = finished(out, fingerprint)
        if before is not None:
            return before
        journal = claimed(out, fingerprint)
        try:
            return _prepare(parts, counts, journal, out, workers=workers, progress=progress, form=form)
        except KeyboardInterrupt:
            errors.print(f"{out}: interrupted; the same command goes on from here", soft_wrap=True)
            raise


def _counting(parts: Sequence[InputPart], progress: Callable[[Progress], None]) -> Callable[[int], None]:
    """Turns bytes hashed, by any thread, into progress of the stage ``inputs``."""
    lock, read, total = threading.Lock(), 0, sum(part.size for part in parts)

    def advance(size: int) -> None:
        nonlocal read
        with lock:
            read += size
            progress(Progress("inputs", 0, 0, min(read, total), total))

    return advance


def _prepare(
    parts: Sequence[InputPart],
    counts: Counts,
    journal: Journal,
    out: Path,
    *,
    workers: int,
    progress: Callable[[Progress], None],
    form: ChatFormat | None,
) -> Manifest:
    """Does what ``journal`` says is left to do, up to the manifest."""
    total = sum(part.size for part in parts)
    tokenizer, end_id = _tokenizer(journal, out, parts, lambda read: progress(Progress("tokenizer", 0, 0, read, total)))
    encoder = Encoder(
        tokenizer_json=tokenizer.to_str(),
        end_id=end_id,
        vocab_size=vocabulary_size(tokenizer),
        dtype=dtype_of(vocabulary_size(tokenizer)),
        validation=journal.fingerprint["validation"],
        done=(journal.documents["train"], journal.documents["validation"]),
    )
    items = _Items(parts, counts, skip=min(encoder.done))
    writing = _Writing(out, journal, dtype=encoder.dtype)
    with contextlib.closing(encode_in_order(encoder, items.chunks(), workers=workers)) as encoded:
        for chunk in encoded:
            writing.add(chunk)
            progress(Progress("tokens", items.count, writing.tokens, counts.read, total))
    if not items.count:
        raise DataError("the inputs hold not one document that is not empty")
    writing.finish(items.count)
    manifest = Manifest(
        dtype=encoder.dtype,
        vocab_size=encoder.vocab_size,
        end_id=end_id,
        tokenizer_hash=tokenizer_hash(tokenizer),
        tokenizer_sha256=sha256_of(out / TOKENIZER, DataError),
        splits={split: tuple(shards) for split, shards in journal.shards.items()},
        fingerprint=journal.fingerprint,
        skipped=counts.skipped(),
        **_template(journal.fingerprint["tokenizer"], form, out),
    )
    write_whole(out / MANIFEST, sealed(manifest.as_dict()).encode(), DataError)
    (out / JOURNAL).unlink()
    progress(Progress("done", items.count, writing.tokens, total, total))
    return manifest


def _template(tokenizer: str, form: ChatFormat | None, out: Path) -> dict[str, Any]:
    """Writes the tokenizer's chat template, if it has one, beside it; returns what the manifest says of it."""
    template = own_template(tokenizer) if form is None else form.template
    if template is None:
        return {}
    tokens = special_tokens(tokenizer) if form is None else form.tokens
    write_whole(out / CHAT_TEMPLATE, template.encode(), DataError)
    begin = {} if tokens.begin == tokens.end else {"begin_token": tokens.begin}
    return {"template_sha256": hashlib.sha256(template.encode()).hexdigest()} | begin


def _check(inputs: Sequence[str], out: Path, *, validation: float, workers: int, shard_tokens: int) -> None:
    if not inputs:
        raise InputError("inputs: name at least one file, folder or stdlib")
    for argument in inputs:
        if os.path.isdir(argument) and out.resolve().is_relative_to(Path(argument).resolve()):
            raise InputError(
                f"--out {out} lies inside the input {argument}: its shards would become input; name another"
            )
    if not 0 <= validation < 1:
        raise InputError(f"--validation {validation}: a share from 0 up to, but not, 1")
    if not 1 <= workers <= _MOST_WORKERS:
        raise InputError(f"--workers {workers}: from 1 to {_MOST_WORKERS} processes can share the work")
    if shard_tokens < 1:
        raise InputError(f"--shard-tokens {shard_tokens}: a shard must hold at least one token")


class _Items:
    """The documents of the inputs, numbered, in chunks; ``count`` is how many were read, ``skip`` are done."""

    def __init__(self, parts: Sequence[InputPart], counts: Counts, *, skip: int):
        self.parts, self.counts, self.skip, self.count = parts, counts, skip, 0

    def chunks(self) -> Iterator[list[Item]]:
        chunk: list[Item] = []
        size = 0
        for document in sources.read(self.parts, self.counts):
            index, self.count = self.count, self.count + 1
            if index < self.skip:
                continue
            origin = "" if isinstance(document, Document) else document.origin
            learned = document.learned if isinstance(document, Conversation) else None
            chunk.append(Item(index, document[0], document.source, origin, learned))
            size += len(document[0])
            if len(chunk) >= _CHUNK_DOCUMENTS or size >= _CHUNK_CHARACTERS:
                yield chunk
                chunk, size = [], 0
        if chunk:
            yield chunk


class _Writing:
    """Writes both splits, and the journal after each shard."""

    def __init__(self, out: Path, journal: Journal, *, dtype: str):
        self.out, self.journal = out, journal
        self.tokens = sum(shard.tokens for shards in journal.shards.values() for shard in shards)
        shard_tokens = journal.fingerprint["shard_tokens"]
        self.writers = {
            split: ShardWriter(
                out / split,
                dtype=dtype,
                shard_tokens=shard_tokens,
                number=len(shards),
                masked=is_masked(journal.fingerprint),
            )
            for split, shards in journal.shards.items()
        }

    def add(self, chunk: Encoded) -> None:
        start = 0
        for document, length in enumerate(chunk.lengths):
            split = SPLITS[chunk.validation[document]]
            writer = self.writers[split]
            writer.add(
                chunk.tokens[start : start + length],
                source=chunk.sources[document],
                utf8_bytes=chunk.utf8_bytes[document],
                content_hash=chunk.hashes[document],
                learned=chunk.learned[document],
            )
            start += length
            self.tokens += length
            if writer.full:
                self._write(split, chunk.indices[document] + 1)

    def finish(self, documents: int) -> None:
        for split, writer in self.writers.items():
            if writer.tokens:
                self._write(split, documents)

    def _write(self, split: str, documents: int) -> None:
        self.journal.shards[split].append(self.writers[split].write())
        self.journal.documents[split] = documents
        self.journal.save(self.out)


def _tokenizer(
    journal: Journal, out: Path, parts: Sequence[InputPart], progress: Callable[[int], None]
) -> tuple[Tokenizer, int]:
    """(tokenizer, id of its end token) of the journal's arguments; an interrupted run's own, if it got so far."""
    if journal.end_token is not None:
        tokenizer, end_id = load_tokenizer(str(out / TOKENIZER), end_token=journal.end_token)
        if tokenizer_hash(tokenizer) != journal.tokenizer_hash:
            raise DataError(f"{out / TOKENIZER} is not the one begun with: delete {out} and prepare again")
        return tokenizer, end_id
    texts = _training_texts(parts, journal.fingerprint["validation"], progress)
    tokenizer, end_id = load_tokenizer(
        journal.fingerprint["tokenizer"], texts, end_token=journal.fingerprint["end_token"]
    )
    write_whole(out / TOKENIZER, tokenizer.to_str(pretty=True).encode(), DataError)
    journal.tokenizer_hash, journal.end_token = tokenizer_hash(tokenizer), tokenizer.id_to_token(end_id)
    journal.save(out)
    return tokenizer, end_id


def _training_texts(parts: Iterable[InputPart], validation: float, progress: Callable[[int], None]) -> Iterator[str]:
    """Texts of the training split only: the vocabulary is not trained on validation documents."""
    counts = Counts()
    for document in sources.read(parts, counts):
        if not isinstance(document, Document | Conversation):
            raise InputError(f"{document.origin}: tokens already; name the tokenizer that made them, not {TRAIN}N")
        progress(counts.read)
        if content_hash(document.text) / 2**64 >= validation:
            yield document.text


def _tokenizer_of(inputs: Sequence[str]) -> str:
    """The tokenizer of inputs that are all puzzles; any other has none of its own."""
    for argument in inputs:
        if not is_generated(argument):
            raise InputError(f"--tokenizer is missing: {argument} has none of its own; name one, or {TRAIN}N")
    return SYMBOLS


def _file_hash(spec: str) -> str | None:
    """SHA-256 of a tokenizer that is a local file; ``None`` where the hub or training gives it."""
    file = tokenizer_file(spec) if os.path.exists(spec) else None
    return None if file is None else sha256_of(file, InputError)
