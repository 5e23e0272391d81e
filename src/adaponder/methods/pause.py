"""Pause tokens: each token is followed by K-1 pauses at its own position, and read out at the last of them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from adaponder.config import AdaPonderConfig
from adaponder.execution.runs import Run
from adaponder.execution.tokens import Tokens
from adaponder.methods.base import Ask, Iteration, Method, Trajectory


class Pause(Method):
    """One pass over K times as many slots: depth in width. ``max_iterations=n`` inserts ``n - 1`` pauses."""

    def __init__(self, config: AdaPonderConfig):
        super().__init__(config)
        own = config.pause_token_id is None
        self.vector = nn.Parameter(torch.empty(config.hidden_size)) if own else None

    def forward(self, run: Run, embedded: Tensor, ask: Ask) -> Trajectory:
        width = ask.iterations
        pauses = self._pause(run, embedded).expand(*embedded.shape[:2], width - 1, -1)
        spread = torch.cat([embedded.unsqueeze(2), pauses], dim=2).flatten(1, 2)
        hidden = run.read(self.scaled(spread)).hidden
        last = hidden[:, width - 1 :: width]
        ask.show(Iteration(0, last, None, run.active[:, width - 1 :: width]))
        return Trajectory(last)

    def _pause(self, run: Run, embedded: Tensor) -> Tensor:
        if self.vector is not None:
            return self.vector.to(embedded.dtype)
        return run.backbone.embed(torch.tensor(self.config.pause_token_id, device=embedded.device))

    def reset_parameters(self, std: float) -> None:
        if self.vector is not None:
            nn.init.normal_(self.vector, std=std)

    def arrange(self, tokens: Tokens, iterations: int) -> Tokens:
        return tokens.repeat(iterations)

    # --- facts --------------------------------------------------------------------------------------------------

    @classmethod
    def passes(cls, iterations: int) -> int:
        return 1

    @classmethod
    def slots_per_token(cls, iterations: int) -> int:
        return iterations

    @classmethod
    def own_parameters(cls, config: AdaPonderConfig) -> int:
        return config.hidden_size if config.pause_token_id is None else 0
