"""PonderLM: adds the expected next embedding to a token's input after each pass; every token has depth K."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from adaponder.execution.base import Pass, Rows
from adaponder.methods.base import Method, State


class Ponder(Method):
    """``E <- E + softmax(head(h)) @ table`` between K passes; cross-entropy after the last pass only."""

    mixes_vocabulary = True
    exported = True
    browser_update = "mixed"

    def receive(self, rows: Rows, state: State, output: Pass) -> State:
        return State(state.input, output.hidden)

    def advance(self, rows: Rows, state: State) -> State:
        embedding, hidden = state.input, state.hidden
        expected = self.expected_embedding(rows, hidden)
        return State(embedding + expected.to(embedding.dtype), hidden)

    def expected_embedding(self, rows: Rows, hidden: Tensor) -> Tensor:
        """Returns the expected embedding under each active row's next-token distribution (eq. 6 to 8)."""
        expectation = partial(
            rows.backbone.expected_embedding,
            scale=self.config.table_scale,
            top_k=self.config.expectation_top_k,
            keep_logits=self.keep_logits,
        )
        return rows.map(expectation, hidden)
