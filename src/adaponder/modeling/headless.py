"""The model without predictions, for ``AutoModel``."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from adaponder.errors import InputError
from adaponder.modeling.model import AdaPonderForCausalLM
from adaponder.modeling.outputs import AdaPonderModelOutput


class AdaPonderModel(AdaPonderForCausalLM):
    """What ``AutoModel`` opens: the same weights; returns hidden states instead of logits.

    The head stays: the recurrence mixes embeddings by the distribution that it predicts.
    """

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        *,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> AdaPonderModelOutput | tuple:
        """Hidden states and depths as :meth:`AdaPonderForCausalLM.forward` computes them, without logits or loss."""
        for name in ("labels", "targets", "objective", "output_logits", "output_iteration_logits"):
            value = kwargs.pop(name, None)
            if value is not None and value is not False:
                raise InputError(f"{name}: AutoModel gives hidden states alone; open it with AutoModelForCausalLM")
        every = kwargs.pop("output_hidden_states", None)
        every = self.config.output_hidden_states if every is None else every
        read: Any = super().forward(
            input_ids, attention_mask, position_ids, **kwargs, output_logits=False, output_hidden_states=True
        )
        output = AdaPonderModelOutput(
            last_hidden_state=read.hidden_states[-1],
            past_key_values=read.past_key_values,
            hidden_states=read.hidden_states if every else None,
            depth=read.depth,
            gates=read.gates,
        )
        return output.to_tuple() if return_dict is False else output

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        raise InputError("generate: AutoModel gives hidden states alone; open it with AutoModelForCausalLM")
