"""Tiny random models that the tests share: large enough to be wrong in every way, small enough to be exact about."""

import copy
import types

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from adaponder import AdaPonderForCausalLM

VOCABULARY = 61
POSITIONS = 64
METHODS = ("adaponder", "ponder", "loop", "pause", "mor", "ouro", "act", "pondernet")
METHODS += ("anytime", "relay", "reread", "vanilla")
# Their recurrence is that of another method of the list: one family of backbones is enough for them.
ALIKE = ("act", "pondernet", "relay", "reread")
HALTING = ("adaponder", "mor", "ouro", "act", "pondernet", "anytime", "relay", "reread")

SHAPE = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
_SHAPE = SHAPE | {
    "vocab_size": VOCABULARY,
    "max_position_embeddings": POSITIONS,
    # Far from the usual 0.02, so that attention is not uniform and a mistake is not rounded away.
    "initializer_range": 0.4,
    "bos_token_id": None,
    "eos_token_id": None,
}
_GROUPED = _SHAPE | {"num_key_value_heads": 1}
_GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": POSITIONS, "vocab_size": VOCABULARY}
_OPT = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "ffn_dim": 24, "vocab_size": VOCABULARY}

# Sizes of a DeepseekV3Config, which caches compressed keys and values.
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
LATENT |= {"num_key_value_heads": 2, "first_k_dense_replace": 2}
DEEPSEEK_V3 = transformers.DeepseekV3Config(**_SHAPE, **LATENT)
# Norms also after attention and after the MLP, as in Ouro.
SANDWICH = transformers.HyperCLOVAXConfig(**_SHAPE, num_key_value_heads=1, attention_multiplier=0.3)

FAMILIES: dict[str, PreTrainedConfig] = {
    "gpt_neox": transformers.GPTNeoXConfig(**_SHAPE),
    "llama": transformers.LlamaConfig(**_GROUPED),
    "qwen2": transformers.Qwen2Config(**_GROUPED),
    "qwen2-mixed": transformers.Qwen2Config(**_GROUPED, use_sliding_window=True, sliding_window=4, max_window_layers=1),
    "qwen3": transformers.Qwen3Config(**_GROUPED, head_dim=8),
    "mistral": transformers.MistralConfig(**_GROUPED, sliding_window=4),
    "olmo2": transformers.Olmo2Config(**_GROUPED),
    "phi3": transformers.Phi3Config(**_GROUPED, pad_token_id=0),
    "gemma3": transformers.Gemma3TextConfig(
        **_GROUPED, head_dim=8, sliding_window=4, layer_types=["sliding_attention", "full_attention"]
    ),
    "gpt2": transformers.GPT2Config(
        **_GPT2, initializer_range=0.4, bos_token_id=None, eos_token_id=None, embd_pdrop=0, attn_pdrop=0, resid_pdrop=0
    ),
    "opt": transformers.OPTConfig(
        **_OPT,
        max_position_embeddings=POSITIONS,
        word_embed_proj_dim=16,
        init_std=0.4,
        dropout=0.0,
        bos_token_id=None,
        eos_token_id=None,
    ),
}


def stock(family="gpt_neox", *, seed: int = 0, dtype: torch.dtype = torch.float64, **settings) -> PreTrainedModel:
    """Returns a random stock decoder in evaluation mode; in float64 its RMSNorms are float64 too (stock ones round)."""
    config = copy.deepcopy({"deepseek_v3": DEEPSEEK_V3, "hyperclovax": SANDWICH}.get(family) or FAMILIES[family])
    config.update(settings)
    torch.manual_seed(seed)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    finally:
        torch.set_default_dtype(before)
    if dtype == torch.float64:
        widen_norms(model)
    return model.eval()


def wrap(backbone: PreTrainedModel, method: str = "adaponder", *, seed: int = 0, **recurrence) -> AdaPonderForCausalLM:
    """Wraps a decoder with gates (or routers) that disagree about tokens: tau = 0.5 halts about half."""
    recurrence = {"iterations": 3, "tau": 0.5, "exit_threshold": 0.6} | recurrence
    return stir(AdaPonderForCausalLM.from_backbone(backbone, method=method, **recurrence), seed=seed)


def tiny(
    method: str = "adaponder",
    family: str = "gpt_neox",
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    **recurrence,
) -> AdaPonderForCausalLM:
    return wrap(stock(family, seed=seed, dtype=dtype), method, seed=seed, **recurrence)


def stir(model: AdaPonderForCausalLM, *, seed: int = 0) -> AdaPonderForCausalLM:
    """Randomises the method's parameters, so that gates differ from token to token."""
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in model.method.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.7)
    return model


def calm(model: AdaPonderForCausalLM) -> AdaPonderForCausalLM:
    """Scales the gates down: as stirred, many are 1 in float32, and equal gates have no rank."""
    for parameter in model.method.parameters():
        parameter.data *= 0.3
    return model


def ids(batch: int = 2, time: int = 9, *, seed: int = 0) -> Tensor:
    return torch.randint(VOCABULARY, (batch, time), generator=torch.Generator().manual_seed(seed))


def assert_same_gradients(model: nn.Module, found: Tensor, expected: Tensor) -> None:
    """Asserts that both losses have the same gradients; a parameter without one counts as zero."""
    parameters = list(model.parameters())
    gradients = (torch.autograd.grad(loss, parameters, materialize_grads=True) for loss in (found, expected))
    for (name, _), mine, theirs in zip(model.named_parameters(), *gradients, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-8, atol=1e-12, msg=name)


def widen_norms(model: nn.Module) -> None:
    """Makes every RMSNorm compute in the precision it is given, as law 2's tolerance of 1e-12 needs."""

    def forward(self, x: Tensor) -> Tensor:
        eps = getattr(self, "variance_epsilon", getattr(self, "eps", 1e-6))
        weight = 1.0 + self.weight if type(self).__name__.startswith("Gemma") else self.weight
        return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))

    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = types.MethodType(forward, module)
