"""Loads, trains and hashes tokenizers; text that spells a special token is encoded as plain text."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from adaponder.checkpoints.shipped import shipped
from adaponder.data.puzzles import SYMBOLS, symbol_tokenizer
from adaponder.errors import InputError, in_one_line, panics_as_errors
from adaponder.files import read_bytes, read_json

END = "<|endoftext|>"
TRAIN = "train-bpe:"
# More text does not improve the vocabulary, and counting its words takes memory.
TRAINING_BYTES = 2**28
# Maximum entries to train: the library allocates the requested number.
MOST_ENTRIES = 2**22
# Maximum characters to encode at a time: longer documents are split, which bounds memory and time.
PIECE = 2**20


def load_tokenizer(
    spec: str, documents: Iterable[str] | None = None, *, end_token: str | None = None
) -> tuple[Tokenizer, int]:
    """Returns (tokenizer, id of the end token) of ``spec``; text that spells a special token is encoded as plain text.

    ``spec`` is a path to a ``tokenizer.json``, a folder or hub repository that holds one, a run folder, ``sample``,
    ``symbols`` (the words of generated puzzles), or ``train-bpe:N``: a byte-level BPE of at most ``N`` entries, trained
    on ``documents``. ``end_token`` defaults to ``eos_token`` of ``tokenizer_config.json``, else to ``<|endoftext|>``.
    """
    _check_settings(spec, end_token)
    if (path := tokenizer_file(spec)) is not None:
        tokenizer = read_tokenizer(path)
        end_token = end_token or _token_named("eos_token", path.parent / "tokenizer_config.json") or END
    elif spec == SYMBOLS:
        if end_token not in (None, END):
            raise InputError(f"--end-token {end_token}: the tokenizer {SYMBOLS} has only {END}; drop --end-token")
        tokenizer = symbol_tokenizer(END)
    else:
        tokenizer = train_bpe(int(spec.removeprefix(TRAIN)), documents, end_token=end_token or END)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    end_id = tokenizer.token_to_id(end_token or END)
    if end_id is None:
        raise InputError(f"tokenizer {spec} has no token {end_token!r}: name its end token with --end-token")
    return tokenizer, end_id


def check_tokenizer(spec: str, end_token: str | None) -> None:
    """Raises the errors of :func:`load_tokenizer`; of ``train-bpe:N`` checks only the settings, and trains nothing."""
    if spec.startswith(TRAIN):
        _check_settings(spec, end_token)
    else:
        load_tokenizer(spec, end_token=end_token)


def _check_settings(spec: str, end_token: str | None) -> None:
    if end_token is not None and any("\ud800" <= character <= "\udfff" for character in end_token):
        raise InputError(f"--end-token {end_token!a} must be valid UTF-8")
    number = spec.removeprefix(TRAIN)
    if spec.startswith(TRAIN) and not (number.isdecimal() and len(number) < 10 and 257 <= int(number) <= MOST_ENTRIES):
        raise InputError(
            f"--tokenizer {spec[:60]} must be from {TRAIN}257 (256 bytes and the end token) to {TRAIN}{MOST_ENTRIES}"
        )


class SpecialTokens(NamedTuple):
    """The special tokens of a tokenizer: ``begin`` (BOS), ``end`` (EOS), and the set of all special tokens."""

    begin: str
    end: str
    all: frozenset[str]


def special_tokens(spec: str, end_token: str | None = None) -> SpecialTokens:
    """Returns the special tokens of a tokenizer; without a ``bos_token``, ``begin`` is the end token."""
    if (path := tokenizer_file(spec)) is None:
        end = end_token or END
        return SpecialTokens(end, end, frozenset([end]))
    settings = path.parent / "tokenizer_config.json"
    end = end_token or _token_named("eos_token", settings) or END
    added = read_tokenizer(path).get_added_tokens_decoder().values()
    special = frozenset([end, *(token.content for token in added if token.special)])
    return SpecialTokens(_token_named("bos_token", settings) or end, end, special)


def tokenizer_hash(tokenizer: Tokenizer) -> str:
    """Returns :func:`hash_of_content` of the tokenizer's ``tokenizer.json``."""
    return hash_of_content(json.loads(tokenizer.to_str()))


def hash_of_content(content: dict[str, Any]) -> str:
    """Returns the SHA-256 of a ``tokenizer.json``, independent of JSON layout, padding and truncation.

    A post-processing template without special tokens is ignored too: transformers writes such a template into files
    that have no post-processor.
    """
    behaviour = {key: value for key, value in content.items() if key not in ("padding", "truncation")}
    template = behaviour.get("post_processor") or {}
    if template.get("type") == "TemplateProcessing" and not template.get("special_tokens"):
        behaviour["post_processor"] = None
    return hashlib.sha256(json.dumps(behaviour, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def vocabulary_size(tokenizer: Tokenizer) -> int:
    """Returns the highest id plus one: the number of rows that an embedding table needs."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1


def train_bpe(entries: int, documents: Iterable[str] | None, *, end_token: str = END) -> Tokenizer:
    """Trains a byte-level BPE of at most ``entries`` entries: the end token (id 0), the 256 bytes, then merges."""
    if documents is None:
        raise InputError(f"{TRAIN}{entries} needs documents to train on")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=entries,
        special_tokens=[end_token],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = _first_bytes(documents, TRAINING_BYTES)
    _interruptibly(lambda proceed: tokenizer.train_from_iterator(takewhile(proceed, texts), trainer))
    return tokenizer


def _interruptibly(work: Callable[[Callable[[Any], bool]], Any]) -> None:
    """Runs ``work`` in a thread, so that Ctrl-C is handled: training a tokenizer takes minutes and ignores signals.

    ``work`` is called with a function that returns false once the result is no longer needed.
    """
    cancelled, result = threading.Event(), Future[None]()

    def run() -> None:
        try:
            result.set_result(work(lambda _: not cancelled.is_set()))
        except BaseException as problem:  # raised again in the waiting thread
            result.set_exception(problem)

    try:
        threading.Thread(target=run, daemon=True).start()
        while not result.done():
            wait([result], timeout=0.1)  # polls: a signal may arrive in another thread, but only this one handles it
    finally:
        cancelled.set()
    result.result()


def _first_bytes(documents: Iterable[str], limit: int) -> Iterator[str]:
    """Yields pieces of the documents; stops after the document with which they reach ``limit`` bytes of UTF-8."""
    for text in documents:
        # Training would treat a line of any length as one word.
        for piece in pieces(text, limit=2**16):
            yield piece
            limit -= len(piece.encode())
        if limit <= 0:
            return


def tokenizer_file(spec: str) -> Path | None:
    """Returns the path of the ``tokenizer.json`` that ``spec`` names; ``None`` for ``symbols`` and ``train-bpe:N``."""
    if spec == SYMBOLS or spec.startswith(TRAIN):
        return None
    path = shipped(spec) or Path(spec)
    if os.path.isfile(path):
        return path
    if not os.path.isdir(path):
        if spec.startswith((".", "/", "~")) or spec.count("/") > 1 or spec.endswith(".json"):
            raise InputError(f"--tokenizer {spec}: no such file or folder")
        path = _download(spec)
    # A run folder means its final model, else its newest step, as in every command.
    steps = sorted(path.glob("checkpoints/step-*"), reverse=True)
    files = [folder / "tokenizer.json" for folder in (path, path / "final", *steps)]
    if (file := next(filter(os.path.isfile, files), None)) is None:
        raise InputError(f"--tokenizer {spec}: it has no tokenizer.json")
    return file


def _download(name: str) -> Path:
    """Downloads the tokenizer of a hub repository (JSON files and the chat template, no code); returns its folder."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    files = ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]
    try:
        return Path(snapshot_download(name, allow_patterns=files))
    except (HfHubHTTPError, LocalEntryNotFoundError, HFValidationError, OSError) as error:
        raise InputError(
            f"--tokenizer {name}: neither a local file or folder nor available on the hub ({error})"
        ) from error


def read_tokenizer(path: Path) -> Tokenizer:
    """Reads a ``tokenizer.json``, in any version of its format."""
    try:
        return Tokenizer.from_buffer(read_bytes(path, InputError))
    except InputError:
        raise
    except Exception as error:  # the library raises bare Exception for anything it cannot read
        raise InputError(f"{path}: not a tokenizer.json ({error})") from None


def _token_named(role: str, path: Path) -> str | None:
    """Returns the token that ``tokenizer_config.json`` names for a ``role`` such as ``eos_token``, or ``None``."""
    if not os.path.exists(path):
        return None
    token = read_json(path, InputError).get(role)
    token = token.get("content") if isinstance(token, dict) else token
    if token is not None and not isinstance(token, str):
        raise InputError(f"{path}: {role} must be a token's text")
    return token


@contextlib.contextmanager
def encoding() -> Iterator[None]:
    """Context manager that converts an error of the tokenizer to a one-line ``InputError``."""
    try:
        # The library may panic in a regular expression. Other threads write nothing but progress bars.
        with panics_as_errors("it panics", alone=True):
            yield
    except Exception as error:  # the library raises bare Exception, e.g. for a word without an id
        raise InputError(
            f"the tokenizer cannot encode the text: {in_one_line(error)}; fix its vocabulary, or name another with "
            "--tokenizer"
        ) from None


def pieces(text: str, limit: int = PIECE) -> Iterator[str]:
    """Yields ``text`` in pieces of at most ``limit`` characters, cut after a line or before a space if possible."""
    start = 0
    while len(text) - start > limit:
        stop = start + limit
        line, space = text.rfind("\n", start + 1, stop) + 1, text.rfind(" ", start + 1, stop)
        cut = line if line > start + limit // 2 else space
        cut = cut if cut > start + limit // 2 else stop
        yield text[start:cut]
        start = cut
    yield text[start:]
