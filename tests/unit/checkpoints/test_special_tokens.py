"""A model ends texts where its tokenizer does, and a batch of prompts works as it comes."""

import json
import shutil
from functools import partial

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from adaponder import AdaPonderForCausalLM
from adaponder.checkpoints.special_tokens import disagreements
from adaponder.commands import doctor
from adaponder.conversion.convert import convert
from adaponder.conversion.open import load
from adaponder.errors import BackboneError, CheckpointError, EvaluationError
from adaponder.evaluation.scoring import score
from adaponder.evaluation.text import Windows, open_text, open_vocabulary
from adaponder.training.run import train
from support import FAMILIES, stock, tiny
from training_support import assert_same_weights, corpus, small, weights
from word_support import small_tokenizer


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    here = tmp_path_factory.mktemp("trained")
    recipe = small(corpus(here), "train.steps=2", "train.ponder_start=1", "train.ponder_full=2")
    return train(recipe, out=here / "run", quiet=True).final


def stock_folder(folder, *, family="gpt_neox", settings=None, **ids):
    """A stock checkpoint with a tokenizer whose end is 0; ``ids`` go to its config and generation config."""
    model = stock(family, dtype=torch.float32)
    for name, value in ids.items():
        setattr(model.config, name, value)
        setattr(model.generation_config, name, value)
    model.save_pretrained(folder)
    small_tokenizer().save_pretrained(folder)
    if settings:
        path = folder / "tokenizer_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    return folder


def test_a_model_trained_from_scratch_agrees_with_its_tokenizer(trained):
    model, words = AutoModelForCausalLM.from_pretrained(trained), AutoTokenizer.from_pretrained(trained)
    for said in (model.config, model.config.backbone_config, model.generation_config, words):
        assert (said.eos_token_id, said.pad_token_id, said.bos_token_id) == (0, 0, 0)
    assert words.model_max_length == model.config.max_position_embeddings
    assert disagreements(trained) == []


def olmo2_from_scratch(folder):
    """What pads in its config, 0, is the data's end, which its own end and beginning are not."""
    return ["model.backbone.model_type=olmo2", "model.backbone.pad_token_id=0"]


def llama_checkpoint(folder, *, end=0, pads=(0, 0)):
    """A stock model that was trained without padding and pads with its end token since."""
    ids = {"pad_token_id": None, "eos_token_id": end, "bos_token_id": None, "vocab_size": 384}
    model = AutoModelForCausalLM.from_config(LlamaConfig(**FAMILIES["llama"].to_dict() | ids))
    model.config.pad_token_id, model.generation_config.pad_token_id = pads
    model.save_pretrained(folder / "stock")
    shutil.copy(folder / "shards" / "tokenizer.json", folder / "stock")
    return [f"model.backbone={folder / 'stock'}"]


# Ends elsewhere; its configs pad with the data's end and with another word.
llama_checkpoint_of_two_minds = partial(llama_checkpoint, end=2, pads=(0, 41))


@pytest.mark.one_of(2)
@pytest.mark.parametrize("begin", [olmo2_from_scratch, llama_checkpoint, llama_checkpoint_of_two_minds])
def test_a_resumed_run_trains_the_embeddings_that_an_unbroken_one_trains(tmp_path, begin):
    short = ("train.steps=4", "train.ponder_start=1", "train.ponder_full=2")
    recipe = small(corpus(tmp_path), *begin(tmp_path), *short, method="loop")
    train(recipe, out=tmp_path / "whole", quiet=True)
    half = tmp_path / "whole" / "checkpoints" / "step-00000002"
    train(recipe, out=tmp_path / "resumed", resume=str(half), quiet=True)
    assert_same_weights(tmp_path / "resumed", tmp_path / "whole")
    end = "backbone.model.embed_tokens.weight"
    before, after = weights(half)[end][0], weights(tmp_path / "whole" / "final")[end][0]
    assert (before != after).all()
    assert before.abs().sum() > 0


def test_a_conversion_keeps_the_stock_models_own_ids_and_can_pad(tmp_path):
    source = stock_folder(tmp_path / "stock", eos_token_id=[0, 5], bos_token_id=3)
    convert(str(source), tmp_path / "ada", iterations=2)
    model, words = (kind.from_pretrained(tmp_path / "ada") for kind in (AutoModelForCausalLM, AutoTokenizer))
    assert (model.config.eos_token_id, model.config.bos_token_id, model.config.pad_token_id) == ([0, 5], 3, None)
    assert (model.generation_config.eos_token_id, model.generation_config.pad_token_id) == ([0, 5], 0)
    assert (words.eos_token_id, words.pad_token_id, words.padding_side, words.model_max_length) == (0, 0, "left", 64)
    batch = words(["ab", "abc de"], padding=True, return_tensors="pt")
    assert model.generate(**batch, max_new_tokens=2, do_sample=False).shape == (2, 8)
    assert model.config.backbone_config.pad_token_id is None


@pytest.mark.parametrize(
    ("ids", "settings", "ends", "pads"),
    [
        ({"eos_token_id": 2}, {}, [0, 2], 0),
        ({"eos_token_id": [2, 3], "pad_token_id": 4}, {}, [0, 2, 3], 4),
        ({"eos_token_id": 0, "pad_token_id": 4}, {"pad_token": "b"}, 0, 2),
        ({"eos_token_id": None}, {"model_max_length": 4096}, 0, 0),
    ],
)
def test_a_stock_model_at_odds_with_its_tokenizer_is_used_as_it_is_and_converted_in_agreement(
    tmp_path, capsys, ids, settings, ends, pads
):
    source = stock_folder(tmp_path / "stock", settings=settings, **ids)
    model, _ = load(str(source))
    assert model.config.eos_token_id == ids["eos_token_id"]
    at_odds = bool(disagreements(source))
    assert ("special tokens" in doctor.check_checkpoint(str(source))["problems"]) == at_odds
    done = convert(str(source), tmp_path / "ada", iterations=2)
    assert done.remarks
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "ada")
    assert (model.config.eos_token_id, model.generation_config.eos_token_id) == (ends, ends)
    assert model.generation_config.pad_token_id == AutoTokenizer.from_pretrained(tmp_path / "ada").pad_token_id == pads
    assert not doctor.check_checkpoint(str(tmp_path / "ada"))["problems"]


def test_doctor_tells_of_a_tokenizer_with_ids_that_the_model_lacks(tmp_path):
    folder = stock_folder(tmp_path)
    tokenizer = small_tokenizer()
    tokenizer.add_tokens([f"word{number}" for number in range(60)])
    tokenizer.save_pretrained(folder)
    problems = doctor.check_checkpoint(str(folder))["problems"]
    assert problems["tokenizer"] == "the tokenizer has ids up to 87, but the model's vocabulary ends at 60"


def test_a_disagreement_is_an_error_at_load_and_sealing_lets_the_tokenizer_decide(trained, tmp_path):
    folder = shutil.copytree(trained, tmp_path / "old")
    for name, part in {"config.json": "backbone_config", "generation_config.json": None}.items():
        content = json.loads((folder / name).read_text())
        (content[part] if part else content)["eos_token_id"] = 2
        (folder / name).write_text(json.dumps(content))
    (folder / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"eos_token_id=2, the tokenizer's end is 0.*doctor .* --seal"):
        AutoModelForCausalLM.from_pretrained(folder)
    changes = doctor.check_checkpoint(str(folder), seal=True)["changes"]
    assert "config.json: eos_token_id 2 → 0" in changes
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert (model.config.eos_token_id, model.generation_config.eos_token_id) == (0, 0)


def test_a_model_is_not_saved_beside_a_tokenizer_that_ends_elsewhere(tmp_path):
    small_tokenizer().save_pretrained(tmp_path)
    model = tiny(dtype=torch.float32)
    model.generation_config.eos_token_id = 7
    with pytest.raises(CheckpointError, match="eos_token_id=7"):
        model.save_pretrained(tmp_path)
    assert not (tmp_path / "config.json").exists()
    model.generation_config.eos_token_id = [7, 0]
    model.save_pretrained(tmp_path)


def test_folders_without_tokenizer_or_generation_config_load(tmp_path):
    model = tiny(dtype=torch.float32)
    model.config.eos_token_id = 2
    model.save_pretrained(tmp_path)
    assert AdaPonderForCausalLM.from_pretrained(tmp_path).config.backbone_config.eos_token_id == 2
    for name in ("generation_config.json", "manifest.json"):
        (tmp_path / name).unlink()
    small_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="eos_token_id=2"):
        AdaPonderForCausalLM.from_pretrained(tmp_path)


def test_weights_that_are_not_numbers_are_named_when_wrapping_too():
    spoiled = stock(dtype=torch.float32)
    spoiled.gpt_neox.layers[1].mlp.dense_h_to_4h.weight.data[0, 0] = float("nan")
    with pytest.raises(BackboneError, match=r"NaN: gpt_neox\.layers\.1\.mlp\.dense_h_to_4h\.weight"):
        AdaPonderForCausalLM.from_backbone(spoiled)
    overflowing = stock(dtype=torch.float32)
    overflowing.gpt_neox.layers[1].mlp.dense_h_to_4h.weight.data.fill_(3e38)
    with pytest.raises(BackboneError, match="overflows in float32"):
        AdaPonderForCausalLM.from_backbone(overflowing)


def test_a_model_that_came_to_nan_generates_no_zeros_and_scores_nothing(trained, tmp_path):
    model, words = AutoModelForCausalLM.from_pretrained(trained), AutoTokenizer.from_pretrained(trained)
    model.get_output_embeddings().weight.data[5, 0] = float("nan")
    for how in ({"do_sample": False}, {"do_sample": True}, {"num_beams": 2, "do_sample": False}):
        with pytest.raises(EvaluationError, match="after 2 tokens the model's logits are NaN"):
            model.generate(**words("the cat", return_tensors="pt"), max_new_tokens=3, **how)
    (tmp_path / "text.txt").write_text("the cat sat on a mat")
    text = open_text(str(tmp_path / "text.txt"), open_vocabulary(str(trained)), whose="it")
    with pytest.raises(EvaluationError, match="prediction 0 is not finite"):
        score(model, text, Windows(16))
