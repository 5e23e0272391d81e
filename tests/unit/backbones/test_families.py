"""What is known of single decoder families: where their final norm is, and what cannot be done with them."""

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from adaponder import AdaPonderForCausalLM
from adaponder.backbones import wrapper
from adaponder.errors import AdaPonderError
from support import VOCABULARY, ids

_SHAPE = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
_OTHER_NAMES = {"vocab_size": VOCABULARY, "d_model": 16, "n_layers": 2, "n_heads": 2, "max_seq_len": 32}
_LOCAL = {"num_layers": 2, "num_heads": 2, "attention_types": [[["global", "local"], 1]], "window_size": 4}


def decoder(family: str, attention: str = "eager", **settings) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **settings)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).double().eval()


@pytest.mark.parametrize(
    ("family", "norm", "settings"),
    [
        ("mpt", "transformer.norm_f", _OTHER_NAMES),
        ("biogpt", "biogpt.layer_norm", _SHAPE | {"intermediate_size": 24, "layerdrop": 0.0}),
        ("opt", None, _SHAPE | {"ffn_dim": 24, "word_embed_proj_dim": 16, "do_layer_norm_before": False}),
    ],
)
def test_a_loop_feeds_the_stream_of_families_that_call_their_final_norm_otherwise(family, norm, settings):
    base = decoder(family, **settings)
    model = AdaPonderForCausalLM.from_backbone(base, method="loop", iterations=2)
    streams = []
    if norm is not None:
        base.get_submodule(norm).register_forward_pre_hook(lambda module, args: streams.append(args[0]))
    with torch.no_grad():
        first = base.base_model(inputs_embeds=base.get_input_embeddings()(ids())).last_hidden_state
        second = base.base_model(inputs_embeds=streams[0] if streams else first).last_hidden_state
        torch.testing.assert_close(model(ids()).logits, base.get_output_embeddings()(second), rtol=0, atol=1e-10)


def test_a_final_norm_that_is_not_known_by_its_name_is_refused(monkeypatch):
    monkeypatch.setattr(wrapper, "_FINAL_NORMS", ("norm",))
    with pytest.raises(AdaPonderError, match="mpt cannot be a backbone: the final norm"):
        AdaPonderForCausalLM.from_backbone(decoder("mpt", **_OTHER_NAMES), method="loop")


def test_a_replaced_forward_of_the_final_norm_is_still_there_after_a_pass():
    base = decoder("mpt", **_OTHER_NAMES)
    norm = base.transformer.norm_f
    doubled = norm.forward = lambda x: 2 * nn.LayerNorm.forward(norm, x)
    model = AdaPonderForCausalLM.from_backbone(base, method="loop", iterations=2)
    model(ids())
    assert norm.forward is doubled


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("bloom", _SHAPE | {"n_layer": 2, "n_head": 2}),
        ("falcon", _SHAPE | {"alibi": True}),
        ("gpt_neo", {"vocab_size": VOCABULARY, "hidden_size": 16} | _LOCAL),
        ("gpt_neox_japanese", _SHAPE),
    ],
)
def test_families_that_take_no_mask_are_refused_with_padding_or_a_policy(family, settings):
    base = decoder(family, **settings)
    tokens = ids(2, 9)
    plain = AdaPonderForCausalLM.from_backbone(base, method="vanilla")
    with torch.no_grad():
        assert torch.allclose(plain(tokens).logits, base(tokens).logits, atol=1e-10)
        with pytest.raises(AdaPonderError, match="whole"):
            plain(tokens, attention_mask=torch.tensor([[0] + [1] * 8, [1] * 9]))
    with pytest.raises(AdaPonderError, match=f"{family} cannot be a backbone of adaponder"):
        AdaPonderForCausalLM.from_backbone(base, method="adaponder", iterations=2)


def test_doge_is_refused_where_its_masks_show_the_future():
    settings = _SHAPE | {"intermediate_size": 24}
    with pytest.raises(AdaPonderError, match=r"doge cannot be a backbone: its masks .* attn_implementation='eager'"):
        AdaPonderForCausalLM.from_backbone(decoder("doge", "sdpa", **settings), method="vanilla")
    model = AdaPonderForCausalLM.from_backbone(decoder("doge", **settings), method="ponder", iterations=2)
    earlier, later = model(ids()).logits, model(ids().index_fill(1, torch.tensor([8]), 0)).logits
    torch.testing.assert_close(later[:, :-1], earlier[:, :-1], rtol=0, atol=1e-10)
