"""Renders chat records with a chat template and encodes the text, with the token spans that count in the loss."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tokenizers import Tokenizer

from adaponder.data.manifest import CHAT_TEMPLATE, DataError
from adaponder.data.readers import Counts, Document, InputPart, records, valid_unicode, without_compression
from adaponder.data.tokenizers import SpecialTokens, encoding, special_tokens, tokenizer_file
from adaponder.errors import InputError
from adaponder.files import read_json, read_text

if TYPE_CHECKING:
    from adaponder.text.prompts import TemplateRenderer

ASSISTANT = "assistant"
# The tag with which a template marks the assistant's text for transformers.
_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
# Limits for one conversation: characters (they are encoded in a single call), and MiB of memory to render it.
_LONGEST, _MEBIBYTES = 2**22, 512


@dataclass(frozen=True)
class ChatFormat:
    """Turns records into conversations, rendered as text by a Jinja template.

    ``fields`` names one field of a record, which holds a list of messages, or two fields, a prompt and a completion,
    each of which is text or a list of messages. The template may write the tokenizer's special ``tokens``; a message
    that contains one of them raises.
    """

    fields: tuple[str, ...]
    template: str
    tokens: SpecialTokens

    @classmethod
    def of(cls, fields: Sequence[str], tokenizer: str, end_token: str | None, template: Path | None) -> ChatFormat:
        """Returns the format with the template in file ``template``; ``None`` means the tokenizer's own template."""
        if not 1 <= len(fields) <= 2 or not all(fields):
            raise InputError(f"--chat {','.join(fields)}: name one field of messages, or two, PROMPT,COMPLETION")
        text = own_template(tokenizer) if template is None else read_text(template, InputError)
        if text is None:
            raise InputError(f"--chat: the tokenizer {tokenizer} has no chat template; name one with --chat-template")
        return cls(tuple(fields), text, special_tokens(tokenizer, end_token))

    @cached_property
    def _special(self) -> re.Pattern[str]:
        return re.compile("|".join(map(re.escape, sorted(self.tokens.all, key=len, reverse=True))))

    def read(self, part: InputPart, counts: Counts) -> Iterator[Document]:
        """Yields a rendered conversation for each record of ``part``."""
        for fields, origin in records(part, self.fields, counts):
            source = fields.get("source")
            source = source if isinstance(source, str) else without_compression(part.path).stem or part.argument
            yield self.conversation(self._messages(fields, origin, counts), source, origin)

    def _messages(self, fields: Mapping[str, Any], origin: str, counts: Counts) -> list[dict[str, Any]]:
        """Returns the checked messages of a record, each with a role and a content."""
        messages: list[Any] = []
        for name, role in zip(self.fields, ("user", ASSISTANT), strict=False):
            value = fields[name]
            if isinstance(value, str) and len(self.fields) == 2:
                value = [{"role": role, "content": value}]
            if not isinstance(value, list) or not value:
                kinds = "text or a list of messages" if len(self.fields) == 2 else "a list of messages"
                raise DataError(f"{origin}: {name} must be {kinds}, not empty")
            messages += [self._message(entry, f"{origin}: {name}[{i}]", counts) for i, entry in enumerate(value)]
        if not any(message["role"] == ASSISTANT for message in messages):
            raise DataError(f"{origin}: no message has the role {ASSISTANT!r}, so there is nothing to learn")
        return messages

    def _message(self, message: Any, origin: str, counts: Counts) -> dict[str, Any]:
        if not isinstance(message, dict):
            raise DataError(f"{origin}: a message must be an object with a role and a content")
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise DataError(f"{origin}.{key} must be text, it is {str(message.get(key))[:40]!r}")
        if (forged := self._special.search(message["content"])) is not None:
            raise DataError(
                f"{origin}.content contains the special token {forged[0]!r}, with which a text could end its own turn: "
                "remove it or spell it differently"
            )
        content = valid_unicode(message["content"])
        counts.invalid_utf8 += content is not message["content"]
        # A table stores null for a key that a message does not have.
        return {key: value for key, value in message.items() if value is not None} | {"content": content}

    def conversation(self, messages: list[dict[str, Any]], source: str, origin: str) -> Document:
        """Renders messages with the chat template; only the assistant's turns become training targets."""
        text, marked = self._render(messages, origin)
        learned = marked if _MARKED.search(self.template) else self._turns(messages, text, origin)
        if not any(text[first:last].strip() for first, last in learned):
            raise DataError(f"{origin}: the template writes none of the assistant's words")
        spans = tuple((first, last) for first, last in learned if last > first)
        return Document(text, source, learned=spans, origin=origin)

    def _turns(self, messages: list[dict[str, Any]], text: str, origin: str) -> list[tuple[int, int]]:
        """Returns the character span of each assistant turn in ``text``; a span begins after the generation prompt."""
        turns = []
        for index, message in enumerate(messages):
            if message["role"] != ASSISTANT:
                continue
            try:
                prompt = self._render(messages[:index], origin, generation_prompt=True)[0]
            except DataError:
                if index:
                    raise
                raise _ambiguous(origin, "cannot write the text before a first message of the assistant") from None
            rendered = self._render(messages[: index + 1], origin)[0]
            if not text.startswith(rendered) or not rendered.startswith(prompt):
                raise _ambiguous(origin, f"writes message {index} differently if other messages follow")
            turns.append((len(prompt), len(rendered)))
        return turns

    def _render(
        self, messages: list[dict[str, Any]], origin: str, *, generation_prompt: bool = False
    ) -> tuple[str, list[tuple[int, int]]]:
        """Renders messages; returns the text and the spans, if any, that the template marks as generated."""
        try:
            return _renderer().render(
                messages,
                chat_template=self.template,
                add_generation_prompt=generation_prompt,
                return_assistant_tokens_mask=bool(_MARKED.search(self.template)),
                bos_token=self.tokens.begin,
                eos_token=self.tokens.end,
            )
        except InputError as problem:
            raise DataError(f"{origin}: {problem}") from None


@cache
def _renderer() -> TemplateRenderer:
    from adaponder.text.prompts import TemplateRenderer  # imports transformers

    return TemplateRenderer(mebibytes=_MEBIBYTES, characters=_LONGEST)


def _ambiguous(origin: str, reason: str) -> DataError:
    return DataError(
        f"{origin}: the template {reason}, so the assistant's words cannot be located; mark them in the template, "
        "{% generation %}…{% endgeneration %}, and name it with --chat-template"
    )


def own_template(tokenizer: str) -> str | None:
    """Returns the chat template stored with a tokenizer, or ``None`` if there is none."""
    if (file := tokenizer_file(tokenizer)) is None:
        return None
    if os.path.isfile(file.parent / CHAT_TEMPLATE):
        return read_text(file.parent / CHAT_TEMPLATE, InputError)
    settings = file.parent / "tokenizer_config.json"
    template = read_json(settings, InputError).get("chat_template") if os.path.isfile(settings) else None
    if isinstance(template, list):  # several, by name
        named = (entry for entry in template if isinstance(entry, dict) and entry.get("name") == "default")
        template = next(named, {}).get("template")
    return template if isinstance(template, str) else None


class ConversationEncoder:
    """Encodes text rendered by a chat template. Special tokens spelled in the text become special token ids.

    No token crosses the beginning of an assistant turn, so that the text before the turn gets the same ids as the
    prompt of a server. A turn is learned up to its first end token, because generation stops there. If a text does not
    end with an end token, one is appended; it is learned if the text ends with an assistant turn without an end token.
    """

    def __init__(self, tokenizer_json: str, end_id: int):
        self.tokenizer = Tokenizer.from_str(tokenizer_json)
        self.tokenizer.encode_special_tokens = False
        self.end_id = end_id

    def __call__(self, text: str, spans: Sequence[tuple[int, int]]) -> tuple[np.ndarray, list[int]]:
        """Returns (ids, [start, length, …] of the token spans that count in the loss); the last id is the end token.

        ``spans`` are the assistant's turns as character ranges (first, last + 1).
        """
        ids, starts, ends = self._encode(text, [])
        inside_tokens = sorted({first for first, _ in spans if ((starts < first) & (first < ends)).any()})
        if inside_tokens:
            ids, starts, ends = self._encode(text, inside_tokens)
        learned = np.zeros(len(ids) + 1, bool)
        ended = False
        for first, last in spans:
            turn = np.flatnonzero((starts >= first) & (starts < last))
            stops = np.flatnonzero(ids[turn] == self.end_id)
            ended = bool(len(stops))
            learned[turn[: stops[0] + 1] if ended else turn] = True
        if len(ids) and ids[-1] == self.end_id:
            learned = learned[:-1]
        else:
            ids = np.append(ids, self.end_id)
            learned[-1] = bool(spans) and spans[-1][1] == len(text) and not ended
        return ids, _runs(learned)

    def _encode(self, text: str, cuts: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Encodes ``text`` in pieces, split at ``cuts``; returns each token's id, first character and last + 1."""
        ids: list[int] = []
        offsets: list[tuple[int, int]] = []
        for start, stop in zip([0, *cuts], [*cuts, len(text)], strict=True):
            with encoding():
                encoded = self.tokenizer.encode(text[start:stop], add_special_tokens=False)
            ids += encoded.ids
            offsets += [(first + start, last + start) for first, last in encoded.offsets]
        bounds = np.array(offsets, np.int64).reshape(-1, 2)
        return np.array(ids, np.int64), bounds[:, 0], bounds[:, 1]


def _runs(flags: np.ndarray) -> list[int]:
    """Returns the start and length of each run of true entries, as one flat list [start, length, …]."""
    edges = np.flatnonzero(np.diff(flags.astype(np.int8), prepend=0, append=0))
    return np.stack([edges[::2], edges[1::2] - edges[::2]], 1).ravel().tolist()
