"""Implements PonderLM with stock Hugging Face modules alone, as the baseline of training speed.

The recurrence is that of the PonderLM release: run the backbone, take the softmax over the whole vocabulary, add the
expected embedding to the input, and run the backbone again. All logits are held in memory.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig


class PlainPonder(nn.Module):
    """PonderLM; ``scale`` multiplies the expected embedding, ``first`` the embeddings of the tokens."""

    def __init__(self, config: PreTrainedConfig, *, iterations: int, scale: float, first: float):
        super().__init__()
        self.stock = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
        self.iterations = iterations
        self.scale, self.first = scale, first

    def hidden(self, ids: Tensor) -> Tensor:
        body, embedding = self.stock.base_model, self.stock.get_input_embeddings()
        x = embedding(ids) * self.first
        for _ in range(self.iterations - 1):
            logits = self.stock.get_output_embeddings()(body(inputs_embeds=x, use_cache=False).last_hidden_state)
            x = x + torch.softmax(logits, dim=-1) @ embedding.weight * self.scale
        return body(inputs_embeds=x, use_cache=False).last_hidden_state

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        logits = self.stock.get_output_embeddings()(self.hidden(ids))
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return nn.functional.cross_entropy(wide.flatten(0, 1), targets.flatten())
