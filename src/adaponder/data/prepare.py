"""Turns inputs into token shards; after an interruption, the same command continues and gives the same bytes.

A rerun skips the documents of complete shards and encodes only the others (see :mod:`adaponder.data.shards`).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from adaponder.data import sources
from adaponder.data.chat import ChatFormat, own_template
from adaponder.data.encode import Encoder, Numbered, encode_in_order, hash_and_size
from adaponder.data.manifest import CHAT_TEMPLATE, MANIFEST, TOKENIZER, DataError, Manifest, dtype_of
from adaponder.data.puzzles import SYMBOLS, is_generated, learns_answers, settings_of
from adaponder.data.readers import Counts, InputPart
from adaponder.data.shards import ShardWriter, finished
from adaponder.data.tokenizers import (
    TRAIN,
    check_tokenizer,
    load_tokenizer,
    special_tokens,
    tokenizer_file,
    tokenizer_hash,
    vocabulary_size,
)
from adaponder.errors import InputError, listed
from adaponder.files import lock, sha256_of, write_whole
from adaponder.journal import on_interrupt

_CHUNK_DOCUMENTS, _CHUNK_CHARACTERS = 1024, 2**20
_MOST_WORKERS = 1024


class Progress(NamedTuple):
    """The progress of a preparation: its current ``stage`` has read ``read`` of ``total`` input bytes.

    The stages are ``checksums`` (reported from worker threads), ``tokenizer``, ``tokens`` and ``done``.
    """

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
    """Tokenizes ``inputs`` into ``out``. Equal arguments give equal bytes, also after interruptions.

    Each document's tokens are followed by the end token. A document goes to validation if its hash, as a fraction of
    2**64, is below ``validation``: the same text always goes to the same split. A finished ``out`` is left unchanged.

    ``chat`` names the field of each record that holds the messages of a conversation, or two fields: a prompt and its
    completion. The tokenizer's chat template, or ``chat_template``, renders the messages, and only the assistant's
    turns count in the loss. The template is stored beside the tokenizer.
    """
    tokenizer = tokenizer or _tokenizer_of(inputs)
    _check(inputs, out, validation=validation, workers=workers, shard_tokens=shard_tokens)
    if chat_template is not None and not chat:
        raise InputError(f"--chat-template {chat_template}: also name the field of the conversations, with --chat")
    counts = Counts()
    parts = sources.find(inputs, counts)
    if all(part.path.is_file() and not part.size for part in parts):
        raise InputError(f"{'input' if len(inputs) == 1 else 'inputs'} {listed(inputs)}: no files, or only empty ones")
    answers = [part.argument for part in parts if learns_answers(part.argument)]
    if answers and len(answers) < len(parts):
        raise InputError(
            f"input {answers[0]}: only its answers are learned; prepare other inputs separately, or set answers=0"
        )
    # Validation reads these documents one per window, so all must have the same length.
    lengths = {argument: settings_of(argument).length for argument in answers}
    if len(set(lengths.values())) > 1:
        differing = ", ".join(f"{argument} ({length})" for argument, length in lengths.items())
        raise InputError(f"inputs {differing}: documents must have equal lengths in tokens; prepare them separately")
    if not os.path.isfile(out / MANIFEST):  # a finished folder no longer needs its tokenizer
        check_tokenizer(tokenizer, end_token)
    chat_format = ChatFormat.of(chat, tokenizer, end_token, chat_template) if chat else None
    with _locked(out):
        fingerprint: dict[str, Any] = {
            # Checksums of whole files: a rerun must not mix shards of an input before and after it was changed.
            "inputs": sources.describe(parts, lambda *read: progress(Progress("checksums", 0, 0, *read))),
            "tokenizer": tokenizer,
            "tokenizer_file": _file_hash(tokenizer),
            "end_token": end_token,
            "validation": validation,
            "shard_tokens": shard_tokens,
        }
        if chat_format is not None:
            fingerprint["chat"] = {
                "fields": list(chat_format.fields),
                "template": hashlib.sha256(chat_format.template.encode()).hexdigest(),
                "begin": chat_format.tokens.begin,
            }
            parts = [part._replace(reader=chat_format.read) for part in parts]
        if answers:
            fingerprint["answers"] = True
        if (manifest := finished(out, fingerprint)) is not None:
            return manifest
        writer = ShardWriter(out, fingerprint)
        with on_interrupt(f"{out}: interrupted; run the same command again to continue"):
            return _prepare(parts, counts, writer, workers=workers, progress=progress, chat_format=chat_format)


@contextlib.contextmanager
def _locked(out: Path) -> Iterator[None]:
    """Context manager that creates and locks a folder; raises if another preparation holds the lock."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(out, os.O_RDONLY)
    except OSError as error:
        raise InputError(f"--out {out}: {error.strerror}") from None
    try:
        # Windows and some network file systems cannot lock a folder; there a second preparation goes unnoticed.
        with contextlib.suppress(OSError):
            if not lock(descriptor):
                raise InputError(f"--out {out}: another preparation is writing there")
        yield
    finally:
        os.close(descriptor)


def _prepare(
    parts: Sequence[InputPart],
    counts: Counts,
    writer: ShardWriter,
    *,
    workers: int,
    progress: Callable[[Progress], None],
    chat_format: ChatFormat | None,
) -> Manifest:
    """Writes the missing shards, then the manifest."""
    fingerprint, total = writer.state.fingerprint, sum(part.size for part in parts)
    tokenizer, end_id = _tokenizer(writer, parts, lambda read: progress(Progress("tokenizer", 0, 0, read, total)))
    vocab_size = vocabulary_size(tokenizer)
    encoder = Encoder(
        tokenizer_json=tokenizer.to_str(),
        end_id=end_id,
        vocab_size=vocab_size,
        dtype=dtype_of(vocab_size),
        validation=fingerprint["validation"],
        done=(writer.state.documents["train"], writer.state.documents["validation"]),
    )
    chunks = _chunks(parts, counts, skip=min(encoder.done))
    with contextlib.closing(encode_in_order(encoder, chunks, workers=workers)) as encoded:
        for chunk in encoded:
            writer.add(chunk)
            progress(Progress("tokens", counts.documents, writer.tokens, counts.read, total))
    if not counts.documents:
        raise DataError("all input documents are empty")
    manifest = writer.finish(
        counts.documents,
        dtype=encoder.dtype,
        vocab_size=encoder.vocab_size,
        end_id=end_id,
        skipped=counts.skipped(),
        **_template(fingerprint["tokenizer"], chat_format, writer.out),
    )
    progress(Progress("done", counts.documents, writer.tokens, total, total))
    return manifest


def _template(tokenizer: str, chat_format: ChatFormat | None, out: Path) -> dict[str, Any]:
    """Writes the chat template, if there is one, to ``out``; returns the manifest's fields about the template."""
    template = own_template(tokenizer) if chat_format is None else chat_format.template
    if template is None:
        return {}
    tokens = special_tokens(tokenizer) if chat_format is None else chat_format.tokens
    write_whole(out / CHAT_TEMPLATE, template.encode(), DataError)
    begin = {} if tokens.begin == tokens.end else {"begin_token": tokens.begin}
    return {"template_sha256": hashlib.sha256(template.encode()).hexdigest()} | begin


def _check(inputs: Sequence[str], out: Path, *, validation: float, workers: int, shard_tokens: int) -> None:
    if not inputs:
        raise InputError("no inputs: name at least one file, folder or stdlib")
    for argument in inputs:
        if os.path.isdir(argument) and out.resolve().is_relative_to(Path(argument).resolve()):
            raise InputError(
                f"--out {out} is inside the input {argument}, so its shards would become input: name another folder"
            )
    if not 0 <= validation < 1:
        raise InputError(f"--validation {validation} must be at least 0 and below 1")
    if not 1 <= workers <= _MOST_WORKERS:
        raise InputError(f"--workers {workers} must be between 1 and {_MOST_WORKERS}")
    if shard_tokens < 1:
        raise InputError(f"--shard-tokens {shard_tokens} must be at least 1")


def _chunks(parts: Sequence[InputPart], counts: Counts, *, skip: int) -> Iterator[list[Numbered]]:
    """Yields the input documents with their numbers, in chunks; leaves out the first ``skip``, already written."""
    chunk: list[Numbered] = []
    size = 0
    for document in sources.read(parts, counts):
        if counts.documents <= skip:
            continue
        chunk.append((counts.documents - 1, document))
        size += len(document.content)
        if len(chunk) >= _CHUNK_DOCUMENTS or size >= _CHUNK_CHARACTERS:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _tokenizer(
    writer: ShardWriter, parts: Sequence[InputPart], progress: Callable[[int], None]
) -> tuple[Tokenizer, int]:
    """Returns (tokenizer, id of its end token) as saved by an interrupted run, else loads or trains and saves them."""
    path, state = writer.out / TOKENIZER, writer.state
    if state.end_token is not None:
        tokenizer, end_id = load_tokenizer(str(path), end_token=state.end_token)
        if tokenizer_hash(tokenizer) != state.tokenizer_hash:
            raise DataError(f"{path} has changed since the preparation began: delete {writer.out} and prepare again")
        return tokenizer, end_id
    texts = _training_texts(parts, state.fingerprint["validation"], progress)
    tokenizer, end_id = load_tokenizer(state.fingerprint["tokenizer"], texts, end_token=state.fingerprint["end_token"])
    writer.set_tokenizer(tokenizer, end_id)
    return tokenizer, end_id


def _training_texts(parts: Iterable[InputPart], validation: float, progress: Callable[[int], None]) -> Iterator[str]:
    """Yields the texts of the training split: the vocabulary is not trained on validation documents."""
    counts = Counts()
    for document in sources.read(parts, counts):
        if document.tokens is not None:
            raise InputError(f"{document.origin} holds tokens: name the tokenizer that made them, not {TRAIN}N")
        progress(counts.read)
        if hash_and_size(document.text)[0] / 2**64 >= validation:
            yield document.text


def _tokenizer_of(inputs: Sequence[str]) -> str:
    """Returns ``symbols`` if all inputs are puzzles; raises for other inputs, which need a named tokenizer."""
    for argument in inputs:
        if not is_generated(argument):
            raise InputError(f"--tokenizer is missing: {argument} has no tokenizer of its own; name one, or {TRAIN}N")
    return SYMBOLS


def _file_hash(spec: str) -> str | None:
    """Returns the SHA-256 of a tokenizer that is a local file, or ``None`` if it comes from the hub or is trained."""
    file = tokenizer_file(spec) if os.path.exists(spec) else None
    return None if file is None else sha256_of(file, InputError)
