"""Kernels sample the same tokens as the reference; noise and truncation are those of their definitions."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from adaponder.ops.next_token import stream_key
from adaponder.ops.next_token import triton as kernels
from adaponder.ops.next_token.torch import gumbel, least_kept, pick

VOCABULARY = 23
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def test_noise_is_the_same_on_every_machine():
    # From a splitmix64 in whole numbers of Python.
    key, position, token, mask = stream_key(7, 2), 11, 5, (1 << 64) - 1
    x = (key + ((position << 32) + token) * 0x9E3779B97F4A7C15) & mask
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & mask
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & mask
    x ^= x >> 31
    expected = -math.log(-math.log(((x >> 12) + 0.5) / 2**52))
    assert float(gumbel(torch.tensor([key]), torch.tensor([position]), 9)[0, token]) == pytest.approx(
        expected, rel=1e-14
    )
    assert stream_key(7, 2) == stream_key(7 - (1 << 64), 2) == -1088427420777695408
    assert len({stream_key(seed, sample) for seed in range(-50, 50) for sample in range(50)}) == 5000


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "vocabulary", "programs"), [(1, 23, 512), (3, 1024, 512), (7, 2500, 8)])
def test_the_kernel_draws_the_same_tokens(dtype, rows, vocabulary, programs, monkeypatch):
    monkeypatch.setattr(kernels, "PROGRAMS", programs)
    generator = torch.Generator().manual_seed(rows)
    logits = torch.randn(rows, vocabulary + 3, generator=generator).to(dtype)[:, :vocabulary]
    logits[0, : vocabulary // 2] = -math.inf
    temperature = torch.rand(2 * rows, 2, generator=generator, dtype=torch.float64)[:, 0] * 2
    lanes = torch.randperm(2 * rows, generator=generator)[:rows]
    temperature[lanes[1::3]] = 0
    logits[1::3] = logits[1::3].round()  # full of ties
    for row, value in zip(range(3, rows), (math.nan, math.inf), strict=False):
        logits[row, vocabulary - 2] = value
    logits[5:] = -math.inf
    key = torch.randint(-(2**63), 2**63 - 1, (2 * rows,), generator=generator)
    position = torch.randint(0, 2**31, (rows,), generator=generator)
    settings = (logits, lanes, position, temperature, key)
    third = logits.nan_to_num(posinf=0).topk(3).values[:, 2:]
    for sampled, least in ((True, None), (False, None), (True, third)):
        moved = None if least is None else least.to(DEVICE)
        token, bad = kernels.pick(*(tensor.to(DEVICE) for tensor in settings), sampled=sampled, least=moved)
        expected = pick(*settings, sampled=sampled, least=least)
        assert bad.tolist() == expected.bad.tolist() == [row >= 3 for row in range(rows)]
        assert token[:3].tolist() == expected.token[:3].tolist()
        assert ((token >= 0) & (token < vocabulary)).all()


def support(logits: Tensor, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> Tensor:
    """Returns probabilities after temperature and truncation."""
    numbers = torch.tensor([[temperature, top_p, math.log(min_p) if min_p else -math.inf]], dtype=torch.float64)
    lanes = torch.zeros(len(logits), dtype=torch.long)
    least = least_kept(logits, lanes, numbers, torch.tensor([top_k or logits.shape[1]]))
    return (logits.double().masked_fill(logits < least, -math.inf) / temperature).softmax(-1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_kernel_keeps_the_same_tokens(dtype, monkeypatch):
    monkeypatch.setattr(kernels, "SORTED_BLOCK", 16)
    generator = torch.Generator().manual_seed(0)
    logits = (2 * torch.randn(40, 50, generator=generator)).to(dtype)
    logits[::4] = logits[::4].round()
    logits[1, 3:] = -math.inf
    uniform = torch.rand(60, 4, generator=generator, dtype=torch.float64)
    temperature = torch.where(uniform[:, 0] < 0.2, 0.0, 2 * uniform[:, 0])
    top_p = torch.where(uniform[:, 1] < 0.3, 1.0, uniform[:, 1])
    log_min_p = torch.where(uniform[:, 2] < 0.5, 0.0, uniform[:, 2] / 10).log()
    top_k = torch.where(uniform[:, 3] < 0.5, 50, (uniform[:, 3] * 50).long())
    lanes = torch.randperm(60, generator=generator)[:40]
    settings = (logits, lanes, torch.stack([temperature, top_p, log_min_p], dim=1), top_k)
    least = kernels.least_kept(*(tensor.to(DEVICE) for tensor in settings))
    assert torch.equal(least.cpu(), least_kept(*settings))
    assert (logits >= least.cpu()).sum(1).unique().numel() > 10


@settings(max_examples=25)
@given(
    seed=st.integers(0, 1000),
    temperature=st.floats(0.2, 5.0),
    top_k=st.integers(0, VOCABULARY + 5),
    top_p=st.one_of(st.just(1.0), st.floats(0.01, 0.99)),
    min_p=st.one_of(st.just(0.0), st.floats(0.01, 1.0)),
)
def test_truncation_is_that_of_hugging_face(seed, temperature, top_k, top_p, min_p):
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(16, VOCABULARY, generator=generator, dtype=torch.float64)
    ids = torch.zeros(16, 1, dtype=torch.long)
    warped = TemperatureLogitsWarper(temperature)(ids, logits)
    warpers = [TopKLogitsWarper(top_k)] if top_k else []
    warpers += [TopPLogitsWarper(top_p)] if top_p < 1 else []
    warpers += [MinPLogitsWarper(min_p)] if min_p else []
    for warper in warpers:
        warped = warper(ids, warped)
    truncated = {"temperature": temperature, "top_k": min(top_k, VOCABULARY), "top_p": top_p, "min_p": min_p}
    ours, theirs = support(logits, **truncated), warped.softmax(-1)
    assert torch.equal(ours > 0, theirs > 0)
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_tokens_as_likely_as_the_least_likely_that_stays_all_stay(dtype):
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0, 3.0, 2.0, 0.0]], dtype=dtype)
    first, second = {1, 4}, {1, 2, 3, 4, 5}
    likely = float(logits.double().softmax(-1)[0, 1])
    firsts = ({"top_k": 1}, {"top_p": likely / 2}, {"top_p": likely * 1.9}, {"min_p": 1.0}, {"min_p": 0.9, "top_k": 3})
    for expected, cases in (
        (first, firsts),
        (second, ({"top_k": 3}, {"top_p": likely * 2.1}, {"min_p": 0.9 / math.e})),
        (set(range(7)), ({"top_p": 1.0},)),
    ):
        for truncated in cases:
            assert set(support(logits, **truncated)[0].nonzero().flatten().tolist()) == expected
