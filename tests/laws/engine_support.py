"""What the engine's laws share: random requests, and the results that each must have."""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from adaponder import AdaPonderForCausalLM, FixedDepth, ForcedDepths, LearnedGate, Random, Uniform
from adaponder.inference import Completion, Engine, Request
from adaponder.policies.base import Custom, PolicyInput, as_policy
from adaponder.policies.measures import Change, Confidence, Divergence, Entropy, Similarity
from support import VOCABULARY

SETTINGS = {"adaponder": {"tau": 0.5}} | {name: {"exit_threshold": 0.6} for name in ("ouro", "act", "pondernet")}


def portable(model: AdaPonderForCausalLM, request: Request) -> tuple[list[int], list[int]]:
    """Returns the generated ids and the depths of all computed tokens of a greedy request by ``generate``."""
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


def in_one_forward(model: AdaPonderForCausalLM, request: Request, generated: list[int], **asked: Any) -> Any:
    """Runs a dense forward over every token that a completion computed, by the request's own policy."""
    policy: Any = request.policy
    if request.tau is not None:
        policy = LearnedGate(request.tau)
    if request.depths is not None:
        inner = model.method.default_policy(training=False) if policy is None else as_policy(policy)
        policy = _forced(request.depths, inner)
    ids = torch.tensor([[*request.prompt, *generated[:-1]]])
    how = {} if policy is None else {"policy": policy}
    with torch.no_grad():
        return model(ids, execution="dense", seed=request.seed, max_iterations=request.max_iterations, **how, **asked)


def _forced(depths: Any, inner: Any) -> Custom:
    """Returns ``inner``, overridden where ``depths`` has the depth of a slot."""
    pairs = dict(depths.items() if isinstance(depths, Mapping) else enumerate(depths))
    table = torch.tensor([pairs.get(slot, 0) for slot in range(512)])

    def decide(rows: PolicyInput) -> Tensor:
        depth = table[rows.slot]
        return torch.where(depth > 0, rows.iteration + 1 < depth, inner(rows))

    return Custom(decide)


def draw_requests(
    count: int, seed: int, *, halts: bool, iterations: int, longest: int = 20, sampled: float = 0.0, extras: float = 0.0
) -> list[Request]:
    """Draws requests of many lengths, policies and iterations; some have a common prefix.

    A share ``sampled`` samples, with penalties, biases and several samples; a share ``extras`` has stop ids,
    log-probabilities, gates and the like. The others are greedy.
    """
    draw = random.Random(seed)
    common = [draw.randrange(VOCABULARY) for _ in range(longest)]
    requests = []
    for place in range(count):
        own = [draw.randrange(VOCABULARY) for _ in range(draw.randint(1, longest))]
        prompt = common[: draw.randint(0, longest)] + own if draw.random() < 0.6 else own
        prompt = prompt[: longest + 4]
        new = draw.randint(1, 9)
        fields: dict[str, Any] = {"prompt": prompt, "max_new_tokens": new, "temperature": 0.0}
        fields |= {"seed": draw.randrange(3), "client": str(place % 3)}
        if halts:
            fields |= _draw_depth(draw, len(prompt) + new, iterations)
        if draw.random() < sampled:
            fields |= _draw_sampling(draw)
        if draw.random() < extras:
            fields |= _draw_extras(draw, new)
        requests.append(Request(**fields))
    return requests


def _draw_depth(draw: random.Random, slots: int, iterations: int) -> dict[str, Any]:
    """Draws what decides the depth of a request's tokens."""
    depth, last = draw.randint(1, iterations), iterations - 1
    choices: list[dict[str, Any]] = [
        {},
        {},
        {"policy": FixedDepth(depth)},
        {"policy": Random(0.6)},
        {"policy": LearnedGate(draw.random())},
        {"policy": Entropy(draw.uniform(0.5, 3.0))},
        {"policy": Change(draw.uniform(0.05, 0.9))},
        {"policy": Confidence(draw.uniform(0.05, 0.6))},
        {"policy": Similarity(draw.uniform(0.2, 0.95))},
        {"policy": Divergence(draw.uniform(0.05, 2.0))},
        {"policy": Uniform(thresholds=tuple(draw.uniform(0.2, 0.8) for _ in range(last)), keep=0.5)},
        {"policy": ForcedDepths(torch.tensor([[draw.randint(1, iterations) for _ in range(slots)]]))},
        {"policy": odd_ones},
        {"depths": [draw.randint(0, iterations) for _ in range(draw.randint(1, slots - 1))]},
        {"depths": {draw.randrange(slots - 1): depth}, "policy": Random(0.5)},
        {"max_iterations": depth},
        {"max_iterations": depth, "policy": Random(0.7)},
    ]
    return draw.choice(choices)


def odd_ones(rows: PolicyInput) -> Tensor:
    """Decides by slot and gate, as a user's own policy may."""
    return ((rows.slot + rows.iteration) % 2 == 1) | (rows.gate > 0.7)


def _draw_sampling(draw: random.Random) -> dict[str, Any]:
    fields: dict[str, Any] = {"temperature": draw.uniform(0.3, 2.0), "samples": draw.choice([1, 1, 2, 3])}
    for name, values in {
        "top_k": [0, 3, 10],
        "top_p": [1.0, 0.5, 0.9],
        "min_p": [0.0, 0.1],
        "repetition_penalty": [1.0, 1.7],
        "presence_penalty": [0.0, 1.5],
        "frequency_penalty": [0.0, 0.8],
        "logit_bias": [{}, {3: 5.0, 11: -50.0}],
    }.items():
        fields[name] = draw.choice(values)
    return fields


def _draw_extras(draw: random.Random, new: int) -> dict[str, Any]:
    stops = tuple(draw.sample(range(VOCABULARY), 12))
    choices: list[dict[str, Any]] = [
        {"stop_ids": stops},
        {"stop_ids": stops, "min_new_tokens": draw.randint(0, new)},
        {"log_probabilities": draw.choice([0, 3, 20])},
        {"prompt_log_probabilities": draw.choice([0, 2])},
        {"gates": True},
        {"iteration_top": 2},
        {"salt": "apart"},
    ]
    return draw.choice(choices)


def plain_greedy(request: Request) -> bool:
    """Returns whether each token is the likeliest of the model's distribution."""
    untouched = request.repetition_penalty == 1 and not request.presence_penalty and not request.frequency_penalty
    return request.greedy and untouched and not request.logit_bias and not request.min_new_tokens


def assert_as_the_model_says(model: AdaPonderForCausalLM, done: Completion) -> None:
    """Compares depths, and the tokens of a plain greedy request, with one dense forward over the same tokens."""
    request = done.request
    assert done.error is None, (done.error, request)
    output = in_one_forward(model, request, done.ids)
    assert done.depths == output.depth[0].tolist(), request
    if plain_greedy(request):
        assert done.ids == output.logits[0, len(request.prompt) - 1 :].argmax(-1).tolist(), request
    ends = [token for token in done.ids[:-1] if token in request.stop_ids]
    assert len(ends) <= max(0, request.min_new_tokens - 1), "it went on after a stop id"
    if done.finish_reason == "length":
        assert len(done.ids) == request.max_new_tokens
    else:
        assert (done.finish_reason, done.stop_id) == ("stop", done.ids[-1])
        assert done.stop_id in request.stop_ids
        assert len(done.ids) >= request.min_new_tokens


def solo(model: AdaPonderForCausalLM, request: Request, **options: Any) -> list[Completion]:
    """Returns the completions of a request alone in an engine, without drafts."""
    engine = Engine(model, lanes=1, burst=1, late=False, share_prefixes=False, drafts=0, **options)
    return engine.generate([request])[0]


def assert_alike(first: Completion, second: Completion) -> None:
    """Asserts that two completions of a request agree; numbers up to float64's rounding."""
    for name in ("ids", "depths", "finish_reason"):
        assert getattr(first, name) == getattr(second, name), first.request
    assert_near(first.tokens, second.tokens)
    prompts = [completion.prompt_log_probabilities for completion in (first, second)]
    assert (prompts[0] is None) == (prompts[1] is None)
    assert_near(*(prompt or () for prompt in prompts))


def assert_near(first: Any, second: Any, tolerance: float = 1e-9) -> None:
    """Asserts equality, of numbers up to the tolerance."""
    if isinstance(first, float) and isinstance(second, float):
        assert abs(first - second) <= tolerance, (first, second)
    elif isinstance(first, Mapping):
        assert_near(sorted(first.items()), sorted(second.items()), tolerance)
    elif isinstance(first, (list, tuple)):
        assert len(first) == len(second), (first, second)
        for pair in zip(first, second, strict=True):
            assert_near(*pair, tolerance)
    else:
        assert first == second, (first, second)


@dataclass
class Ended:
    """The results of some requests: completions by (place of the request, sample)."""

    completions: dict[tuple[int, int], Completion] = field(default_factory=dict)
    cancelled: set[int] = field(default_factory=set)

    def of(self, place: int, samples: int) -> list[Completion]:
        return [self.completions[place, sample] for sample in range(samples)]


def run_all(
    engine: Engine,
    requests: list[Request],
    seed: int = 0,
    *,
    rush: float = 0.5,
    cancel: float = 0.0,
    callback: Callable[[int], Any] = lambda place: None,
) -> Ended:
    """Submits requests at random moments, each with its callback, cancels some, and checks events and leaks."""
    draw, ended, waiting = random.Random(seed), Ended(), list(enumerate(requests))
    numbers: dict[int, int] = {}
    streamed: dict[tuple[int, int], list] = {}
    steps = 0
    while waiting or engine.busy:
        while waiting and draw.random() < rush:
            place, request = waiting.pop(0)
            numbers[engine.submit(request, callback(place))] = place
        if numbers and draw.random() < cancel:
            number = draw.choice(list(numbers))
            if number in engine._requests:
                ended.cancelled.add(numbers[number])
            engine.cancel(number)
        for event in engine.step():
            key = numbers[event.request], event.sample
            if event.token is not None:
                streamed.setdefault(key, []).append(event.token)
            if event.completion is not None:
                assert key not in ended.completions, "a sample ended twice"
                ended.completions[key] = event.completion
                assert streamed.get(key, []) == event.completion.tokens, "events and completion differ"
        steps += 1
        assert steps < 400 * (1 + len(requests)), "no end in sight"
    wanted = {(place, sample) for place, request in enumerate(requests) for sample in range(request.samples)}
    assert set(ended.completions) == wanted
    assert_empty(engine)
    return ended


def run(engine: Engine, requests: list[Request], seed: int = 0) -> list[Completion]:
    """Returns the first completion of each request, submitted at random moments."""
    ended = run_all(engine, requests, seed)
    return [ended.completions[place, 0] for place in range(len(requests))]


def assert_empty(engine: Engine) -> None:
    """Asserts that no page, lane or request is left; empties the prefix cache."""
    scheduler = engine.scheduler
    engine.prefixes.clear()
    assert engine.statistics["pages_held"] == 0, "pages leak"
    assert sorted(engine.pages._free) == list(range(1, engine.pages.count)), "a page is free twice, or lost"
    assert not any(engine.pages._holders)
    held = (scheduler.queues, scheduler._turns, scheduler.resident, engine._requests, engine._callbacks)
    held += (engine._pending, engine.clients)
    assert not any(held), held
    assert len(scheduler._free_lanes) == len(set(scheduler._free_lanes)) == engine.runner.lanes.padding, "lanes leak"
    assert not engine.busy


def draw_engine(draw: random.Random, width: int = 1) -> dict[str, Any]:
    """Draws the options of an engine."""
    return {
        "lanes": draw.randint(1, 6),
        "rows": draw.choice([None, 150 * width, 150 * width, 220 * width]),
        "chunk": draw.choice([width, 3 * width, 8 * width, 64 * width]),
        "burst": draw.choice([1, 2, 5]),
        "late": draw.random() < 0.6,
        "prefix_block": draw.choice([2, 4, 16]),
        "share_prefixes": draw.random() < 0.8,
    }


def assert_all_as_alone(model: AdaPonderForCausalLM, requests: list[Request], ended: Ended, **options: Any) -> None:
    """Compares each sample that was not cancelled with a dense forward, and with a solo run unless it is plain."""
    plain = ("prompt", "max_new_tokens", "seed", "client", "policy", "tau", "max_iterations", "depths")
    for place, request in enumerate(requests):
        if place in ended.cancelled:
            continue
        completions = ended.of(place, request.samples)
        for done in completions:
            assert_as_the_model_says(model, done)
        if request != Request(**{name: getattr(request, name) for name in plain}, temperature=0.0):
            for done, alone in zip(completions, solo(model, request, **options), strict=True):
                assert_alike(done, alone)
