"""``/score``, ``/tokenize`` and ``/detokenize``: what the model says of a given text."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

from adaponder.errors import AdaPonderError
from adaponder.evaluation.token_scores import Reading, Row, TokenScorer, TokenScores
from adaponder.policies import spec_of
from adaponder.serving.answers import finite, top_tokens
from adaponder.serving.depths import Depth
from adaponder.serving.served import Served
from adaponder.serving.usage import text_cost
from adaponder.text import pieces


class Scores:
    """Scored texts of one model; the worker's thread alone calls it."""

    def __init__(self, served: Served):
        self.served = served
        self.scorer = TokenScorer(served.model)

    def __call__(
        self, ids: Sequence[int], depth: Depth, *, gates: bool, top: int, full_depth: bool, seed: int, salt: str
    ) -> dict[str, Any]:
        """The answer of ``/score``."""
        began = time.perf_counter()
        how = Reading(depth.policy, depth.max_iterations, depth.depths, top, seed, salt)
        scores = self.scorer.score(ids, how)
        full = self.scorer.score(ids, how.at_full_depth(self.served.model)) if full_depth else None
        texts = pieces(self.served.tokenizer, ids)
        before: list[Row | None] = [None, *scores.rows[:-1]]
        fuller: list[float | None] = [None] * len(ids) if full is None else [None, *full.nll]
        tokens = []
        for token, text, row, earlier, other in zip(ids, texts, scores.rows, before, fuller, strict=True):
            told: dict[str, Any] = {"id": token, "text": text, "depth": row.depth}
            told["nll"] = None if earlier is None else earlier.nll[-1]
            told["nll_by_iteration"] = [] if earlier is None else earlier.nll
            if gates:
                told["gates"] = [finite(gate) for gate in row.gates]
            if top:
                told["iteration_top"] = [top_tokens(self.served, tuple(one)) for one in row.top]
            if full_depth:
                told["full_nll"] = other
            tokens.append(told)
        answer = {
            "object": "score",
            "model": self.served.name,
            "policy": _line(depth, self.served),
            "tokens": tokens,
            **_means("loss", scores.nll),
            "mean_depth": sum(scores.depths) / len(ids),
        }
        if full is not None:
            answer["full_loss"] = _means("loss", full.nll)["loss"]
        answer["usage"] = self._usage(scores, depth)
        return answer | {"seconds": time.perf_counter() - began}

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


def _means(name: str, nll: Sequence[float]) -> dict[str, float | None]:
    if not nll:
        return {name: None, "perplexity": None}
    mean = sum(nll) / len(nll)
    return {name: mean, "perplexity": math.exp(min(mean, 700.0))}


def _line(depth: Depth, served: Served) -> str | None:
    """The rule that decided, as one line; ``None`` where it has no such form."""
    try:
        return spec_of(depth.policy or served.model.method.default_policy(training=False))
    except AdaPonderError:
        return None
