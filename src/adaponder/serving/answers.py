"""Writes completions in OpenAI's formats, whole or as chunks of a stream, and their usage and cost."""

from __future__ import annotations

import math
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from json import dumps
from json.encoder import encode_basestring_ascii
from typing import Any, ClassVar

import torch

from adaponder.evaluation.meter import Meter
from adaponder.inference.outputs import PromptToken, Token, TopTokens
from adaponder.inference.request import Request
from adaponder.methods.cost import Cost
from adaponder.serving.protocol import Generation
from adaponder.serving.served import Served
from adaponder.serving.stream import Growth, event
from adaponder.text import Writing, pieces

# OpenAI's number for the logarithm of 0.
_IMPOSSIBLE = -9999.0


class Answers(ABC):
    """Formats the answer to one request.

    Chunks of a stream are put together from a constant head and the text: making each one as a dictionary would take
    most of the event loop's time.

    Args:
        served: the model.
        extension: the ``adaponder`` part of the request.
        logprobs: whether log-probabilities are returned.
        hidden: no token is returned, because ``max_tokens`` is 0.
        usage_follows: a last chunk has the usage, so the others say that it is null.
    """

    kind: ClassVar[str]
    chunk_kind: ClassVar[str]
    prefix: ClassVar[str]

    def __init__(
        self,
        served: Served,
        extension: Generation,
        *,
        logprobs: bool,
        hidden: bool = False,
        usage_follows: bool = False,
    ):
        self.served, self.extension, self.logprobs, self.hidden = served, extension, logprobs, hidden
        self._about = {
            "id": f"{self.prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": served.name,
        }
        self._plain = not logprobs and not extension.of_tokens
        self._usage = b',"usage":null' if usage_follows else b""
        begin = dumps({"object": self.chunk_kind, **self._about})
        self._head = b"data: " + begin[:-1].encode() + b',"choices":[{"index":'

    def whole(self, choices: Sequence[Writing], usage: dict[str, Any]) -> dict[str, Any]:
        """Returns the answer that is not streamed."""
        shown = [
            {"index": index, **self._whole_choice(writing)}
            | ({"adaponder": self._extension(writing, 0, None)} if self.extension.of_tokens else {})
            | {"finish_reason": writing.finish_reason}
            for index, writing in enumerate(choices)
        ]
        return {**self._about, "object": self.kind, "choices": shown, "usage": usage}

    def chunk(self, growth: Growth) -> bytes:
        """Returns one step's addition to a choice as one event; empty if nothing can be shown yet."""
        text = "" if self.hidden else growth.text
        if self._plain and not growth.done:
            if not text:
                return b""
            return self._choice_event(growth.index, self._text(text) + b',"logprobs":null,"finish_reason":null')
        writing, span = growth.writing, (growth.first, growth.first if self.hidden else growth.last)
        if not text and span[0] == span[1] and not growth.done:
            return b""
        fields: dict[str, Any] = {
            "logprobs": self._logprobs(writing, *span) if self.logprobs else None,
            "finish_reason": writing.finish_reason if growth.done else None,
        }
        if self.extension.of_tokens:
            fields["adaponder"] = self._extension(writing, *span, ended=growth.done)
        inner = self._text(text) if text or not growth.done else self._end
        return self._choice_event(growth.index, inner + b"," + dumps(fields)[1:-1].encode())

    def usage_chunk(self, usage: dict[str, Any]) -> bytes:
        """Returns the last event of a stream that reports its usage."""
        return event({**self._about, "object": self.chunk_kind, "choices": [], "usage": usage})

    def _choice_event(self, index: int, fields: bytes) -> bytes:
        return b"".join((self._head, str(index).encode(), b",", fields, b"}]", self._usage, b"}\n\n"))

    @abstractmethod
    def opening(self, index: int, writing: Writing) -> bytes:
        """Returns the event that begins a choice's stream."""

    _end: ClassVar[bytes]

    @abstractmethod
    def _text(self, text: str) -> bytes: ...

    @abstractmethod
    def _whole_choice(self, writing: Writing) -> dict[str, Any]: ...

    @abstractmethod
    def _logprobs(self, writing: Writing, first: int, last: int) -> dict[str, Any]: ...

    def _all_logprobs(self, writing: Writing) -> dict[str, Any] | None:
        return self._logprobs(writing, 0, 0 if self.hidden else len(writing.tokens)) if self.logprobs else None

    def _extension(self, writing: Writing, first: int, last: int | None, *, ended: bool = True) -> dict[str, Any]:
        """Returns the ``adaponder`` part of a choice: its tokens, and at the end the depths of the prompt."""
        last = 0 if self.hidden else last
        tokens = []
        for token, piece in zip(writing.tokens[first:last], writing.pieces[first:last], strict=True):
            entry: dict[str, Any] = {"id": token.id, "text": piece}
            if self.extension.depth:
                entry["depth"] = token.depth
            if self.extension.gates:
                entry["gates"] = [finite(gate) for gate in token.gates]
            if self.extension.iteration_top:
                entry["iteration_top"] = [top_tokens(self.served, top) for top in token.iteration_top]
            tokens.append(entry)
        return {"tokens": tokens} | ({"prompt_depths": writing.prompt_depths} if ended and self.extension.depth else {})


class CompletionAnswers(Answers):
    """``/v1/completions``; with ``echo`` the prompt comes before the text, and ``top`` tokens with each token."""

    kind, chunk_kind, prefix = "text_completion", "text_completion", "cmpl"
    _end = b'"text":""'

    def __init__(self, *arguments: Any, echo: bool = False, top: int = 0, **options: Any):
        super().__init__(*arguments, **options)
        self._echo, self._top = echo, top

    def opening(self, index: int, writing: Writing) -> bytes:
        if not self._echo:
            return b""
        text = "".join(self._prompt_pieces(writing))
        return self._choice_event(index, self._text(text) + b',"logprobs":null,"finish_reason":null')

    def _prompt_pieces(self, writing: Writing) -> list[str]:
        return pieces(self.served.tokenizer, writing.request.prompt) if self._echo else []

    def _text(self, text: str) -> bytes:
        return b'"text":' + encode_basestring_ascii(text).encode()

    def _whole_choice(self, writing: Writing) -> dict[str, Any]:
        text = "".join(self._prompt_pieces(writing)) + ("" if self.hidden else writing.text)
        return {"text": text, "logprobs": self._all_logprobs(writing)}

    def _logprobs(self, writing: Writing, first: int, last: int) -> dict[str, Any]:
        prompt: list[PromptToken] = writing.prompt_log_probabilities or [] if self._echo else []
        tokens: list[Token | PromptToken] = [*prompt, *writing.tokens[first:last]]
        offset = sum(len(piece) for piece in writing.pieces[:first])
        offsets = []
        for text in [*(self._prompt_pieces(writing) if prompt else []), *writing.pieces[first:last]]:
            offsets.append(offset)
            offset += len(text)
        values = [token.log_probability for token in tokens]
        return {
            "tokens": [self.served.spell(token.id).text for token in tokens],
            "token_logprobs": [None if value is None else finite(value) for value in values],
            "top_logprobs": [self._top_logprobs(token) for token in tokens] if self._top else None,
            "text_offset": offsets,
        }

    def _top_logprobs(self, token: Token | PromptToken) -> dict[str, float] | None:
        """Returns the most likely tokens by their text, always with the token itself."""
        if token.log_probability is None:
            return None
        by_text: dict[str, float] = {}
        for number, value in (*token.top[: self._top], (token.id, token.log_probability)):
            text = self.served.spell(number).text
            by_text[text] = max(finite(value), by_text.get(text, -math.inf))
        return by_text


class ChatAnswers(Answers):
    """``/v1/chat/completions``."""

    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"
    _end = b'"delta":{}'

    def opening(self, index: int, writing: Writing) -> bytes:
        delta = b'"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null'
        return self._choice_event(index, delta)

    def _text(self, text: str) -> bytes:
        return b'"delta":{"content":' + encode_basestring_ascii(text).encode() + b"}"

    def _whole_choice(self, writing: Writing) -> dict[str, Any]:
        message = {"role": "assistant", "content": "" if self.hidden else writing.text, "refusal": None}
        return {"message": message, "logprobs": self._all_logprobs(writing)}

    def _logprobs(self, writing: Writing, first: int, last: int) -> dict[str, Any]:
        content = [
            self._entry(token.id, token.log_probability or 0.0)
            | {"top_logprobs": [self._entry(number, value) for number, value in token.top]}
            for token in writing.tokens[first:last]
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        spelled = self.served.spell(token)
        return {"token": spelled.text, "logprob": finite(logprob), "bytes": spelled.bytes}


def top_tokens(served: Served, top: TopTokens) -> list[dict[str, Any]]:
    """Returns the most likely tokens as the ``adaponder`` extension writes them."""
    return [{"id": token, "text": served.spell(token).text, "logprob": finite(value)} for token, value in top]


def finite(value: float) -> float:
    """Returns the number, or -9999 for one that JSON cannot hold."""
    return value if math.isfinite(value) else _IMPOSSIBLE


# --- usage --------------------------------------------------------------------------------------------------------


def text_cost(served: Served, depths: Sequence[int], *, logits: int, policy: Any, max_iterations: int | None) -> Cost:
    """Returns the cost of reading a text once with these depths, and computing ``logits`` rows of logits."""
    model = served.model
    meter = Meter(model.config, dtype=model.dtype, device=model.device, shape=served.shape)
    if depths:
        meter.add(torch.tensor([list(depths)]), logits=logits, policy=policy, max_iterations=max_iterations)
    return meter.cost


def usage_of(
    served: Served, requests: Sequence[Request], choices: Sequence[Writing], *, hidden: bool = False
) -> dict[str, Any]:
    """Returns the ``usage`` of an answer; ``choices`` are all samples of the first request, then of the next.

    A prompt is read once for all its samples, and tokens from the prefix cache cost no FLOPs. ``hidden``: max_tokens
    is 0, so the token that the engine drew is not part of the answer, though its FLOPs were spent.
    """
    prompt_tokens = sum(len(request.prompt) for request in requests)
    completion_tokens = 0 if hidden else sum(len(writing.tokens) for writing in choices)
    first = [sum(request.samples for request in requests[:index]) for index in range(len(requests))]
    samples = [choices[start : start + request.samples] for start, request in zip(first, requests, strict=True)]
    (spent, cached), (full, cached_full) = (
        _total_cost(served, requests, samples, full_depth=full_depth) for full_depth in (False, True)
    )
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(writings[0].cached_tokens for writings in samples)},
        "adaponder": {
            "mean_depth": spent.iterations,
            "flops": spent.flops - cached.flops,
            "flops_full_depth": full.flops - cached_full.flops,
            "kv_bytes": spent.kv_bytes,
            "kv_bytes_full_depth": full.kv_bytes,
            "dropped_rows": sum(writing.dropped_rows for writing in choices),
        },
    }


def _total_cost(
    served: Served, requests: Sequence[Request], samples: Sequence[Sequence[Writing]], *, full_depth: bool
) -> tuple[Cost, Cost]:
    """Returns the cost of all samples, and of the prompt tokens that came from the prefix cache."""
    total = cached = Cost.nothing()
    for request, writings in zip(requests, samples, strict=True):
        options: dict[str, Any] = {"policy": request.policy, "max_iterations": request.max_iterations}
        deepest = request.max_iterations or served.iterations
        for index, writing in enumerate(writings):
            depths = [deepest if full_depth else depth for depth in writing.depths if depth]
            prompt = len(writing.prompt_depths)
            logits = len(writing.tokens)
            if request.iteration_top:
                logits += sum(depth - 1 for depth in depths[prompt - 1 :])
            if request.prompt_log_probabilities is not None and index == 0:
                logits += prompt
            total += text_cost(served, depths, logits=logits, **options)
            if index:  # the prompt was read for the first sample
                shared = text_cost(served, depths[:prompt], logits=0, **options)
                total = Cost(*(getattr(total, name) - value for name, value in vars(shared).items()))
            else:
                cached += text_cost(served, depths[: writing.cached_tokens], logits=0, **options)
    return total, cached
