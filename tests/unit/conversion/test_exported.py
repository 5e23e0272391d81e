"""The exported file computes what the package computes."""

import copy
from collections.abc import Iterator
from functools import cache

import pytest
import torch
from accelerate import cpu_offload
from peft import LoraConfig, get_peft_model

from adaponder import AdaPonderForCausalLM, Objective
from adaponder.conversion import export as exporting
from adaponder.conversion.exported import modeling_adaponder
from adaponder.conversion.exported.configuration_adaponder import AdaPonderConfig
from support import FAMILIES, ids, tiny, widen_norms

CASES = {
    "gpt_neox": {"embedding_scale": 1.5},
    "mistral": {"family": "mistral", "embedding_scale": 1.5},  # its window is shorter than the text
    "qwen3": {"family": "qwen3"},
    "ponder": {"method": "ponder", "family": "qwen2-mixed", "embedding_scale": "sqrt(d)", "initial_multiplier": 2.0},
    "other gates": {"family": "llama", "shared_gate": True, "gate_width": 0, "expectation_top_k": 7},
}
TEXT = ids(3, 12)
MASK = torch.ones_like(TEXT)
MASK[0, :4], MASK[2, 10:] = 0, 0


@cache
def package(case: str) -> AdaPonderForCausalLM:
    return tiny(**{"iterations": 4} | CASES[case])


def twin_of(model: AdaPonderForCausalLM):
    settings = {key: value for key, value in model.config.to_dict().items() if key != "model_type"}
    torch.set_default_dtype(torch.float64)
    try:
        twin = modeling_adaponder.AdaPonderForCausalLM(AdaPonderConfig(**settings)).eval()
    finally:
        torch.set_default_dtype(torch.float32)
    twin.load_state_dict(model.state_dict())
    widen_norms(twin)
    return twin


@pytest.fixture
def twin():
    return twin_of(package("gpt_neox"))


@torch.no_grad()
def answers(model) -> Iterator[tuple[str, torch.Tensor]]:
    """Results of a padded batch in every way in which both models can be called."""
    real, prompts = MASK.bool(), {"inputs": TEXT[:2, :7], "attention_mask": MASK[:2, :7], "pad_token_id": 0}
    whole = model(TEXT, attention_mask=MASK, labels=TEXT)
    yield from {"logits": whole.logits[real], "depth": whole.depth, "loss": whole.loss}.items()
    first = model(TEXT[:, :7], attention_mask=MASK[:, :7], use_cache=True)
    rest = model(TEXT[:, 7:], attention_mask=MASK, past_key_values=first.past_key_values)
    yield "logits in pieces", torch.cat([first.logits, rest.logits], 1)[real]
    yield "depths in pieces", torch.cat([first.depth, rest.depth], 1)
    states = model(TEXT, attention_mask=MASK, output_hidden_states=True).hidden_states
    yield "hidden states", torch.stack(states)[:, real]
    yield "loss without targets", model(TEXT, labels=torch.full_like(TEXT, -100)).loss
    limited = model(TEXT, max_iterations=2)
    yield from {"limited logits": limited.logits, "limited depth": limited.depth}.items()
    greedy = model.generate(**prompts, max_new_tokens=5, do_sample=False, return_dict_in_generate=True)
    yield from {"greedy": greedy.sequences, "greedy depth": greedy.past_key_values.depth}.items()
    for name, how in {"beams": {"num_beams": 3}, "uncached": {"use_cache": False}, "sampled": {"top_k": 20}}.items():
        torch.manual_seed(5)
        yield name, model.generate(**prompts, max_new_tokens=5, do_sample=name == "sampled", **how)


def first_difference(model, twin) -> str | None:
    pairs = zip(answers(twin), answers(model), strict=True)
    return next((name for (name, actual), (_, right) in pairs if not close(actual, right)), None)


def close(actual: torch.Tensor, right: torch.Tensor) -> bool:
    return actual.shape == right.shape and torch.allclose(actual, right, rtol=0, atol=1e-12)


@pytest.mark.parametrize("case", CASES)
def test_it_computes_what_the_package_computes(case):
    model, twin = package(case), twin_of(package(case))
    assert first_difference(model, twin) is None
    rows = []
    twin.backbone.base_model.register_forward_pre_hook(
        lambda module, args, kwargs: rows.append(kwargs["inputs_embeds"].shape[:2].numel()), with_kwargs=True
    )
    cached = twin(TEXT, attention_mask=MASK, use_cache=True)
    assert sum(rows) == cached.depth.sum(), "halted tokens are not computed"
    mine = model(TEXT, attention_mask=MASK, labels=TEXT, objective=Objective(), execution="dense")
    theirs = twin(TEXT, attention_mask=MASK, labels=TEXT)
    if case != "ponder":
        assert len(theirs.depth.unique()) > 3, "tokens halt at different depths"
        asked = torch.arange(theirs.gates.shape[-1]) < theirs.depth[..., None]
        assert close(theirs.gates, torch.where(asked, mine.gates, 0.0))
    gradients = []
    for output, parameters in ((mine, model.parameters()), (theirs, twin.parameters())):
        gradients.append(torch.autograd.grad(output.loss, list(parameters), materialize_grads=True))
    twin.train().gradient_checkpointing_enable()
    loss = twin(TEXT, attention_mask=MASK, labels=TEXT).loss
    gradients.append(torch.autograd.grad(loss, list(twin.parameters()), materialize_grads=True))
    for found in gradients[1:]:
        torch.testing.assert_close(found, gradients[0], rtol=1e-9, atol=1e-12)


def test_every_family_that_can_be_exported_is_held_against_the_package():
    families = {FAMILIES[settings.get("family", "gpt_neox")].model_type for settings in CASES.values()}
    assert families == set(exporting.FAMILIES)


@torch.no_grad()
def test_a_cache_cropped_to_nothing_begins_anew_with_any_batch(twin):
    for remove in (-4, -99):
        cache = twin(TEXT[:1, :4], use_cache=True).past_key_values
        cache.crop(remove)
        assert cache.get_seq_length() == 0
        assert cache.rows == {}
        output = twin(TEXT, past_key_values=cache, use_cache=True)
        torch.testing.assert_close(output.logits, twin(TEXT, use_cache=True).logits)


@torch.no_grad()
def test_what_is_cropped_of_a_cache_was_never_there_and_only_so_many_tokens_can_be(twin):
    cache = twin(TEXT[:, :9], use_cache=True).past_key_values
    cache.crop(0)
    cache.crop(-4)
    with pytest.raises(ValueError, match="negative"):
        cache.crop(2)
    assert cache.get_seq_length() == 5
    output = twin(TEXT[:, 5:], past_key_values=cache)
    torch.testing.assert_close(output.logits, twin(TEXT).logits[:, 5:])


@torch.no_grad()
def test_a_first_piece_of_padding_alone_changes_nothing(twin):
    text = ids(2, 9)
    mask = (torch.arange(9) > 3).long().expand(2, -1)
    cache = twin(text[:, :3], attention_mask=mask[:, :3], use_cache=True).past_key_values
    output = twin(text[:, 3:], attention_mask=mask, past_key_values=cache)
    torch.testing.assert_close(output.logits[:, 1:], twin(text[:, 4:]).logits)


@torch.no_grad()
@pytest.mark.parametrize("modules", ["all-linear", ["embed_in"], ["embed_out", "lm_head"]])
def test_merged_adapters_on_any_module_compute_what_they_did_before(twin, modules):
    torch.manual_seed(0)
    plain = twin(TEXT).logits
    adapted = get_peft_model(twin, LoraConfig(r=4, target_modules=modules, init_lora_weights=False)).eval()
    expected = adapted(TEXT)
    assert (expected.logits - plain).abs().max() > 1e-3
    merged = adapted.merge_and_unload()(TEXT)
    torch.testing.assert_close(merged.logits, expected.logits)
    torch.testing.assert_close(merged.gates, expected.gates)


@torch.no_grad()
def test_offloaded_weights_compute_what_they_did_before(twin):
    expected = twin(TEXT).logits
    cpu_offload(twin, execution_device=torch.device("cpu"))
    assert twin.get_input_embeddings().weight.device.type == "meta"
    torch.testing.assert_close(twin(TEXT).logits, expected)


@torch.no_grad()
def test_too_long_a_text_and_no_prompt_are_answered_alike(twin):
    model = copy.deepcopy(package("gpt_neox"))
    for each in (model, twin):
        with pytest.raises(ValueError, match="position 64, the backbone's positions end at 63"):
            each(ids(1, 65))
        with pytest.raises(ValueError, match="position 64"):
            each(ids(1, 3), position_ids=torch.tensor([[62, 63, 64]]))
        padded = torch.cat([torch.zeros(1, 6), torch.ones(1, 60)], 1).long()
        assert each(ids(1, 66), attention_mask=padded).logits.isfinite().all(), "padding takes no position"
        with pytest.raises(ValueError, match="bos_token_id"):
            each.generate(max_new_tokens=2)
        each.generation_config.bos_token_id = 5
    texts = [each.generate(max_new_tokens=4, do_sample=False, pad_token_id=0) for each in (model, twin)]
    assert torch.equal(*texts)
    assert texts[0].shape == (1, 5)
    assert texts[0][0, 0] == 5


@torch.no_grad()
def test_auto_model_returns_hidden_states_and_no_prediction(twin):
    body = modeling_adaponder.AdaPonderModel(twin.config).double().eval()
    body.load_state_dict(twin.state_dict())
    widen_norms(body)
    output, expected = body(TEXT, output_hidden_states=True), twin(TEXT)
    assert torch.equal(output.last_hidden_state, expected.last_hidden_state)
    assert torch.equal(output.hidden_states[-1], body(TEXT, return_dict=False)[0])
    for call in (lambda: body(TEXT, labels=TEXT), lambda: body.generate(TEXT)):
        with pytest.raises(ValueError, match="AutoModelForCausalLM"):
            call()


def test_what_it_cannot_read_or_draft_with_is_refused_by_name(twin):
    text = ids(1, 12)
    for inputs in ({}, {"input_ids": text, "inputs_embeds": twin.get_input_embeddings()(text)}):
        with pytest.raises(ValueError, match="input_ids, inputs_embeds: give one of them"):
            twin(**inputs)
    with pytest.raises(ValueError, match="assistant_early_exit"):
        twin.generate(text, max_new_tokens=2, assistant_early_exit=1)
