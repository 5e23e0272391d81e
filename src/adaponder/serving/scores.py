"""``/score``: what the model says of a given text."""

from __future__ import annotations

import math
import time
from collections.abc import Generator, Sequence
from json import dumps
from json.encoder import encode_basestring
from typing import Any

from adaponder.errors import AdaPonderError
from adaponder.evaluation.token_scores import Reading, TokenScore, TokenScorer, TokenScores
from adaponder.serving.answers import finite, top_tokens
from adaponder.serving.depths import Depth
from adaponder.serving.served import Served
from adaponder.serving.usage import text_cost
from adaponder.text import pieces

# Tokens that are read before others may go first.
_PART = 512


class Scores:
    """Scored texts of one model; the worker's thread alone calls it."""

    def __init__(self, served: Served):
        self.served = served
        self.scorer = TokenScorer(served.model)

    def __call__(
        self, ids: Sequence[int], depth: Depth, *, gates: bool, top: int, full_depth: bool, seed: int, salt: str
    ) -> Generator[None, None, bytes]:
        """Returns the answer of ``/score`` as JSON, and yields where other work may go first."""
        began = time.perf_counter()
        how = Reading(depth.policy, depth.max_iterations, depth.depths, top, seed, salt)
        scores = yield from self.scorer.in_parts(ids, how, _PART)
        full = None
        if full_depth:
            yield
            full = yield from self.scorer.in_parts(ids, how.at_full_depth(self.served.model), _PART)
        answer = {
            "object": "score",
            "model": self.served.name,
            "policy": _line(depth, self.served),
            **_means("loss", scores.nll),
            "mean_depth": sum(scores.depths) / len(ids),
        }
        if full is not None:
            answer["full_loss"] = _means("loss", full.nll)["loss"]
        answer["usage"] = self._usage(scores, depth)
        tokens = self._tokens(ids, scores.tokens, None if full is None else full.tokens, gates=gates, top=top)
        answer["seconds"] = time.perf_counter() - began
        return f'{_json(answer)[:-1]},"tokens":[{tokens}]}}'.encode()

    def _tokens(
        self, ids: Sequence[int], scores: list[TokenScore], full: list[TokenScore] | None, *, gates: bool, top: int
    ) -> str:
        """The tokens of an answer. A score is written once: after an edit only those that it changed are."""
        before: list[TokenScore | None] = [None, *scores[:-1]]
        fuller: list[TokenScore | None] = [None] * len(scores) if full is None else [None, *full[:-1]]
        told = []
        for token, text, score, earlier, deeper in zip(
            ids, pieces(self.served.tokenizer, ids), scores, before, fuller, strict=True
        ):
            parts = [f'{{"id":{token},"text":{encode_basestring(text)}', _loss(earlier), self._depth(score, gates, top)]
            if full is not None:
                parts.append(_full_loss(deeper))
            told.append(",".join(parts) + "}")
        return ",".join(told)

    def _depth(self, score: TokenScore, gates: bool, top: int) -> str:
        """What reading a token said of it and of what comes next."""
        name = ("depth", gates, top)
        if name not in score.notes:
            told: dict[str, Any] = {"depth": score.depth}
            if gates:
                told["gates"] = [finite(gate) for gate in score.gates]
            if top:
                told["iteration_top"] = [top_tokens(self.served, tuple(one)) for one in score.top]
            score.notes[name] = _json(told)[1:-1]
        return score.notes[name]

    def _usage(self, scores: TokenScores, depth: Depth) -> dict[str, Any]:
        deepest, depths = depth.max_iterations or self.served.iterations, scores.depths
        arguments: dict[str, Any] = {
            "logits": len(depths),
            "policy": depth.policy,
            "max_iterations": depth.max_iterations,
        }
        spent = text_cost(self.served, depths, **arguments)
        full = text_cost(self.served, [deepest] * len(depths), **arguments)
        return {
            "tokens": len(depths),
            "cached_tokens": scores.cached,
            "iterations": sum(depths),
            "flops": spent.flops,
            "flops_full_depth": full.flops,
            "kv_bytes": spent.kv_bytes,
            "kv_bytes_full_depth": full.kv_bytes,
        }


def _loss(earlier: TokenScore | None) -> str:
    """How well a token was foreseen, by the score of the one before it."""
    if earlier is None:
        return '"nll":null,"nll_by_iteration":[]'
    if "loss" not in earlier.notes:
        earlier.notes["loss"] = _json({"nll": earlier.nll[-1], "nll_by_iteration": earlier.nll})[1:-1]
    return earlier.notes["loss"]


def _full_loss(earlier: TokenScore | None) -> str:
    return f'"full_nll":{"null" if earlier is None else _json(earlier.nll[-1])}'


def _json(value: Any) -> str:
    return dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":"))


def _means(name: str, nll: Sequence[float]) -> dict[str, float | None]:
    if not nll:
        return {name: None, "perplexity": None}
    mean = sum(nll) / len(nll)
    return {name: mean, "perplexity": math.exp(min(mean, 700.0))}


def _line(depth: Depth, served: Served) -> str | None:
    """The rule that decided, as one line; ``None`` where it has no such form."""
    try:
        return (depth.policy or served.model.method.default_policy(training=False)).as_line()
    except AdaPonderError:
        return None
