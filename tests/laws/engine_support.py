"""What the engine's laws share: requests drawn at random, and what each must come to."""

from __future__ import annotations

import random
from dataclasses import replace

import torch

from adaponder import AdaPonderForCausalLM, FixedDepth, LearnedGate, Random
from adaponder.inference import Completion, Engine, Request
from support import VOCABULARY


def portable(model: AdaPonderForCausalLM, request: Request) -> tuple[list[int], list[int]]:
    """(generated ids, depths of all tokens read) of a greedy request by ``generate``."""
    ids = torch.tensor([list(request.prompt)])
    policy = {} if request.policy is None else {"policy": request.policy}
    if request.tau is not None:
        policy = {"policy": LearnedGate(request.tau)}
    result = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=request.max_new_tokens,
        do_sample=False,
        pad_token_id=0,
        return_dict_in_generate=True,
        max_iterations=request.max_iterations,
        seed=request.seed,
        **policy,
    )
    return result.sequences[0, ids.shape[1] :].tolist(), result.past_key_values.depth[0].tolist()


def draw_requests(count: int, seed: int, *, halts: bool, iterations: int, longest: int = 20) -> list[Request]:
    """Greedy requests of many lengths, policies and iterations; some begin alike."""
    draw = random.Random(seed)
    common = [draw.randrange(VOCABULARY) for _ in range(longest)]
    requests = []
    for _ in range(count):
        own = [draw.randrange(VOCABULARY) for _ in range(draw.randint(1, longest))]
        prompt = common[: draw.randint(0, longest)] + own if draw.random() < 0.6 else own
        policies = [None, None, FixedDepth(draw.randint(1, iterations)), Random(0.6), LearnedGate(draw.random())]
        requests.append(
            Request(
                prompt=prompt[: longest + 4],
                max_new_tokens=draw.randint(1, 9),
                temperature=0.0,
                seed=draw.randrange(3),
                policy=draw.choice(policies) if halts else None,
                max_iterations=draw.choice([None, None, draw.randint(1, iterations)]) if halts else None,
            )
        )
    return [_allowed(request, iterations) for request in requests]


def _allowed(request: Request, iterations: int) -> Request:
    return request if request.max_iterations is None else replace(request, policy=None)


def run(engine: Engine, requests: list[Request], seed: int = 0) -> list[Completion]:
    """The first completion of each request, submitted at random moments; afterwards nothing is held."""
    draw, done, waiting = random.Random(seed), {}, list(enumerate(requests))
    numbers: dict[int, int] = {}
    while waiting or engine.busy:
        while waiting and draw.random() < 0.5:
            place, request = waiting.pop(0)
            numbers[engine.submit(request)] = place
        for event in engine.step():
            if event.completion is not None and event.sample == 0:
                done[numbers[event.request]] = event.completion
    engine.prefixes.clear()
    assert engine.statistics["pages_held"] == 0, "pages leak"
    return [done[place] for place in range(len(requests))]
