"""The meter checked against torch's own flop counter, on this machine: every method, at mixed depths."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from adaponder.config import AdaPonderConfig
from adaponder.methods.cost import cost_of
from adaponder.modeling import AdaPonderForCausalLM
from adaponder.policies import ForcedDepths
from adaponder.registry import method_names

_BACKBONE = {
    "model_type": "gpt_neox",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 256,
    "vocab_size": 512,
    "max_position_embeddings": 256,
}


class FlopCheck(NamedTuple):
    """FLOPs of one forward by the formula and as torch counted them."""

    method: str
    formula: int
    counted: int

    @property
    def ratio(self) -> float:
        return self.formula / self.counted


@torch.no_grad()
def check_flops(method: str) -> FlopCheck:
    """One forward of a small random model over two sequences; where the method can halt, at random depths."""
    generator = torch.Generator().manual_seed(0)
    config = AdaPonderConfig(backbone_config=dict(_BACKBONE), method=method, iterations=4)
    model = AdaPonderForCausalLM(config).eval()
    ids = torch.randint(_BACKBONE["vocab_size"], (2, 48), generator=generator)
    policy = None
    if model.method.halts:
        policy = ForcedDepths(torch.randint(1, config.iterations + 1, ids.shape, generator=generator))
    counter = FlopCounterMode(display=False)
    # The counter knows no CPU attention kernel, so attention runs as plain products: every query with every key.
    with sdpa_kernel(SDPBackend.MATH), counter:
        output = model(ids, output_gates=False, **({} if policy is None else {"policy": policy}))
    formula = cost_of(output.depth, model.config, attention="square").flops
    return FlopCheck(method, formula, counter.get_total_flops())


def check_all() -> list[FlopCheck]:
    return [check_flops(method) for method in method_names()]
