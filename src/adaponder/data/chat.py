"""Conversations as text, by the tokenizer's own template, with the parts that the assistant wrote marked as learned."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from adaponder.data.compression import without_compression
from adaponder.data.formats import Conversation, Counts, InputPart, sound
from adaponder.data.manifest import CHAT_TEMPLATE, DataError
from adaponder.data.records import records
from adaponder.data.tokenizers import SpecialTokens, special_tokens, tokenizer_file
from adaponder.errors import InputError, in_one_line
from adaponder.files import read_bytes, read_json

ASSISTANT = "assistant"
# A template says itself which parts the assistant wrote, in transformers' own words for it.
_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
# The most characters of one conversation: it is encoded at once.
_LONGEST = 2**22


@dataclass(frozen=True)
class ChatFormat:
    """How records become conversations.

    Attributes:
        fields: one field with a list of messages; or two, a prompt and its completion, each text or a list of messages.
        template: the Jinja template that writes messages as text.
        tokens: the tokenizer's special tokens, which the template may write.
    """

    fields: tuple[str, ...]
    template: str
    tokens: SpecialTokens

    @classmethod
    def of(cls, fields: Sequence[str], tokenizer: str, end_token: str | None, template: Path | None) -> ChatFormat:
        """The format with the template in that file, or else the tokenizer's own; one there must be."""
        if not 1 <= len(fields) <= 2 or not all(fields):
            raise InputError(f"--chat {','.join(fields)}: one field of messages, or two, PROMPT,COMPLETION")
        tokens = special_tokens(tokenizer, end_token)
        if template is not None:
            text = _text_of(template)
        elif (own := own_template(tokenizer)) is not None:
            text = own
        else:
            raise InputError(f"--chat: the tokenizer {tokenizer} has no chat template; name one with --chat-template")
        return cls(tuple(fields), text, tokens)

    @cached_property
    def _special(self) -> re.Pattern[str]:
        return re.compile("|".join(map(re.escape, sorted(self.tokens.all, key=len, reverse=True))))

    def reader(self, part: InputPart) -> InputPart:
        """``part``, read as conversations."""
        return part._replace(reader=partial(self._read, original=part))

    def _read(self, part: InputPart, counts: Counts, *, original: InputPart) -> Iterator[Conversation]:
        for fields, place in records(original, self.fields, counts):
            source = fields.get("source")
            source = source if isinstance(source, str) else without_compression(part.path).stem or part.argument
            yield self.conversation(self._messages(fields, place, counts), source, place)

    # --- records to messages ------------------------------------------------------------------------------------

    def _messages(self, fields: Mapping[str, Any], place: str, counts: Counts) -> list[dict[str, Any]]:
        """The messages of a record, each with a role and a text; raises where they are not that."""
        messages: list[Any] = []
        for name, role in zip(self.fields, ("user", ASSISTANT), strict=False):
            value = fields[name]
            if isinstance(value, str) and len(self.fields) == 2:
                value = [{"role": role, "content": value}]
            if not isinstance(value, list) or not value:
                wanted = "text or a list of messages" if len(self.fields) == 2 else "a list of messages"
                raise DataError(f"{place}: {name} must be {wanted}, at least one")
            messages += [self._message(one, f"{place}: {name}[{at}]", counts) for at, one in enumerate(value)]
        if not any(message["role"] == ASSISTANT for message in messages):
            raise DataError(f"{place}: no message has the role {ASSISTANT!r}, so there is nothing to learn from it")
        return messages

    def _message(self, message: Any, place: str, counts: Counts) -> dict[str, Any]:
        if not isinstance(message, dict):
            raise DataError(f"{place}: a message must be an object with a role and a content")
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise DataError(f"{place}.{key}: text is needed, it is {str(message.get(key))[:40]!r}")
        if (forged := self._special.search(message["content"])) is not None:
            raise DataError(
                f"{place}.content spells the special token {forged[0]!r}, with which a text could end its own turn: "
                "take it out or spell it otherwise"
            )
        content = sound(message["content"])
        counts.invalid_utf8 += content is not message["content"]
        # Columns of a table that a message does not have come as null.
        return {key: value for key, value in message.items() if value is not None} | {"content": content}

    # --- messages to text ---------------------------------------------------------------------------------------

    def conversation(self, messages: list[dict[str, Any]], source: str, place: str) -> Conversation:
        """The messages written by the template, and what of that the assistant wrote."""
        text, marked = self._written(messages, place)
        learned = marked if _MARKED.search(self.template) else self._turns(messages, text, place)
        if len(text) > _LONGEST:
            raise DataError(f"{place}: {len(text):,} characters, a conversation has at most {_LONGEST:,}")
        if not any(text[first:last].strip() for first, last in learned):
            raise DataError(f"{place}: the template writes nothing of what the assistant says")
        return Conversation(text, source, tuple((first, last) for first, last in learned if last > first), place)

    def _turns(self, messages: list[dict[str, Any]], text: str, place: str) -> list[tuple[int, int]]:
        """Each turn of the assistant: what the template adds for it to the prompt that asks for it."""
        turns = []
        for at, message in enumerate(messages):
            if message["role"] != ASSISTANT:
                continue
            prompt = self._prompt(messages[:at], place)
            whole = self._written(messages[: at + 1], place)[0]
            if not text.startswith(whole) or not whole.startswith(prompt):
                raise _not_told_apart(place, f"writes message {at} otherwise when others follow")
            turns.append((len(prompt), len(whole)))
        return turns

    def _prompt(self, messages: list[dict[str, Any]], place: str) -> str:
        """What the template writes before a turn of the assistant, be it the first message of all."""
        try:
            return self._written(messages, place, asks=True)[0]
        except DataError:
            if messages:
                raise
            raise _not_told_apart(place, "cannot write what comes before a first message of the assistant") from None

    def _written(
        self, messages: list[dict[str, Any]], place: str, *, asks: bool = False
    ) -> tuple[str, list[tuple[int, int]]]:
        """(text, the spans that the template marks) of messages; ``asks``: up to where the assistant goes on."""
        from transformers.utils.chat_template_utils import render_jinja_template

        marks = bool(_MARKED.search(self.template))
        try:
            rendered: Any = render_jinja_template(
                [messages],
                chat_template=self.template,
                add_generation_prompt=asks,
                return_assistant_tokens_mask=marks,
                bos_token=self.tokens.begin,
                eos_token=self.tokens.end,
            )
        except Exception as problem:  # a template is a program, in transformers' sandbox: it may raise anything
            raise DataError(f"{place}: the chat template refuses it: {in_one_line(problem)}") from None
        texts, spans = rendered
        return texts[0], [(first, last) for first, last in spans[0]] if marks else []


def _not_told_apart(place: str, why: str) -> DataError:
    return DataError(
        f"{place}: the template {why}, so what the assistant wrote cannot be told apart; mark it in the template, "
        "{% generation %}…{% endgeneration %}, and give that with --chat-template"
    )


def own_template(tokenizer: str) -> str | None:
    """The chat template of a tokenizer's folder, beside its ``tokenizer.json``; ``None`` where it has none."""
    if (file := tokenizer_file(tokenizer)) is None:
        return None
    if os.path.isfile(file.parent / CHAT_TEMPLATE):
        return _text_of(file.parent / CHAT_TEMPLATE)
    settings = file.parent / "tokenizer_config.json"
    stated = read_json(settings, InputError).get("chat_template") if os.path.isfile(settings) else None
    if isinstance(stated, list):  # several, by name
        stated = next((one.get("template") for one in stated if one.get("name") == "default"), None)
    return stated if isinstance(stated, str) else None


def _text_of(path: Path) -> str:
    try:
        return read_bytes(path, InputError).decode()
    except UnicodeDecodeError:
        raise InputError(f"--chat-template {path}: not UTF-8 text") from None
