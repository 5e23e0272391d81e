"""Backbones as the engine runs them: fused kernels where the architecture allows, else the stock layers."""

from __future__ import annotations

from adaponder.errors import InputError
from adaponder.inference.bodies.base import Body
from adaponder.inference.bodies.llama import LlamaBody
from adaponder.inference.bodies.neox import NeoxBody
from adaponder.inference.bodies.stock import StockBody
from adaponder.modeling import AdaPonderForCausalLM

FUSED = (NeoxBody, LlamaBody)


def build_body(model: AdaPonderForCausalLM, kind: str | None, *, rows: int, positions: int, width: int) -> Body:
    """Builds the body ``kind``, ``fused`` or ``stock``; ``None`` prefers a fused one.

    Args:
        model: the model whose backbone is run.
        kind: the name, or ``None``.
        rows: the largest number of decode rows in one pass, padding included.
        positions: the number of positions.
        width: slots per token.
    """
    reasons = {body.__name__: body.unsupported(model.wrapped) for body in FUSED}
    for body in FUSED:
        if kind != "stock" and reasons[body.__name__] is None:
            return body(model.wrapped, lanes=rows, apart=width == 1, positions=positions)
    if kind == "fused":
        details = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        raise InputError(f"body='fused' does not support this backbone ({details}); use body='stock'")
    return StockBody(model.wrapped, stream=model.method.needs_stream(model.config.iterations))
