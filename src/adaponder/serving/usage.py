"""What an answer cost: tokens as OpenAI counts them, and the meter's iterations, FLOPs and bytes beside."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from adaponder.evaluation.meter import Meter
from adaponder.inference.request import Request
from adaponder.methods.cost import Cost
from adaponder.serving.served import Served
from adaponder.text import Writing


def text_cost(served: Served, depths: Sequence[int], *, logits: int, policy: Any, max_iterations: int | None) -> Cost:
    """The cost of reading a text whose tokens have these depths, each once, with so many rows through the head."""
    model = served.model
    meter = Meter(model.config, dtype=model.dtype, device=model.device, shape=served.shape)
    if depths:
        meter.add(torch.tensor([list(depths)]), logits=logits, policy=policy, max_iterations=max_iterations)
    return meter.cost


def usage_of(
    served: Served, requests: Sequence[Request], writings: Sequence[Writing], *, hidden: bool = False
) -> dict[str, Any]:
    """The ``usage`` of an answer: ``writings`` are all samples of the first request, then of the next.

    A prompt is read once for all its samples, and what an earlier request had read of it costs no FLOPs. ``hidden``:
    ``max_tokens`` was 0, so the token that the engine drew is no token of the answer; its FLOPs were spent.
    """
    prompt_tokens = sum(len(request.prompt) for request in requests)
    completion_tokens = 0 if hidden else sum(len(writing.tokens) for writing in writings)
    total, full, kept, kept_full = (Cost.nothing() for _ in range(4))
    first = cached = 0
    for request in requests:
        own = writings[first : first + request.samples]
        first += request.samples
        spent, most = _of_request(served, request, own)
        total, full = total + spent, full + most
        if own[0].cached_tokens:
            depths, how = own[0].prompt_depths[: own[0].cached_tokens], _how(request)
            cached += len(depths)
            kept += text_cost(served, depths, logits=0, **how)
            deepest = [request.max_iterations or served.iterations] * len(depths)
            kept_full += text_cost(served, deepest, logits=0, **how)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached},
        "adaponder": {
            "mean_depth": total.iterations,
            "flops": total.flops - kept.flops,
            "flops_full_depth": full.flops - kept_full.flops,
            "kv_bytes": total.kv_bytes,
            "kv_bytes_full_depth": full.kv_bytes,
            "dropped_rows": sum(writing.dropped_rows for writing in writings),
        },
    }


def _of_request(served: Served, request: Request, writings: Sequence[Writing]) -> tuple[Cost, Cost]:
    """What reading a prompt and going on from it in each sample cost, and what it would cost at full depth."""
    deepest = request.max_iterations or served.iterations
    costs = []
    for full in (False, True):
        spent = Cost.nothing()
        for number, writing in enumerate(writings):
            depths = [depth for depth in writing.depths if depth]
            if full:
                depths = [deepest] * len(depths)
            prompt = len(writing.prompt_depths)
            scored = prompt if request.prompt_log_probabilities is not None else 0
            arguments = _how(request)
            heads = len(writing.tokens)
            if request.iteration_top:
                heads += sum(depths[prompt - 1 :]) - len(depths[prompt - 1 :])
            whole = text_cost(served, depths, logits=heads + (scored if not number else 0), **arguments)
            if number:  # the prompt was read for the first sample
                whole = _less(whole, text_cost(served, depths[:prompt], logits=0, **arguments))
            spent = spent + whole
        costs.append(spent)
    return costs[0], costs[1]


def _how(request: Request) -> dict[str, Any]:
    return {"policy": request.policy, "max_iterations": request.max_iterations}


def _less(whole: Cost, part: Cost) -> Cost:
    return Cost(*(getattr(whole, name) - getattr(part, name) for name in vars(whole)))
