"""What each row's own gate says, where rows stand at different iterations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from adaponder.halting import Column, Gate


class StackedGates(NamedTuple):
    """The weights of all gates, one after the other; copies, so that later changes of the gates are not seen.

    Attributes:
        inner: ``[gates, width, d]`` and its bias ``[gates, width]``; none where gates are linear.
        inner_bias: see ``inner``.
        out: ``[gates, width]`` (``d`` where gates are linear), at least float32.
        out_bias: ``[gates]``, at least float32.
    """

    inner: Tensor | None
    inner_bias: Tensor | None
    out: Tensor
    out_bias: Tensor


def stack_gates(gates: Sequence[nn.Module] | nn.ModuleList) -> StackedGates | None:
    """The gates' weights side by side, or ``None`` where one of them is not a plain :class:`adaponder.halting.Gate`."""
    plain = [gate for gate in gates if type(gate) is Gate and type(gate.out) is Column]
    shapes = {gate.out.weight.shape for gate in plain}
    kinds = {type(gate.inner) for gate in plain}
    if len(plain) != len(gates) or len(shapes) != 1 or kinds not in ({nn.Linear}, {type(None)}):
        return None
    maps = [gate.inner for gate in plain if gate.inner is not None]
    wide = torch.promote_types(plain[0].out.weight.dtype, torch.float32)
    with torch.no_grad():
        return StackedGates(
            torch.stack([x.weight for x in maps]) if maps else None,
            torch.stack([x.bias for x in maps]) if maps else None,
            torch.stack([gate.out.weight[0] for gate in plain]).to(wide),
            torch.stack([gate.out.bias[0] for gate in plain]).to(wide),
        )


def stacked_gates(stacked: StackedGates, hidden: Tensor, iteration: Tensor) -> Tensor:
    """Equals ``gate[min(iteration, last)](hidden)`` row by row, for ``hidden [n, d]`` and ``iteration [n]``: ``[n]``.

    All gates are computed of all rows and each row's own is picked.
    """
    inner, inner_bias, out, out_bias = stacked
    if inner is None or inner_bias is None:
        logits = functional.linear(hidden.to(out.dtype), out, out_bias)
    else:
        between = functional.gelu(functional.linear(hidden, inner.flatten(0, 1), inner_bias.flatten()))
        between = between.unflatten(-1, inner.shape[:2]).to(out.dtype)
        logits = (between * out).sum(-1) + out_bias
    return logits.gather(-1, iteration.clamp(max=out.shape[0] - 1)[:, None]).squeeze(-1)


def called_gates(gates: Sequence[nn.Module] | nn.ModuleList, hidden: Tensor, iteration: Tensor) -> Tensor:
    """The same for any modules that map ``[n, d]`` to ``[n]``: each is called with all rows."""
    logits = torch.stack([gate(hidden) for gate in gates], dim=-1)
    return logits.gather(-1, iteration.clamp(max=len(gates) - 1)[:, None]).squeeze(-1)
