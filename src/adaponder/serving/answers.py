"""Writes answers: completions in OpenAI's formats (one JSON body or stream events), their usage, and scores."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from itertools import accumulate
from json import dumps
from json.encoder import encode_basestring, encode_basestring_ascii
from typing import Any

import torch

from adaponder.errors import AdaPonderError
from adaponder.evaluation.meter import Meter
from adaponder.evaluation.token_scores import ScoreSettings, TokenScore, TokenScorer
from adaponder.inference.outputs import PromptToken, Token, TopTokens
from adaponder.inference.request import Request
from adaponder.methods.cost import Cost
from adaponder.serving.protocol import ChatBody, CompletionBody
from adaponder.serving.served import Served
from adaponder.text import Writing, pieces

# What OpenAI returns for a log-probability of minus infinity.
_IMPOSSIBLE = -9999.0


class AnswerWriter:
    """Writes the answer to one request; the type of ``body`` decides between the formats of completions and chats.

    With ``echo``, ``echoed`` lists the texts of each prompt's tokens, which precede its completions. With
    ``max_tokens=0``, ``hidden`` is true and leaves out the one token that the engine still generates. Stream events
    are concatenated from constant bytes and the new text, because serialising dictionaries would take most of the
    event loop's time.
    """

    def __init__(
        self, served: Served, body: CompletionBody | ChatBody, *, hidden: bool, echoed: Sequence[list[str]] = ()
    ):
        self.served, self.extension, self.hidden = served, body.extension, hidden
        self._chat, self._top = isinstance(body, ChatBody), body.top
        self._echoed, self._n = echoed, body.n or 1
        self._kind, prefix = ("chat.completion", "chatcmpl") if self._chat else ("text_completion", "cmpl")
        self._about = {"id": f"{prefix}-{secrets.token_hex(12)}", "created": int(time.time()), "model": served.name}
        chunk = self._about | {"object": "chat.completion.chunk" if self._chat else self._kind}
        self._head = b"data: " + dumps(chunk)[:-1].encode() + b',"choices":['
        self._tail = b'}],"usage":null}\n\n' if body.includes_usage else b"}]}\n\n"
        self._continuous_usage = body.continuous_usage
        self._before, self._after = (b'"delta":{"content":', b"}") if self._chat else (b'"text":', b"")
        self._sent: dict[int, int] = {}  # number of tokens returned so far, by index of the choice

    def whole(self, choices: Sequence[Writing], usage: dict[str, Any]) -> bytes:
        """Returns the JSON body of an answer that is not streamed."""
        answers = []
        for index, writing in enumerate(choices):
            last = 0 if self.hidden else len(writing.tokens)
            text = "" if self.hidden else writing.text
            content: dict[str, Any] = {"text": "".join(self._prompt_pieces(index)) + text}
            if self._chat:
                content = {"message": {"role": "assistant", "content": text, "refusal": None}}
            answers.append({"index": index, **content, **self._details(index, writing, 0, last)})
        return _json({**self._about, "object": self._kind, "choices": answers, "usage": usage}).encode()

    def events(self, index: int, writing: Writing, text: str) -> bytes:
        """Returns the stream events for the new ``text`` of a choice; no bytes while nothing can be shown yet."""
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
            return opening + self._text_event(index, writing, text)
        content: dict[str, Any] = {"delta": {"content": text} if text or not done else {}}
        if not self._chat:
            content = {"text": text}
        fields = dumps(content | self._details(index, writing, first, last))[1:-1].encode()
        return opening + self._event(index, writing, fields)

    def usage_event(self, usage: dict[str, Any]) -> bytes:
        """Returns the event with the usage, the last one before :data:`adaponder.serving.stream.DONE`."""
        return b"".join((self._head, b'],"usage":', dumps(usage).encode(), b"}\n\n"))

    def _opening(self, index: int, writing: Writing) -> bytes:
        """Returns a choice's first event: the role in a chat, the prompt with ``echo``; without either, no bytes."""
        if self._chat:
            delta = b'"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null'
            return self._event(index, writing, delta)
        return self._text_event(index, writing, "".join(self._prompt_pieces(index))) if self._echoed else b""

    def _text_event(self, index: int, writing: Writing, text: str) -> bytes:
        content = self._before + encode_basestring_ascii(text).encode() + self._after
        return self._event(index, writing, content + b',"logprobs":null,"finish_reason":null')

    def _event(self, index: int, writing: Writing, fields: bytes) -> bytes:
        tail = self._tail
        if self._continuous_usage:  # the usage of this choice alone, as in vLLM
            prompt, new = len(writing.request.prompt), 0 if self.hidden else len(writing.tokens)
            usage = {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}
            tail = b"".join((b'}],"usage":', dumps(usage).encode(), b"}\n\n"))
        return b"".join((self._head, b'{"index":', str(index).encode(), b",", fields, tail))

    def _prompt_pieces(self, index: int) -> list[str]:
        return self._echoed[index // self._n] if self._echoed else []

    def _details(self, index: int, writing: Writing, first: int, last: int) -> dict[str, Any]:
        """Returns the fields of a choice except its index and text, for the generated tokens ``[first:last]``."""
        logprobs = None
        if self._top is not None:
            logprobs = (self._chat_logprobs if self._chat else self._completion_logprobs)(index, writing, first, last)
        details: dict[str, Any] = {"logprobs": logprobs, "finish_reason": writing.finish_reason}
        if self.extension.lists_tokens:
            spelled = zip(writing.tokens[first:last], writing.pieces[first:last], strict=True)
            ended = writing.finish_reason is not None and self.extension.depth
            prompt = {"prompt_depths": writing.prompt_depths} if ended else {}
            details["adaponder"] = {"tokens": [self._token(token, text) for token, text in spelled]} | prompt
        return details

    def _token(self, token: Token, text: str) -> dict[str, Any]:
        """Returns a token's entry in the field ``adaponder.tokens``."""
        fields: dict[str, Any] = {"id": token.id, "text": text}
        if self.extension.depth:
            fields["depth"] = token.depth
        if self.extension.gates:
            fields["gates"] = [finite(gate) for gate in token.gates]
        if self.extension.iteration_top:
            fields["iteration_top"] = [top_tokens(self.served, top) for top in token.iteration_top]
        return fields

    def _completion_logprobs(self, index: int, writing: Writing, first: int, last: int) -> dict[str, Any]:
        prompt: list[PromptToken] = writing.prompt_log_probabilities or [] if self._echoed else []
        tokens: list[Token | PromptToken] = [*prompt, *writing.tokens[first:last]]
        offset = sum(len(piece) for piece in writing.pieces[:first])
        texts = [*(self._prompt_pieces(index) if prompt else []), *writing.pieces[first:last]]
        values = [token.log_probability for token in tokens]
        return {
            "tokens": [self.served.spell(token.id).text for token in tokens],
            "token_logprobs": [None if value is None else finite(value) for value in values],
            "top_logprobs": [self._top_logprobs(token) for token in tokens] if self._top else None,
            "text_offset": list(accumulate(map(len, texts), initial=offset))[:-1],
        }

    def _top_logprobs(self, token: Token | PromptToken) -> dict[str, float] | None:
        """Maps the texts of ``token`` and of the likeliest tokens to their log-probabilities.

        Returns ``None`` for the first token of a prompt, which has no log-probability.
        """
        if token.log_probability is None:
            return None
        by_text: dict[str, float] = {}
        for number, value in (*token.top[: self._top], (token.id, token.log_probability)):
            text = self.served.spell(number).text
            by_text[text] = max(finite(value), by_text.get(text, -math.inf))
        return by_text

    def _chat_logprobs(self, index: int, writing: Writing, first: int, last: int) -> dict[str, Any]:
        def entry(token: int, logprob: float) -> dict[str, Any]:
            spelled = self.served.spell(token)
            return {"token": spelled.text, "logprob": finite(logprob), "bytes": spelled.bytes}

        content = [
            entry(token.id, token.log_probability or 0.0) | {"top_logprobs": [entry(*top) for top in token.top]}
            for token in writing.tokens[first:last]
        ]
        return {"content": content, "refusal": None}


def top_tokens(served: Served, top: TopTokens) -> list[dict[str, Any]]:
    """Returns an entry of the field ``iteration_top``: the likeliest tokens after one iteration."""
    return [{"id": token, "text": served.spell(token).text, "logprob": finite(value)} for token, value in top]


def finite(value: float) -> float:
    """Returns ``value``, or -9999 if it is infinite or NaN, which JSON cannot represent."""
    return value if math.isfinite(value) else _IMPOSSIBLE


def text_cost(served: Served, depths: Sequence[int], how: Request | ScoreSettings, *, logits: int) -> Cost:
    """Returns the cost of computing tokens of these ``depths`` under the policy of ``how``.

    ``logits`` is the number of rows for which the language-model head is computed.
    """
    model = served.model
    meter = Meter(model.config, dtype=model.dtype, device=model.device, shape=served.shape)
    if depths:
        meter.add(torch.tensor([list(depths)]), logits=logits, policy=how.policy, max_iterations=how.max_iterations)
    return meter.cost


def usage_of(served: Served, samples: Sequence[Sequence[Writing]], *, hidden: bool) -> dict[str, Any]:
    """Returns the ``usage`` of an answer; ``samples`` lists the completions of each prompt.

    A prompt counts once for all its samples, and tokens from the prefix cache cost no FLOPs. With ``hidden``
    (``max_tokens=0``) the one generated token is not counted, but its FLOPs are.
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
    """Returns (cost without a prefix cache, the part of this cost that the prefix cache saved).

    With ``full_depth``, both are the costs of the same tokens at the maximum depth.
    """
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
            if index:  # the first sample's cost includes the prompt
                shared = text_cost(served, depths[:prompt], request, logits=0)
                total = Cost(*(getattr(total, name) - value for name, value in vars(shared).items()))
            else:
                cached += text_cost(served, depths[: writing.cached_tokens], request, logits=0)
    return total, cached


# Number of tokens scored between two points where other work may run.
_CHUNK = 512


class ScoreWriter:
    """Scores texts and writes the answers of ``/score``; must be called in the engine's thread."""

    def __init__(self, served: Served):
        self.served, self.scorer = served, TokenScorer(served.model)

    def __call__(
        self, ids: Sequence[int], how: ScoreSettings, *, gates: bool, full_depth: bool
    ) -> Generator[None, None, bytes]:
        """Scores a text: a generator that yields where other work may run, and returns the JSON answer of ``/score``.

        ``gates`` adds the gates of each token, ``full_depth`` its loss at full depth.
        """
        began, served = time.perf_counter(), self.served
        scores = yield from self.scorer.in_parts(ids, how, _CHUNK)
        full = None
        if full_depth:
            yield
            full = yield from self.scorer.in_parts(ids, how.at_full_depth(served.model), _CHUNK)
        loss, depths = _mean(scores.nll), scores.depths
        spent = text_cost(served, depths, how, logits=len(ids))
        most = text_cost(served, [how.max_iterations or served.iterations] * len(ids), how, logits=len(ids))
        answer: dict[str, Any] = {
            "object": "score",
            "model": served.name,
            "policy": self._policy_line(how),
            "loss": loss,
            "perplexity": None if loss is None else math.exp(min(loss, 700.0)),
            "mean_depth": sum(depths) / len(ids),
            "unknown_tokens": sum(token == served.unknown_id for token in ids),
            **({} if full is None else {"full_loss": _mean(full.nll)}),
            "usage": {"tokens": len(ids), "cached_tokens": scores.cached, "iterations": sum(depths)}
            | {name: getattr(spent, name) for name in ("flops", "kv_bytes")}
            | {f"{name}_full_depth": getattr(most, name) for name in ("flops", "kv_bytes")}
            | {"flops_vanilla": spent.vanilla},
        }
        tokens = self._tokens(ids, scores.tokens, None if full is None else full.tokens, top=how.top, gates=gates)
        answer["seconds"] = time.perf_counter() - began
        return f'{_json(answer)[:-1]},"tokens":[{tokens}]}}'.encode()

    def _tokens(
        self, ids: Sequence[int], scores: list[TokenScore], full: list[TokenScore] | None, *, top: int, gates: bool
    ) -> str:
        """Returns the tokens of an answer as JSON; tokens with cached scores reuse the JSON of earlier answers."""

        def depth_fields(score: TokenScore) -> dict[str, Any]:
            tops = [top_tokens(self.served, tuple(tokens)) for tokens in score.top]
            more = {"gates": [finite(gate) for gate in score.gates]} if gates else {}
            return {"depth": score.depth} | more | ({"iteration_top": tops} if top else {})

        def loss_fields(score: TokenScore) -> dict[str, Any]:
            return {"nll": score.nll[-1], "nll_by_iteration": score.nll}

        tokens, texts = [], pieces(self.served.tokenizer, ids)
        for slot, (token, text, score) in enumerate(zip(ids, texts, scores, strict=True)):
            # The score of a token holds the loss of the next token.
            loss = _cached_json(scores[slot - 1], "loss", loss_fields) if slot else '"nll":null,"nll_by_iteration":[]'
            fields = [f'"id":{token},"text":{encode_basestring(text)}', loss]
            fields.append(_cached_json(score, ("depth", gates, top), depth_fields))
            if full is not None:
                fields.append(f'"full_nll":{_json(full[slot - 1].nll[-1]) if slot else "null"}')
            tokens.append("{" + ",".join(fields) + "}")
        return ",".join(tokens)

    def _policy_line(self, how: ScoreSettings) -> str | None:
        """Returns the policy as a line for ``--policy``; ``None`` if it cannot be written as one."""
        with suppress(AdaPonderError):
            return (how.policy or self.served.model.method.default_policy(training=False)).as_line()
        return None


def _cached_json(score: TokenScore, key: Any, fields: Callable[[TokenScore], dict[str, Any]]) -> str:
    """Returns ``fields(score)`` as JSON without braces, cached in ``score.notes[key]``."""
    if key not in score.notes:
        score.notes[key] = _json(fields(score))[1:-1]
    return score.notes[key]


def _json(value: Any) -> str:
    return dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":"))


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
