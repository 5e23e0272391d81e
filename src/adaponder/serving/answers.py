"""Writes completions in OpenAI's formats, whole or as events of a stream, and their usage and cost."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Sequence
from json import dumps
from json.encoder import encode_basestring_ascii
from typing import Any

import torch

from adaponder.evaluation.meter import Meter
from adaponder.evaluation.token_scores import Reading
from adaponder.inference.outputs import PromptToken, Token, TopTokens
from adaponder.inference.request import Request
from adaponder.methods.cost import Cost
from adaponder.serving.protocol import ChatBody, CompletionBody
from adaponder.serving.served import Served
from adaponder.text import Writing, pieces

# OpenAI's number for the logarithm of 0.
_IMPOSSIBLE = -9999.0


class AnswerWriter:
    """Writes the answer to one request in the format of completions or of chats.

    Events of a stream are put together from a constant head and the text: building each one as a dictionary would take
    most of the event loop's time.

    Args:
        served: the model.
        body: the request; its type decides the format.
        hidden: no token is returned, because ``max_tokens`` is 0.
    """

    def __init__(self, served: Served, body: CompletionBody | ChatBody, *, hidden: bool):
        self.served, self.extension, self.hidden = served, body.extension, hidden
        self._chat, self._top = isinstance(body, ChatBody), body.top
        self._echo = isinstance(body, CompletionBody) and bool(body.echo)
        self._kind, prefix = ("chat.completion", "chatcmpl") if self._chat else ("text_completion", "cmpl")
        self._about = {
            "id": f"{prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": served.name,
        }
        chunk = self._about | {"object": "chat.completion.chunk" if self._chat else self._kind}
        self._head = b"data: " + dumps(chunk)[:-1].encode() + b',"choices":['
        self._tail = b'}],"usage":null}\n\n' if body.includes_usage else b"}]}\n\n"
        self._before, self._after = (b'"delta":{"content":', b"}") if self._chat else (b'"text":', b"")
        self._sent: dict[int, int] = {}  # by index of the choice: tokens that were returned

    def whole(self, choices: Sequence[Writing], usage: dict[str, Any]) -> dict[str, Any]:
        """Returns the answer that is not streamed."""
        answers = []
        for index, writing in enumerate(choices):
            last = 0 if self.hidden else len(writing.tokens)
            text = "" if self.hidden else writing.text
            content: dict[str, Any] = {"text": "".join(self._prompt_pieces(writing)) + text}
            if self._chat:
                content = {"message": {"role": "assistant", "content": text, "refusal": None}}
            answers.append({"index": index, **content, **self._details(writing, 0, last)})
        return {**self._about, "object": self._kind, "choices": answers, "usage": usage}

    def events(self, index: int, writing: Writing, text: str) -> bytes:
        """Returns the events of one step, in which a choice got this text; empty if nothing can be shown yet."""
        opening = b"" if index in self._sent else self._opening(index, writing)
        done, first = writing.finish_reason is not None, self._sent.get(index, 0)
        last = len(writing.tokens) if done else min(writing.stream.settled, len(writing.tokens))
        self._sent[index] = last
        if self.hidden:
            text, last = "", first
        plain = self._top is None and not self.extension.lists_tokens
        if not text and (plain or first == last) and not done:
            return opening
        if plain and not done:
            return opening + self._text_event(index, text)
        content: dict[str, Any] = {"delta": {"content": text} if text or not done else {}}
        if not self._chat:
            content = {"text": text}
        fields = dumps(content | self._details(writing, first, last))[1:-1].encode()
        return opening + self._event(index, fields)

    def usage_event(self, usage: dict[str, Any]) -> bytes:
        """Returns the last event of a stream that reports its usage."""
        return b"".join((self._head, b'],"usage":', dumps(usage).encode(), b"}\n\n"))

    def _opening(self, index: int, writing: Writing) -> bytes:
        """Returns the event before a choice's text: the role in a chat, the prompt of a completion with ``echo``."""
        if self._chat:
            delta = b'"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null'
            return self._event(index, delta)
        return self._text_event(index, "".join(self._prompt_pieces(writing))) if self._echo else b""

    def _text_event(self, index: int, text: str) -> bytes:
        content = self._before + encode_basestring_ascii(text).encode() + self._after
        return self._event(index, content + b',"logprobs":null,"finish_reason":null')

    def _event(self, index: int, fields: bytes) -> bytes:
        return b"".join((self._head, b'{"index":', str(index).encode(), b",", fields, self._tail))

    def _prompt_pieces(self, writing: Writing) -> list[str]:
        return pieces(self.served.tokenizer, writing.request.prompt) if self._echo else []

    def _details(self, writing: Writing, first: int, last: int) -> dict[str, Any]:
        """Returns the fields of a choice beside its text, for the tokens from ``first`` to ``last``."""
        logprobs = None
        if self._top is not None:
            logprobs = (self._chat_logprobs if self._chat else self._completion_logprobs)(writing, first, last)
        details: dict[str, Any] = {"logprobs": logprobs, "finish_reason": writing.finish_reason}
        if self.extension.lists_tokens:
            spelled = zip(writing.tokens[first:last], writing.pieces[first:last], strict=True)
            ended = writing.finish_reason is not None and self.extension.depth
            details["adaponder"] = {"tokens": [self._token(token, text) for token, text in spelled]} | (
                {"prompt_depths": writing.prompt_depths} if ended else {}
            )
        return details

    def _token(self, token: Token, text: str) -> dict[str, Any]:
        """Returns a token as the ``adaponder`` extension lists it."""
        fields: dict[str, Any] = {"id": token.id, "text": text}
        if self.extension.depth:
            fields["depth"] = token.depth
        if self.extension.gates:
            fields["gates"] = [finite(gate) for gate in token.gates]
        if self.extension.iteration_top:
            fields["iteration_top"] = [top_tokens(self.served, top) for top in token.iteration_top]
        return fields

    def _completion_logprobs(self, writing: Writing, first: int, last: int) -> dict[str, Any]:
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

    def _chat_logprobs(self, writing: Writing, first: int, last: int) -> dict[str, Any]:
        def entry(token: int, logprob: float) -> dict[str, Any]:
            spelled = self.served.spell(token)
            return {"token": spelled.text, "logprob": finite(logprob), "bytes": spelled.bytes}

        content = [
            entry(token.id, token.log_probability or 0.0) | {"top_logprobs": [entry(*top) for top in token.top]}
            for token in writing.tokens[first:last]
        ]
        return {"content": content, "refusal": None}


def top_tokens(served: Served, top: TopTokens) -> list[dict[str, Any]]:
    """Returns the most likely tokens as the ``adaponder`` extension lists them."""
    return [{"id": token, "text": served.spell(token).text, "logprob": finite(value)} for token, value in top]


def finite(value: float) -> float:
    """Returns the number, or -9999 for one that JSON cannot hold."""
    return value if math.isfinite(value) else _IMPOSSIBLE


# --- usage --------------------------------------------------------------------------------------------------------


def text_cost(served: Served, depths: Sequence[int], how: Request | Reading, *, logits: int) -> Cost:
    """Returns the cost of reading a text once with these depths, and computing ``logits`` rows of logits."""
    model = served.model
    meter = Meter(model.config, dtype=model.dtype, device=model.device, shape=served.shape)
    if depths:
        meter.add(torch.tensor([list(depths)]), logits=logits, policy=how.policy, max_iterations=how.max_iterations)
    return meter.cost


def usage_of(served: Served, samples: Sequence[Sequence[Writing]], *, hidden: bool) -> dict[str, Any]:
    """Returns the ``usage`` of an answer, from the samples of each of its prompts.

    A prompt is read once for all its samples, and tokens from the prefix cache cost no FLOPs. ``hidden``: max_tokens
    is 0, so the token that the engine drew is not part of the answer, though its FLOPs were spent.
    """
    choices = [writing for writings in samples for writing in writings]
    prompt_tokens = sum(len(writings[0].request.prompt) for writings in samples)
    completion_tokens = 0 if hidden else sum(len(writing.tokens) for writing in choices)
    spent, cached = _total_cost(served, samples, full_depth=False)
    full, cached_full = _total_cost(served, samples, full_depth=True)
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


def _total_cost(served: Served, samples: Sequence[Sequence[Writing]], *, full_depth: bool) -> tuple[Cost, Cost]:
    """Returns the cost of all samples, and of the prompt tokens that came from the prefix cache."""
    total = cached = Cost.nothing()
    for writings in samples:
        request = writings[0].request
        deepest = request.max_iterations or served.iterations
        for index, writing in enumerate(writings):
            depths = [deepest if full_depth else depth for depth in writing.depths if depth]
            prompt = len(writing.prompt_depths)
            logits = len(writing.tokens)
            if request.iteration_top:
                logits += sum(depth - 1 for depth in depths[prompt - 1 :])
            if request.prompt_log_probabilities is not None and index == 0:
                logits += prompt
            total += text_cost(served, depths, request, logits=logits)
            if index:  # the prompt was read for the first sample
                shared = text_cost(served, depths[:prompt], request, logits=0)
                total = Cost(*(getattr(total, name) - value for name, value in vars(shared).items()))
            else:
                cached += text_cost(served, depths[: writing.cached_tokens], request, logits=0)
    return total, cached
