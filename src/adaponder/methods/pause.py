"""Pause tokens: K-1 pauses at the same position follow each token, and the last one predicts the next token."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from adaponder.execution.base import Pass, Rows
from adaponder.execution.tokens import Tokens
from adaponder.fields import Recurrence
from adaponder.methods.base import Method, State


class Pause(Method):
    """Runs one pass with K slots per token (token and K-1 pauses) instead of K passes; ``max_iterations`` sets K."""

    def __init__(self, config: Recurrence):
        super().__init__(config)
        learned = config.pause_token_id is None
        self.vector = nn.Parameter(torch.empty(config.hidden_size)) if learned else None

    def start(self, rows: Rows, embedded: Tensor) -> State:
        pauses = self._pause(rows, embedded).expand(*embedded.shape[:2], rows.slots_per_token - 1, -1)
        return State(self.scaled(torch.cat([embedded.unsqueeze(2), pauses], dim=2).flatten(1, 2)))

    def receive(self, rows: Rows, state: State, output: Pass) -> State:
        width = rows.slots_per_token
        return State(state.input, output.hidden[:, width - 1 :: width])

    def _pause(self, rows: Rows, embedded: Tensor) -> Tensor:
        if self.vector is not None:
            return self.vector.to(embedded.dtype)
        pause = cast(int, self.config.pause_token_id)
        token = torch.full((), pause, dtype=torch.long, device=embedded.device)
        return rows.backbone.embed(token)  # created on the device, so that a CUDA graph can capture it

    def reset_parameters(self, std: float) -> None:
        if self.vector is not None:
            nn.init.normal_(self.vector, std=std)

    def arrange(self, tokens: Tokens, iterations: int) -> Tokens:
        return tokens.repeat(iterations)

    @classmethod
    def passes(cls, iterations: int) -> int:
        return 1

    @classmethod
    def slots_per_token(cls, iterations: int) -> int:
        return iterations
