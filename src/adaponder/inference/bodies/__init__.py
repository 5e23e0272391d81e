"""Backbones as the engine reads them: through their stock layers, or fused."""

from __future__ import annotations

from adaponder.errors import InputError
from adaponder.inference.bodies.base import Body
from adaponder.inference.bodies.llama import LlamaBody
from adaponder.inference.bodies.neox import NeoxBody
from adaponder.inference.bodies.stock import StockBody
from adaponder.modeling import AdaPonderForCausalLM

FUSED = (NeoxBody, LlamaBody)


def body_of(model: AdaPonderForCausalLM, kind: str | None, *, rows: int, positions: int, width: int) -> Body:
    """The body named, ``fused`` or ``stock``; by default a fused one where there is one for this backbone.

    Args:
        model: its backbone.
        kind: the name.
        rows: the most that decode in one pass, those that fill it up included.
        positions: how many positions there are.
        width: slots of a token.
    """
    if kind not in (None, "fused", "stock"):
        raise InputError(f"body={kind!r}: fused or stock")
    reasons = {body.__name__: body.fits(model.wrapped) for body in FUSED}
    for body in FUSED:
        if kind != "stock" and reasons[body.__name__] is None:
            return body(model.wrapped, lanes=rows, apart=width == 1, positions=positions)
    if kind == "fused":
        raise InputError(f"body='fused': {'; '.join(f'{name}: {reason}' for name, reason in reasons.items())}")
    return StockBody(model.wrapped, stream=model.method.needs_stream(model.config.iterations))
