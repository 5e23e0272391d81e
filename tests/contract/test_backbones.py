"""What a backbone must offer: every listed family passes, what cannot be supported is refused with the reason."""

from functools import partial

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    CohereConfig,
    DeepseekV3Config,
    Gemma2Config,
    GraniteConfig,
    NemotronConfig,
    OPTConfig,
    Phi3Config,
    Qwen3NextConfig,
    StableLmConfig,
    T5Config,
)

from adaponder import AdaPonderForCausalLM, Random
from adaponder.errors import BackboneError
from laws import assert_close, assert_one_function, make_case
from support import (
    ALIKE,
    FAMILIES,
    LATENT,
    METHODS,
    VOCABULARY,
    assert_same_gradients,
    ids,
    stir,
    stock,
    tiny,
    widen_norms,
)

SHAPE = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": VOCABULARY}
SHAPE |= {"num_key_value_heads": 1, "intermediate_size": 24, "bos_token_id": None, "eos_token_id": None}
OPT = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "ffn_dim": 24, "vocab_size": VOCABULARY}
ROPE = {"rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
LONGROPE = {"rope_type": "longrope", "original_max_position_embeddings": 8} | ROPE
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
LINEAR |= {"num_experts": 2, "num_experts_per_tok": 1, "layer_types": ["linear_attention", "full_attention"]}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_runs_as_one_function(family):
    model = tiny("adaponder", family, iterations=3)
    assert_one_function(model, make_case(3, 12, 3, "ragged", "both", 1))
    assert_one_function(
        model, make_case(2, 12, 3, "ragged", "none", 2), policy=model.method.default_policy(training=False)
    )


@pytest.mark.one_of(3)
@pytest.mark.parametrize("method", [method for method in METHODS if method not in ALIKE])
@pytest.mark.parametrize("family", ["gemma3", "qwen2-mixed", "gpt2", "opt"])
def test_windows_ties_and_learned_positions_suit_every_method(family, method):
    model = tiny(method, family, iterations=3)
    assert_one_function(model, make_case(2, 12, 3, "ragged", "left", 3))


def test_keys_that_are_cached_compressed_are_one_function_too():
    """A pass then returns rows only for sequences with active tokens."""
    config = DeepseekV3Config(**SHAPE | LATENT)
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()
    widen_norms(base)
    model = stir(AdaPonderForCausalLM.from_backbone(base, iterations=4, tau=0.5))
    assert model.wrapped.unfolds
    case = make_case(3, 10, 4, "ragged", "both", 1)
    case.depths[0] = 1
    assert_one_function(model, case)
    documents = torch.tensor([[0] * 4 + [1] * 6, [0] * 7 + [1] * 3, [0] * 10])
    dense, compact = (
        model(case.ids, document_ids=documents, policy=case.policy, execution=way) for way in ("dense", "compact")
    )
    assert_close(compact.logits, dense.logits, "packed documents")


@pytest.mark.parametrize("family", FAMILIES)
def test_wrapping_leaves_the_stock_model_as_it_was(family):
    base, prompt = stock(family), ids(2, 9)
    before = base(prompt).logits
    state = {name: value.clone() for name, value in base.state_dict().items()}
    attention = base.config._attn_implementation
    model = AdaPonderForCausalLM.from_backbone(base, iterations=3)
    model(prompt, policy=Random(0.5))
    torch.testing.assert_close(model.wrapped.table()[prompt], model.wrapped.embed(prompt), rtol=0, atol=0)
    # It answers to another name where it was torch's own, with the same results.
    assert base.config._attn_implementation == ("adaponder" if attention == "sdpa" else attention)
    assert torch.equal(base(prompt).logits, before)
    assert all(torch.equal(value, state[name]) for name, value in base.state_dict().items())


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (Gemma2Config(**SHAPE, head_dim=8), "final_logit_softcapping"),
        (Phi3Config(**SHAPE, pad_token_id=0, max_position_embeddings=32, rope_parameters=LONGROPE), "longrope"),
        (CohereConfig(**SHAPE, logit_scale=0.5, pad_token_id=0), "logit_scale"),
        (GraniteConfig(**SHAPE, logits_scaling=2.0), "logits_scaling"),
        (OPTConfig(**OPT, word_embed_proj_dim=8), "word_embed_proj_dim"),
        (OPTConfig(**OPT, word_embed_proj_dim=16, layerdrop=0.1), "layerdrop"),
        (Qwen3NextConfig(**SHAPE, **LINEAR, head_dim=8), "linear-attention"),
        (T5Config(d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, vocab_size=61), "encoder-decoder"),
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_what_cannot_be_a_backbone_is_refused_with_the_reason(config, reason):
    kind = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    with pytest.raises(BackboneError, match=reason):
        AdaPonderForCausalLM.from_backbone(kind.from_config(config))


@pytest.mark.parametrize(
    ("module", "dtype"),
    [("embed_in", torch.float64)]
    + [("lm_head", dtype) for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)],
    ids=str,
)
def test_a_changed_embedding_or_head_is_found_by_numbers(module, dtype):
    base = stock(dtype=dtype)
    changed = base.lm_head if module == "lm_head" else base.gpt_neox.embed_in
    original = changed.forward
    changed.forward = lambda given: 1.5 * original(given)
    with pytest.raises(BackboneError, match="head" if module == "lm_head" else "embedding"):
        AdaPonderForCausalLM.from_backbone(base)


def replace_attention(model: AdaPonderForCausalLM, replacement) -> None:
    attention = model.backbone.gpt_neox.layers[1].attention
    attention.forward = partial(replacement, attention.forward)


@pytest.mark.parametrize("execution", ["dense", "compact"])
def test_a_layer_that_does_not_ask_the_cache_is_counted(execution):
    model = tiny("adaponder")
    replace_attention(model, lambda original, *args, **kwargs: original(*args, **kwargs | {"layer_past": None}))
    with pytest.raises(BackboneError, match=r"\[1\].*\[0\]"):
        model(ids(), execution=execution)


@pytest.mark.parametrize("asked", [{"execution": "dense"}, {"execution": "compact"}, {"use_cache": True}], ids=str)
def test_a_layer_that_asks_the_cache_twice_is_counted(asked):
    model = tiny("adaponder")
    replace_attention(model, lambda original, *args, **kwargs: [original(*args, **kwargs) for _ in range(2)][1])
    with pytest.raises(BackboneError, match=r"\[1\].*\[2\]"):
        model(ids(), **asked)


def test_the_backbones_own_checkpointing_is_refused_because_it_drops_the_cache():
    for family in ("gpt_neox", "gemma3", "gpt2", "opt"):
        model = tiny("adaponder", family).train()
        model.backbone.gradient_checkpointing_enable()
        with pytest.raises(BackboneError, match="cache"):
            model(ids(), labels=ids())


def test_reentrant_checkpointing_is_refused():
    with pytest.raises(BackboneError, match="use_reentrant"):
        tiny().gradient_checkpointing_enable({"use_reentrant": True})


@pytest.mark.one_of(8)
@pytest.mark.parametrize(
    ("method", "family"), [(m, f) for m in METHODS for f in FAMILIES if m not in ALIKE or f == "gpt_neox"]
)
def test_gradient_checkpointing_works_for_every_family_and_method(family, method):
    model = tiny(method, family).train()
    expected = model(ids(), labels=ids()).loss
    model.gradient_checkpointing_enable()
    assert_same_gradients(model, model(ids(), labels=ids()).loss, expected)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("config", [StableLmConfig(**SHAPE), NemotronConfig(**SHAPE)], ids=["stablelm", "nemotron"])
def test_a_decoder_that_drops_keyword_arguments_gets_no_packed_rows(config, batch):
    """Packed rows would attend to each other, and at batch 1 no error would show it."""
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()
    model = stir(AdaPonderForCausalLM.from_backbone(base, iterations=3, tau=0.5))
    assert not model.wrapped.packs()
    dense, compact = (model(ids(batch, 20), policy=Random(0.5), execution=way) for way in ("dense", "compact"))
    # Their stock norms round to float32.
    assert torch.allclose(dense.logits, compact.logits, rtol=0, atol=1e-5)
