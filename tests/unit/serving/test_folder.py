"""A page for any static host is written only for what the browser computes as the package does; all else is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from adaponder import AdaPonderConfig
from adaponder.checkpoints.shipped import sample_path
from adaponder.commands.page import page
from adaponder.errors import CheckpointError, InputError
from adaponder.serving import folder
from adaponder.serving.served import EXAMPLES, examples_of

BACKBONE = {
    "model_type": "gpt_neox",
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "vocab_size": 32,
}


@pytest.mark.parametrize(
    ("changes", "backbone", "named"),
    [
        ({"method": "mor"}, {}, "method=mor"),
        ({"method": "pause"}, {}, "method=pause"),
        ({"reuse": "none"}, {}, "reuse=none"),
        ({"method": "ponder", "expectation_top_k": 4}, {}, "expectation_top_k=4"),
        ({}, {"hidden_act": "relu"}, "hidden_act=relu"),
        ({}, {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, "rope_type=linear"),
        ({}, {"model_type": "llama"}, "backbone=llama"),
    ],
)
def test_a_model_that_the_browser_cannot_compute_is_refused_by_name(changes, backbone, named):
    config = AdaPonderConfig(backbone_config=BACKBONE | backbone, **changes)
    with pytest.raises(InputError, match=f"CKPT: {named} cannot be computed in a browser, only .*adaponder serve"):
        folder.require_runnable(config, "CKPT")


def bytes_of() -> Tokenizer:
    vocabulary = {letter: number for number, letter in enumerate(pre_tokenizers.ByteLevel.alphabet())}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@pytest.mark.parametrize(
    ("part", "value", "named"),
    [
        ("model", models.Unigram([("a", 0.0)]), "tokenizer=Unigram after ByteLevel"),
        ("model", models.BPE({"a": 0}, [], byte_fallback=True), "byte_fallback"),
        ("pre_tokenizer", pre_tokenizers.Whitespace(), "tokenizer=BPE after Whitespace"),
        ("pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=True), "add_prefix_space"),
        ("pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False), "no regex"),
        ("normalizer", normalizers.Lowercase(), "normalizer=Lowercase"),
        ("post_processor", processors.BertProcessing(("a", 0), ("a", 0)), "post_processor=BertProcessing"),
        ("post_processor", processors.TemplateProcessing("a $0", special_tokens=[("a", 0)]), "tokens around a text"),
        ("decoder", decoders.Metaspace(), "decoder=Metaspace"),
    ],
)
def test_a_tokenizer_of_another_kind_is_refused_by_name(part, value, named):
    tokenizer = bytes_of()
    folder.require_tokenizer(json.loads(tokenizer.to_str()), "CKPT")
    setattr(tokenizer, part, value)
    with pytest.raises(InputError, match=f"CKPT: .*{named}.* in a browser"):
        folder.require_tokenizer(json.loads(tokenizer.to_str()), "CKPT")


def test_the_command_writes_weights_as_they_are_and_refuses_too_many(tmp_path, monkeypatch, capsys):
    out = tmp_path / "page"
    result = page("sample-hops", out=out)
    folders = sample_path("sample-hops"), out / "model"
    source, written = (load(Path(path, "model.safetensors").read_bytes()) for path in folders)
    assert source.keys() == written.keys()
    for name, tensor in written.items():
        assert (tensor.dtype, tensor.tolist()) == (source[name].dtype, source[name].tolist())
    assert result["bytes"]["other"] < 3_000_000
    assert "python -m http.server --directory" in capsys.readouterr().out
    with pytest.raises(InputError, match="is not empty"):
        page("sample-hops", out=out)
    monkeypatch.setattr(folder, "MOST_BYTES", 900_000)
    with pytest.raises(InputError, match="sample-hops: 1 MB of weights; a page takes at most 0"):
        page("sample-hops", out=tmp_path / "other")
    assert not (tmp_path / "other").exists()


DAMAGED = [
    ("{}", "must hold"),
    ('{"examples": []}', "must hold"),
    ('{"examples": [{"name": "a", "texts": [""]}]}', "must hold"),
    ('{"examples": [7]}', "must hold"),
    ('{"about": 7, "examples": [{"name": "a", "texts": ["a"]}]}', "about"),
    ('{"answers": "hop", "examples": [{"name": "a", "texts": ["a"]}]}', "answers='hop'"),
]


@pytest.mark.parametrize(("content", "wrong"), DAMAGED)
def test_damaged_examples_of_a_checkpoint_are_refused(tmp_path, content, wrong):
    (tmp_path / EXAMPLES).write_text(content)
    with pytest.raises(CheckpointError, match=rf"examples\.json:? {wrong}"):
        examples_of(tmp_path)
