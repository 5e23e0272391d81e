"""What a forward reads and returns beyond ids and logits is exact, and what it cannot honour is refused by name."""

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM

from adaponder import AdaPonderError, AdaPonderForCausalLM, FixedDepth, Objective
from adaponder.execution.tokens import check_ids
from adaponder.modeling import AdaPonderModel
from support import VOCABULARY, ids, stock, tiny

GREEDY = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}


def changed(value: int) -> torch.Tensor:
    tokens = ids()
    tokens[1, 3] = value
    return tokens


WRONG = {
    "too-large": ("input_ids contains 61", {"input_ids": changed(VOCABULARY)}),
    "negative": ("input_ids contains -1,", {"input_ids": changed(-1)}),
    "ignored-label-as-id": ("input_ids contains -100,", {"input_ids": changed(-100)}),
    "floating": ("input_ids is torch.float32", {"input_ids": ids().float()}),
    "empty-batch": ("input_ids", {"input_ids": ids()[:0]}),
    "no-token": ("input_ids", {"input_ids": ids()[:, :0]}),
    "one-axis": ("input_ids", {"input_ids": ids()[0]}),
    "nothing": ("input_ids", {}),
    "both": ("input_ids and inputs_embeds", {"input_ids": ids(), "inputs_embeds": torch.zeros(2, 9, 16)}),
    "embeds-narrow": (r"inputs_embeds .* \[batch, time, 16\]", {"inputs_embeds": torch.zeros(2, 9, 15)}),
    "embeds-whole": ("inputs_embeds is torch.int64", {"inputs_embeds": torch.zeros(2, 9, 16, dtype=torch.long)}),
    "embeds-empty": ("inputs_embeds", {"inputs_embeds": torch.zeros(0, 9, 16)}),
    "labels-large": ("labels contains 61", {"input_ids": ids(), "labels": changed(VOCABULARY)}),
    "labels-negative": ("labels contains -1,", {"input_ids": ids(), "labels": changed(-1)}),
    "targets-large": ("targets contains 99,", {"input_ids": ids(), "targets": changed(99)}),
    "targets-and-labels": ("targets", {"input_ids": ids(), "targets": ids(), "labels": ids()}),
    "mask-two": ("attention_mask", {"input_ids": ids(), "attention_mask": torch.full((2, 9), 2)}),
    "mask-added": (
        "attention_mask",
        {"input_ids": ids(), "attention_mask": torch.zeros(2, 9).masked_fill(ids() > 30, -torch.inf)},
    ),
    "kept-negative": ("logits_to_keep=-2", {"input_ids": ids(), "logits_to_keep": -2}),
    "kept-half": ("logits_to_keep=0.5", {"input_ids": ids(), "logits_to_keep": 0.5}),
    "kept-floating": ("logits_to_keep is torch.float32", {"input_ids": ids(), "logits_to_keep": torch.ones(2)}),
    "iterations-true": ("max_iterations=True", {"input_ids": ids(), "max_iterations": True}),
    "seed-half": ("seed=0.5", {"input_ids": ids(), "seed": 0.5}),
    "attentions": ("output_attentions: attention weights", {"input_ids": ids(), "output_attentions": True}),
    "iterations-many": ("max_iterations=9", {"input_ids": ids(), "max_iterations": 9}),
    "execution": ("execution='sparse'", {"input_ids": ids(), "execution": "sparse"}),
    "execution-cached": ("execution='dense'", {"input_ids": ids(), "execution": "dense", "use_cache": True}),
    "objective": (r"objective=0\.1", {"input_ids": ids(), "labels": ids(), "objective": 0.1}),
    "policy": ("policy", {"input_ids": ids(), "policy": 3}),
    "ids-list": ("input_ids is a list, it must be a tensor", {"input_ids": [[1, 2]]}),
    "policy-class": ("policy=<class", {"input_ids": ids(), "policy": FixedDepth}),
    "misspelled": ("polcy", {"input_ids": ids(), "polcy": FixedDepth(1)}),
}
# Arguments of the same shape as the ids.
for name in ("labels", "targets", "attention_mask", "position_ids", "document_ids"):
    WRONG[f"{name}-short"] = (name, {"input_ids": ids(), name: torch.ones(2, 5, dtype=torch.long)})
    WRONG[f"{name}-list"] = (f"{name} is a list", {"input_ids": ids(), name: ids().tolist()})
    if name != "attention_mask":
        WRONG[f"{name}-floating"] = (f"{name} is torch.float32", {"input_ids": ids(), name: ids().float()})


@pytest.fixture(scope="module")
def model() -> AdaPonderForCausalLM:
    return tiny()


@pytest.mark.parametrize("case", WRONG)
def test_an_invalid_argument_is_refused_in_one_line_that_names_it(model, case):
    message, given = WRONG[case]
    with pytest.raises(AdaPonderError, match=message) as error:
        model(**given)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("case", ["too-large", "floating", "empty-batch", "ids-list"])
def test_generate_checks_its_prompt_before_the_first_token(model, case):
    _, given = WRONG[case]
    with pytest.raises(AdaPonderError, match=r"input_ids|inputs_embeds") as error:
        model.generate(**given, **GREEDY)
    assert "\n" not in str(error.value)


def test_on_another_device_ids_are_not_waited_for():
    """Meta tensors have no values: reading one raises."""
    elsewhere = ids().to("meta")
    check_ids("input_ids", elsewhere, VOCABULARY)
    with pytest.raises(AdaPonderError, match=r"input_ids is torch.float32"):
        check_ids("input_ids", elsewhere.float(), VOCABULARY)


@pytest.mark.parametrize("name", ["ponder_weight", "ponder_fraction", "exit_stage", "exit_entropy_weight", "share"])
@pytest.mark.parametrize("value", [float("nan"), -1.0, "0.1"])
def test_an_objective_of_no_numbers_is_refused_where_it_is_made(name, value):
    with pytest.raises(AdaPonderError, match=rf"objective\.{name}="):
        Objective(**{name: value})


@pytest.mark.parametrize("method", ["adaponder", "mor", "pause"])
@pytest.mark.parametrize("execution", ["dense", "compact"])
def test_a_forward_from_embeddings_equals_one_from_ids(method, execution):
    model = tiny(method)
    embedded = model.get_input_embeddings()(ids())
    mask = torch.tensor([[0, 0] + [1] * 7, [1] * 9])
    asked = {"attention_mask": mask, "labels": ids(), "execution": execution}
    by_ids, by_embeddings = model(ids(), **asked), model(inputs_embeds=embedded, **asked)
    for name in ("logits", "depth", "loss"):
        assert torch.equal(by_ids[name], by_embeddings[name]), name


def test_continuous_batching_of_transformers_is_refused_with_the_call_that_works(model):
    with pytest.raises(AdaPonderError, match=r"generate_batch: .*adaponder\.inference\.Engine"):
        model.generate_batch([[1, 2, 3]], max_new_tokens=2)


def test_generation_from_embeddings_equals_generation_from_ids(model):
    embedded = model.get_input_embeddings()(ids())
    mask = torch.tensor([[0, 0] + [1] * 7, [1] * 9])
    for asked in ({}, {"attention_mask": mask}, {"policy": FixedDepth(2)}):
        expected = model.generate(ids(), **GREEDY, **asked)[:, 9:]
        assert torch.equal(model.generate(inputs_embeds=embedded, **GREEDY, **asked), expected)
        both = model.generate(ids(), inputs_embeds=embedded, **GREEDY, **asked)
        assert torch.equal(both, torch.cat([ids(), expected], 1))
    with pytest.raises(AdaPonderError, match="inputs_embeds"):
        model.generate(ids()[:, 1:], inputs_embeds=embedded, **GREEDY)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    where = tmp_path_factory.mktemp("checkpoint")
    tiny(dtype=torch.float32).save_pretrained(where)
    return where


def test_automodel_gives_the_hidden_states_that_the_head_reads(folder):
    body, model = AutoModel.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    assert type(body) is AdaPonderModel
    assert type(model) is AdaPonderForCausalLM
    output, expected = body(ids()), model(ids(), output_hidden_states=True)
    assert torch.equal(output.last_hidden_state, expected.hidden_states[-1])
    assert torch.equal(output.depth, expected.depth)
    assert output.hidden_states is None
    assert len(body(ids(), output_hidden_states=True).hidden_states) == 3
    assert torch.equal(body(ids(), return_dict=False)[0], output.last_hidden_state)
    assert torch.equal(body(ids(), policy=FixedDepth(1)).last_hidden_state, expected.hidden_states[0])


def test_automodel_refuses_labels_logits_and_generation(folder, tmp_path):
    body = AutoModel.from_pretrained(folder)
    with pytest.raises(AdaPonderError, match=r"labels: .*AutoModelForCausalLM"):
        body(ids(), labels=ids())
    with pytest.raises(AdaPonderError, match=r"generate: .*AutoModelForCausalLM"):
        body.generate(ids(), **GREEDY)
    for name in ("output_logits", "output_iteration_logits"):
        with pytest.raises(AdaPonderError, match=rf"{name}: .*AutoModelForCausalLM"):
            body(ids(), **{name: True})
        assert torch.equal(body(ids(), **{name: False}).last_hidden_state, body(ids()).last_hidden_state)
    body.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(again(ids()).logits, AutoModelForCausalLM.from_pretrained(folder)(ids()).logits)


@pytest.mark.parametrize("name", ["flash_attention_2", "flex_attention", "kernels-community/flash-attn"])
def test_attention_without_dense_masks_is_refused_at_every_entry_point(folder, name):
    message = rf"attn_implementation='{name}'.*use 'sdpa'"
    with pytest.raises(AdaPonderError, match=message):
        AutoModelForCausalLM.from_pretrained(folder, attn_implementation=name)
    with pytest.raises(AdaPonderError, match=message):
        tiny().set_attn_implementation(name)
    flash = stock()
    flash.config._attn_implementation_internal = name
    with pytest.raises(AdaPonderError, match=message):
        AdaPonderForCausalLM.from_backbone(flash, method="adaponder")
    model = tiny()
    model.backbone.config._attn_implementation_internal = name
    with pytest.raises(AdaPonderError, match=message):
        model(ids(), attention_mask=torch.tensor([[0] + [1] * 8, [1] * 9]), execution="dense")
