"""PonderLM: read, add the embedding one expects next, read again; every token the same number of times."""

from __future__ import annotations

from torch import Tensor

from adaponder.backbones.wrapper import Backbone
from adaponder.execution.runs import Run
from adaponder.methods.base import Ask, Iteration, Method, Trajectory
from adaponder.ops.vocab_expectation import vocab_expectation


def expected_embedding(backbone: Backbone, hidden: Tensor, method: Method) -> Tensor:
    """Equals ``softmax(head(h)) @ (scale * table)``: eq. 6 to 8 of AdaPonderLM, the table scaled like the input."""
    weight, bias = backbone.head()
    mixed = vocab_expectation(
        hidden,
        weight,
        backbone.table(),
        bias=bias,
        top_k=method.config.expectation_top_k,
        keep_logits=method.keep_logits,
    )
    return mixed * method.config.table_scale


class Ponder(Method):
    """``E <- E + softmax(head(h)) @ table``, K-1 times; cross-entropy after the last pass only."""

    mixes_vocabulary = True

    def forward(self, run: Run, embedded: Tensor, ask: Ask) -> Trajectory:
        embedding = self.scaled(embedded)
        hidden = run.read(embedding).hidden
        ask.show(Iteration(0, hidden, None, run.active))
        for i in range(1, ask.iterations):
            expected = run.map(lambda h: expected_embedding(run.backbone, h, self), hidden)
            embedding = embedding + expected.to(embedding.dtype)
            hidden = run.read(embedding).hidden
            ask.show(Iteration(i, hidden, None, run.active))
        return Trajectory(hidden)
