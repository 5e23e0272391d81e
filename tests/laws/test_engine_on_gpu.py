"""Tests the engine on a GPU: exact in float64; below, tokens and depths differ from the truth only near a tie."""

import copy
from dataclasses import replace

import pytest
import torch
from engine_support import draw_requests, portable, run

from adaponder import ForcedDepths
from adaponder.inference import Engine, Request
from support import METHODS, POSITIONS, ids, tiny

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    ("method", "family", "body"),
    [
        *(
            (("adaponder", family, body))
            for family in ("gpt_neox", "llama", "mistral", "qwen3")
            for body in ("fused", "stock")
        ),
        *((method, "gpt_neox", None) for method in METHODS),
    ],
)
def test_float64_on_the_gpu_is_the_portable_path(method, family, body):
    iterations = 1 if method == "vanilla" else 3
    model = tiny(method, family, iterations=iterations).eval()
    drawn = draw_requests(7, 5, halts=model.method.halts, iterations=iterations)
    requests = [replace(request, depths=None) for request in drawn]
    expected = [portable(model, request) for request in requests]
    engine = Engine(copy.deepcopy(model).cuda(), lanes=3, chunk=9, tokens=40, burst=4, body=body)
    assert [(done.ids, done.depths) for done in run(engine, requests)] == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["gpt_neox", "llama"])
def test_lower_precision_differs_only_near_a_tie(family, dtype):
    """Compares each token and decision of the engine with float64 at the depths that the engine chose."""
    tau, prompts = 0.5, ids(8, 12)
    truth = tiny("adaponder", family, iterations=3, tau=tau).eval().cuda()
    plain = copy.deepcopy(truth).to(dtype)
    engine = Engine(plain, lanes=4, tokens=POSITIONS)
    requests = [Request(prompt=row.tolist(), max_new_tokens=24, temperature=0.0) for row in prompts]
    tokens = decisions = flips = 0
    for (done,) in engine.generate(requests):
        text = torch.tensor([done.prompt + done.ids[:-1]], device="cuda")
        forced = {"policy": ForcedDepths(torch.tensor([done.depths], device="cuda")), "execution": "dense"}
        with torch.no_grad():
            right, ours = truth(text, **forced), plain(text, **forced)
        error = 2 * float((right.logits - ours.logits.double()).abs().max())
        unsure = 2 * float((right.gates - ours.gates.double()).abs().max())
        said = right.logits[0, len(done.prompt) - 1 :].gather(-1, torch.tensor(done.ids, device="cuda")[:, None])[:, 0]
        gap = right.logits[0, len(done.prompt) - 1 :].max(-1).values - said
        assert float(gap.max()) <= error
        depth = torch.tensor(done.depths, device="cuda")
        for gate in range(2):
            s, asked = right.gates[0, :, gate], depth > gate
            goes_on = depth > gate + 1
            wrong = asked & (goes_on != (s >= tau))
            assert not bool((wrong & ((s - tau).abs() > unsure)).any())
            flips += int(wrong.sum())
            decisions += int(asked.sum())
        flips += int((gap > 0).sum())
        tokens += len(done.ids)
    print(f"{family} {dtype}: {flips} flips among {tokens} tokens and {decisions} decisions")
    assert flips <= (tokens + decisions) // 20


def test_samples_penalties_and_policies_in_graphs_equal_a_solo_run():
    model = tiny("adaponder", iterations=3).eval().cuda()
    settings = [
        {"temperature": 0.7},
        {"top_k": 5},
        {"top_p": 0.8, "repetition_penalty": 1.3},
        {"tau": 0.3, "log_probabilities": 3},
        {"frequency_penalty": 0.5, "min_p": 0.1, "gates": True},
        {"depths": [1, 2, 3, 1, 2], "logit_bias": {4: 2.0}},
    ]
    prompts = ids(6, 9, seed=3).tolist()
    mixed = [Request(prompts[seed], max_new_tokens=12, seed=seed, **fields) for seed, fields in enumerate(settings)]
    together = Engine(model, lanes=6, tokens=40).generate(mixed)
    for request, (done,) in zip(mixed, together, strict=True):
        (alone,) = Engine(model, lanes=1, tokens=40).generate([request])[0]
        assert (done.ids, done.depths) == (alone.ids, alone.depths), request


@pytest.mark.parametrize("method", ["adaponder", "ponder", "ouro"])
def test_drafting_on_the_gpu_gives_the_same_tokens(method):
    model = tiny(method, iterations=3).eval().cuda()
    requests = [Request(prompt=row.tolist(), max_new_tokens=16, seed=7) for row in ids(4, 9, seed=8)]
    plain, drafted = (Engine(model, lanes=2, tokens=40, drafts=drafts).generate(requests) for drafts in (0, 2))
    for (one,), (other,) in zip(plain, drafted, strict=True):
        assert (one.ids, one.depths) == (other.ids, other.depths)


def test_a_pause_token_of_the_vocabulary_is_captured():
    model = tiny("pause", iterations=3, pause_token_id=60).eval()
    requests = [Request(prompt=row.tolist(), max_new_tokens=9, temperature=0.0) for row in ids(2, 5)]
    wanted = [portable(model, request)[0] for request in requests]
    engine = Engine(copy.deepcopy(model).cuda(), lanes=2, tokens=30)
    assert [one.ids for (one,) in engine.generate(requests)] == wanted
