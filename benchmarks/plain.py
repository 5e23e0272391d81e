"""PonderLM in the plainest words, as a baseline for speed: stock modules, eager, every logit held.

Nothing of adaponder is used. The recurrence is the one of the PonderLM release: read, take the softmax over the whole
vocabulary, mix the embedding table by it, add, read again.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig


class PlainPonder(nn.Module):
    """``scale`` multiplies the table that is mixed; ``first`` the embeddings of the tokens themselves."""

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
