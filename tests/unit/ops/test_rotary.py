"""Rotary positions for compiled passes: bit for bit what each family does, and only where that was found."""

import sys

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from adaponder.ops import rotary as op

SHAPE = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 11}


def family_of(name):
    stock = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **SHAPE))
    return stock, sys.modules[type(stock.base_model).__module__]


@pytest.fixture
def restored():
    """Puts a family's own function back."""
    before = {}

    def remember(module):
        own = getattr(module, op.NAME, None)
        before.setdefault(module, getattr(own, "__wrapped__", own))
        setattr(module, op.NAME, before[module])

    yield remember
    for module, own in before.items():
        setattr(module, op.NAME, own)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("name", "width"), [("gpt_neox", 4), ("gpt_neox", 16), ("llama", 16), ("qwen3", 16)])
def test_the_rotation_equals_each_familys_own_bit_for_bit(restored, monkeypatch, name, width, dtype):
    stock, module = family_of(name)
    restored(module)
    own = getattr(module, op.NAME)
    op.use(stock)
    wrapped = getattr(module, op.NAME)
    assert wrapped is not own
    op.use(stock)
    assert getattr(module, op.NAME) is wrapped, "it is wrapped once"
    query, key = (torch.randn(2, 2, 7, 16, dtype=dtype, requires_grad=True) for _ in range(2))
    # Angles are wider than what they turn, as under autocast.
    cos, sin = (torch.randn(2, 7, width, dtype=torch.promote_types(dtype, torch.float32)) for _ in range(2))
    found = []
    for compiling in (False, True):
        monkeypatch.setattr(op, "is_compiling", lambda compiling=compiling: compiling)
        turned = getattr(module, op.NAME)(query, key, cos, sin)
        found.append([*turned, *torch.autograd.grad([x.double().sin().sum() for x in turned], [query, key])])
    for mine, theirs in zip(*found, strict=True):
        assert mine.dtype == theirs.dtype
        assert torch.equal(mine, theirs)


def test_it_is_used_while_compiling_only(restored, monkeypatch):
    stock, module = family_of("gpt_neox")
    restored(module)
    op.use(stock)
    called = []
    monkeypatch.setattr(op, "rotary", lambda *given: called.append(given) or ("turned", "turned"))
    given = [torch.randn(1, 2, 3, 16), torch.randn(1, 2, 3, 16), torch.randn(1, 3, 4), torch.randn(1, 3, 4)]
    getattr(module, op.NAME)(*given)
    assert not called
    monkeypatch.setattr(op, "is_compiling", lambda: True)
    assert getattr(module, op.NAME)(*given) == ("turned", "turned")
    getattr(module, op.NAME)(*given, unsqueeze_dim=1)
    assert len(called) == 1, "what is asked for in another way is left to the family"


def test_a_family_that_turns_otherwise_keeps_its_own(restored):
    stock, module = family_of("llama")
    restored(module)

    def interleaved(query, key, cos, sin):
        def turned(x):
            pairs = x.unflatten(-1, (-1, 2))
            other = torch.stack((-pairs[..., 1], pairs[..., 0]), -1).flatten(-2)
            return x * cos[:, None] + other * sin[:, None]

        return turned(query), turned(key)

    setattr(module, op.NAME, interleaved)
    op.use(stock)
    assert getattr(module, op.NAME) is interleaved


def test_a_known_function_is_found_wherever_tensors_are_made_by_default():
    own = getattr(family_of("llama")[1], op.NAME)
    with torch.device("meta"):
        assert op._same(getattr(own, "__wrapped__", own), 1)
