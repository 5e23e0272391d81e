"""``/score``: loss, depth and gates of each token of a given text."""

from __future__ import annotations

import math
import time
from collections.abc import Generator, Sequence
from json import dumps
from json.encoder import encode_basestring
from typing import Any

from adaponder.errors import AdaPonderError
from adaponder.evaluation.token_scores import Reading, TokenScore, TokenScorer
from adaponder.serving.answers import finite, text_cost, top_tokens
from adaponder.serving.served import Served
from adaponder.text import pieces

# Tokens that are read before other work may run.
_PART = 512


class ScoreWriter:
    """Scores texts of one model and writes the answers; used by the worker's thread only."""

    def __init__(self, served: Served):
        self.served = served
        self.scorer = TokenScorer(served.model)

    def __call__(
        self, ids: Sequence[int], reading: Reading, *, gates: bool, full_depth: bool
    ) -> Generator[None, None, bytes]:
        """Returns the answer of ``/score`` as JSON; yields where other work may run.

        With ``gates`` each token has its gates, with ``full_depth`` also its loss at full depth.
        """
        began = time.perf_counter()
        scores = yield from self.scorer.in_parts(ids, reading, _PART)
        full = None
        if full_depth:
            yield
            full = yield from self.scorer.in_parts(ids, reading.at_full_depth(self.served.model), _PART)
        loss = _mean(scores.nll)
        answer: dict[str, Any] = {
            "object": "score",
            "model": self.served.name,
            "policy": self._policy_line(reading),
            "loss": loss,
            "perplexity": None if loss is None else math.exp(min(loss, 700.0)),
            "mean_depth": sum(scores.depths) / len(ids),
        }
        if full is not None:
            answer["full_loss"] = _mean(full.nll)
        answer["usage"] = self._usage(scores.depths, scores.cached, reading)
        tokens = self._tokens(ids, scores.tokens, None if full is None else full.tokens, top=reading.top, gates=gates)
        answer["seconds"] = time.perf_counter() - began
        return f'{_json(answer)[:-1]},"tokens":[{tokens}]}}'.encode()

    def _tokens(
        self, ids: Sequence[int], scores: list[TokenScore], full: list[TokenScore] | None, *, top: int, gates: bool
    ) -> str:
        """Returns the tokens of an answer as JSON; each score is written once, also if a text is edited and resent."""
        before: list[TokenScore | None] = [None, *scores[:-1]]
        full_before: list[TokenScore | None] = [None] * len(scores) if full is None else [None, *full[:-1]]
        texts = pieces(self.served.tokenizer, ids)
        tokens = []
        for token, text, score, previous, full_previous in zip(ids, texts, scores, before, full_before, strict=True):
            fields = [f'"id":{token},"text":{encode_basestring(text)}', _loss(previous)]
            fields.append(self._depth(score, top=top, gates=gates))
            if full is not None:
                fields.append(f'"full_nll":{"null" if full_previous is None else _json(full_previous.nll[-1])}')
            tokens.append("{" + ",".join(fields) + "}")
        return ",".join(tokens)

    def _depth(self, score: TokenScore, *, top: int, gates: bool) -> str:
        """Returns the depth of a token, and its gates and most likely next tokens, as JSON."""
        name = ("depth", gates, top)
        if name not in score.notes:
            fields: dict[str, Any] = {"depth": score.depth}
            if gates:
                fields["gates"] = [finite(gate) for gate in score.gates]
            if top:
                fields["iteration_top"] = [top_tokens(self.served, tuple(tokens)) for tokens in score.top]
            score.notes[name] = _json(fields)[1:-1]
        return score.notes[name]

    def _usage(self, depths: Sequence[int], cached: int, reading: Reading) -> dict[str, Any]:
        deepest = reading.max_iterations or self.served.iterations
        spent, full = (
            text_cost(self.served, read, reading, logits=len(depths)) for read in (depths, [deepest] * len(depths))
        )
        return {
            "tokens": len(depths),
            "cached_tokens": cached,
            "iterations": sum(depths),
            "flops": spent.flops,
            "flops_full_depth": full.flops,
            "kv_bytes": spent.kv_bytes,
            "kv_bytes_full_depth": full.kv_bytes,
        }

    def _policy_line(self, reading: Reading) -> str | None:
        """Returns the policy as one line; ``None`` if it cannot be written as one."""
        try:
            return (reading.policy or self.served.model.method.default_policy(training=False)).as_line()
        except AdaPonderError:
            return None


def _loss(previous: TokenScore | None) -> str:
    """Returns the loss of a token as JSON, from the score of the token before it."""
    if previous is None:
        return '"nll":null,"nll_by_iteration":[]'
    if "loss" not in previous.notes:
        previous.notes["loss"] = _json({"nll": previous.nll[-1], "nll_by_iteration": previous.nll})[1:-1]
    return previous.notes["loss"]


def _json(value: Any) -> str:
    return dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":"))


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
