"""Answers in OpenAI's shapes: whole, or chunk by chunk from a constant head and tail around the text."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from json import dumps
from json.encoder import encode_basestring_ascii
from typing import Any, ClassVar

from adaponder.inference.outputs import PromptToken, Token, TopTokens
from adaponder.serving.protocol import Generation
from adaponder.serving.served import Served
from adaponder.serving.texts import Choice, Grown
from adaponder.text import Writing, pieces

# What OpenAI says where a logarithm has no number.
_IMPOSSIBLE = -9999.0


class Answers(ABC):
    """The answers to one request.

    Args:
        served: the model.
        number: of the answer, ``cmpl-…``.
        created: seconds since 1970.
        own: what was asked under ``adaponder``.
        logprobs: whether log-probabilities were asked for.
        hidden: no token is shown: ``max_tokens`` was 0.
        usage_follows: chunks say that the usage is not known yet.
    """

    kind: ClassVar[str]
    chunk_kind: ClassVar[str]

    def __init__(
        self,
        served: Served,
        number: str,
        created: int,
        *,
        own: Generation,
        logprobs: bool,
        hidden: bool = False,
        usage_follows: bool = False,
    ):
        self.served, self.own, self.logprobs, self.hidden = served, own, logprobs, hidden
        self._about = {"id": number, "created": created, "model": served.name}
        self._plain = not logprobs and not own.of_tokens
        self._usage = b',"usage":null' if usage_follows else b""
        begin = dumps({"id": number, "object": self.chunk_kind, "created": created, "model": served.name})
        self._head = b"data: " + begin[:-1].encode() + b',"choices":[{"index":'

    def whole(self, choices: Sequence[Choice], usage: dict[str, Any]) -> dict[str, Any]:
        """The answer that is not streamed."""
        shown = [
            {"index": number, **self._whole_choice(choice.writing)}
            | ({"adaponder": self._extension(choice.writing, 0, None)} if self.own.of_tokens else {})
            | {"finish_reason": choice.writing.finish_reason}
            for number, choice in enumerate(choices)
        ]
        return {**self._about, "object": self.kind, "choices": shown, "usage": usage}

    def chunk(self, grown: Grown) -> bytes:
        """What a step has added to a choice, as one event; empty where there is nothing to tell."""
        text = "" if self.hidden else grown.text
        if self._plain and not grown.done:
            if not text:
                return b""
            inner, end = self._text_part(text), b',"logprobs":null,"finish_reason":null}]'
        else:
            writing, span = grown.choice.writing, (grown.first, grown.first if self.hidden else grown.last)
            if not text and span[0] == span[1] and not grown.done:
                return b""
            told: dict[str, Any] = {
                "logprobs": self._logprobs(writing, *span) if self.logprobs else None,
                "finish_reason": writing.finish_reason if grown.done else None,
            }
            if self.own.of_tokens:
                told["adaponder"] = self._extension(writing, *span, ended=grown.done)
            inner = self._text_part(text) if text or not grown.done else self._end_part()
            end = b"," + dumps(told)[1:-1].encode() + b"}]"
        return b"".join((self._head, str(grown.choice.index).encode(), b",", inner, end, self._usage, b"}\n\n"))

    def usage_chunk(self, usage: dict[str, Any]) -> bytes:
        """The last event of a stream that tells its usage."""
        return event({**self._about, "object": self.chunk_kind, "choices": [], "usage": usage})

    @abstractmethod
    def opening(self, choice: Choice) -> bytes:
        """What a choice's stream begins with."""

    @abstractmethod
    def _text_part(self, text: str) -> bytes: ...

    @abstractmethod
    def _end_part(self) -> bytes: ...

    @abstractmethod
    def _whole_choice(self, writing: Writing) -> dict[str, Any]: ...

    @abstractmethod
    def _logprobs(self, writing: Writing, first: int, last: int) -> dict[str, Any]: ...

    def _extension(self, writing: Writing, first: int, last: int | None, *, ended: bool = True) -> dict[str, Any]:
        """What stands under ``adaponder``: tokens with their depths, and at the end the prompt's depths."""
        last = 0 if self.hidden else last
        tokens = [
            self._token(token, piece)
            for token, piece in zip(writing.tokens[first:last], writing.pieces[first:last], strict=True)
        ]
        return {"tokens": tokens} | ({"prompt_depths": writing.prompt_depths} if ended and self.own.depth else {})

    def _token(self, token: Token, piece: str) -> dict[str, Any]:
        told: dict[str, Any] = {"id": token.id, "text": piece}
        if self.own.depth:
            told["depth"] = token.depth
        if self.own.gates:
            told["gates"] = [finite(gate) for gate in token.gates]
        if self.own.iteration_top:
            told["iteration_top"] = [top_tokens(self.served, top) for top in token.iteration_top]
        return told


class CompletionAnswers(Answers):
    """``/v1/completions``; ``echo`` holds the prompt of each choice, where they are to be repeated."""

    kind, chunk_kind = "text_completion", "text_completion"

    def __init__(self, *arguments: Any, echo: Sequence[list[int]] = (), top: int = 0, **options: Any):
        super().__init__(*arguments, **options)
        self._top = top
        self._echo = [pieces(self.served.tokenizer, prompt) for prompt in echo]

    def opening(self, choice: Choice) -> bytes:
        if not self._echo:
            return b""
        text = encode_basestring_ascii("".join(self._echo[choice.index])).encode()
        head = b"".join((self._head, str(choice.index).encode(), b',"text":', text))
        return head + b',"logprobs":null,"finish_reason":null}]' + self._usage + b"}\n\n"

    def _text_part(self, text: str) -> bytes:
        return b'"text":' + encode_basestring_ascii(text).encode()

    def _end_part(self) -> bytes:
        return b'"text":""'

    def whole(self, choices: Sequence[Choice], usage: dict[str, Any]) -> dict[str, Any]:
        self._places = {id(choice.writing): choice.index for choice in choices}
        return super().whole(choices, usage)

    def _whole_choice(self, writing: Writing) -> dict[str, Any]:
        before = "".join(self._echo[self._places[id(writing)]]) if self._echo else ""
        logprobs = self._logprobs(writing, 0, 0 if self.hidden else len(writing.tokens)) if self.logprobs else None
        return {"text": before if self.hidden else before + writing.text, "logprobs": logprobs}

    def _logprobs(self, writing: Writing, first: int, last: int) -> dict[str, Any]:
        prompt: list[PromptToken] = writing.prompt_log_probabilities or [] if self._echo else []
        spelled = self._echo[self._places[id(writing)]] if prompt else []
        tokens: list[Token | PromptToken] = [*prompt, *writing.tokens[first:last]]
        texts = [*spelled, *writing.pieces[first:last]]
        offset = sum(len(piece) for piece in writing.pieces[:first])
        offsets = []
        for text in texts:
            offsets.append(offset)
            offset += len(text)
        return {
            "tokens": [self.served.spelling(token.id).text for token in tokens],
            "token_logprobs": [
                None if token.log_probability is None else finite(token.log_probability) for token in tokens
            ],
            "top_logprobs": [self._top_of(token) for token in tokens] if self._top else None,
            "text_offset": offsets,
        }

    def _top_of(self, token: Token | PromptToken) -> dict[str, float] | None:
        """The likeliest tokens by their text, the token itself always among them."""
        if token.log_probability is None:
            return None
        own = ((token.id, token.log_probability),)
        told: dict[str, float] = {}
        for number, value in (*token.top[: self._top], *own):
            text = self.served.spelling(number).text
            told[text] = max(finite(value), told.get(text, -math.inf))
        return told


class ChatAnswers(Answers):
    """``/v1/chat/completions``."""

    kind, chunk_kind = "chat.completion", "chat.completion.chunk"

    def opening(self, choice: Choice) -> bytes:
        delta = b',"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]'
        return b"".join((self._head, str(choice.index).encode(), delta, self._usage, b"}\n\n"))

    def _text_part(self, text: str) -> bytes:
        return b'"delta":{"content":' + encode_basestring_ascii(text).encode() + b"}"

    def _end_part(self) -> bytes:
        return b'"delta":{}'

    def _whole_choice(self, writing: Writing) -> dict[str, Any]:
        last = 0 if self.hidden else len(writing.tokens)
        text = "" if self.hidden else writing.text
        return {
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": self._logprobs(writing, 0, last) if self.logprobs else None,
        }

    def _logprobs(self, writing: Writing, first: int, last: int) -> dict[str, Any]:
        content = [
            self._entry(token.id, token.log_probability or 0.0)
            | {"top_logprobs": [self._entry(number, value) for number, value in token.top]}
            for token in writing.tokens[first:last]
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        spelled = self.served.spelling(token)
        return {"token": spelled.text, "logprob": finite(logprob), "bytes": spelled.bytes}


def top_tokens(served: Served, top: TopTokens) -> list[dict[str, Any]]:
    """Likeliest tokens as the extension writes them."""
    return [{"id": token, "text": served.spelling(token).text, "logprob": finite(value)} for token, value in top]


def finite(value: float) -> float:
    """The number, or one that JSON can hold."""
    return value if math.isfinite(value) else _IMPOSSIBLE


def event(content: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + dumps(content).encode() + b"\n\n"
