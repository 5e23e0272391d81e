"""Generation is the same function again: cached or not, alone or in a batch, padded or not."""

import pytest
import torch

from adaponder import AdaPonderForCausalLM, LearnedGate, Random
from support import METHODS, ids, stock, tiny

NEW = 7


def options(model, **more):
    policy = {"policy": Random(0.6)} if model.method.halts else {}
    return {"max_new_tokens": NEW, "pad_token_id": 0, "do_sample": False} | policy | more


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("beams", [1, 4])
def test_cached_equals_uncached_on_a_left_padded_batch(method, beams):
    model = tiny(method, "llama")
    prompt, mask = ids(3, 8), torch.ones(3, 8, dtype=torch.long)
    mask[0, :3], mask[2, :6] = 0, 0
    ask = options(model, attention_mask=mask, num_beams=beams)
    assert torch.equal(model.generate(prompt, **ask), model.generate(prompt, **ask, use_cache=False))


@pytest.mark.one_of(5)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("beams", [1, 4])
def test_a_batch_equals_its_singles(method, beams):
    model = tiny(method, "gpt_neox")
    lengths = [8, 5, 2]
    prompts = [ids(1, length, seed=length) for length in lengths]
    padded = torch.cat([torch.nn.functional.pad(p, (8 - p.shape[1], 0)) for p in prompts])
    mask = torch.cat([torch.nn.functional.pad(torch.ones_like(p), (8 - p.shape[1], 0)) for p in prompts])
    more = {"num_beams": beams, "return_dict_in_generate": True}
    together = model.generate(padded, **options(model, attention_mask=mask, **more))
    for row, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        alone = model.generate(prompt, **options(model, attention_mask=torch.ones_like(prompt), **more))
        assert torch.equal(together.sequences[row, 8 - length :], alone.sequences[0])
        if beams == 1:
            assert torch.equal(together.past_key_values.depth[row, 8 - length :], alone.past_key_values.depth[0])


@pytest.mark.one_of(4)
@pytest.mark.parametrize("method", METHODS)
def test_assisted_decoding_equals_greedy(method):
    model, prompt = tiny(method, "gpt_neox"), ids(1, 8)
    ask = options(model, attention_mask=torch.ones_like(prompt))
    greedy = model.generate(prompt, **ask)
    draft = tiny(method, "gpt_neox", seed=5)
    assert torch.equal(model.generate(prompt, **ask, prompt_lookup_num_tokens=3), greedy)
    assert torch.equal(model.generate(prompt, **ask, assistant_model=draft), greedy)
    assert torch.equal(model.generate(prompt, **ask, assistant_model=stock("gpt_neox", seed=4)), greedy)


@pytest.mark.parametrize("method", METHODS)
def test_going_on_from_a_cache_equals_never_having_stopped(method):
    model, prompt = tiny(method, "mistral"), ids(2, 6)

    def generate(ids, **more):
        return model.generate(ids, attention_mask=torch.ones_like(ids), **options(model, **more))

    begun = generate(prompt, max_new_tokens=4, return_dict_in_generate=True)
    rest = generate(begun.sequences, past_key_values=begun.past_key_values, max_new_tokens=NEW - 4)
    assert torch.equal(rest, generate(prompt))


def test_max_iterations_and_policy_reach_every_step():
    model, prompt = tiny("adaponder", iterations=4), ids(2, 6)
    ask = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 5, "pad_token_id": 0}
    shallow = model.generate(prompt, **ask, max_iterations=2, policy=LearnedGate(0.0), return_dict_in_generate=True)
    assert shallow.past_key_values.depth.unique().tolist() == [2]
    plain = AdaPonderForCausalLM.from_backbone(stock(), method="vanilla").generate(prompt, **ask)
    assert torch.equal(model.generate(prompt, **ask, max_iterations=1), plain)
    assert torch.equal(stock().generate(prompt, **ask), plain)
