"""Computes the cost of a forward of any method (iterations, FLOPs and K/V bytes) from shapes and depths alone.

Each multiply-add of a matrix product counts as 2 FLOPs; norms, softmax, activations, rotary embeddings and policies are
left out. Attention is counted in one of two ways: ``causal`` counts only the (query, key) pairs that the mask allows,
``square`` counts all pairs, as a dense masked kernel computes them and torch's FLOP counter reports them.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, fields
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from adaponder.backbones.shape import Shape, shape_of
from adaponder.errors import InputError
from adaponder.fields import Recurrence
from adaponder.methods import method_class

Attention = Literal["causal", "square"]


class Parameters(NamedTuple):
    """Numbers of parameters: of the stock decoder, and those that the method adds."""

    backbone: int
    added: int

    @property
    def total(self) -> int:
        return self.backbone + self.added


def parameters_of(config: Recurrence, *, shape: Shape | None = None) -> Parameters:
    """Counts the parameters of a model with this config, without building it."""
    added = method_class(config.method).added_parameters(config)
    return Parameters((shape or shape_of(config.backbone_config)).parameters, added)


@dataclass(frozen=True)
class Cost:
    """The cost of a batch, summed over its tokens; costs of several batches, or of prefill and decode, can be added.

    Attributes:
        tokens: number of real tokens, without padding.
        total_depth: sum of the tokens' depths.
        rows: number of rows that the layers computed; above ``total_depth`` if halted tokens are computed again.
        body, attention, head, expectation, gates: FLOPs of the layers' weight matrices, of both attention products
            (scores and weighted values), of the returned logits, of expected embeddings, and of gates or routers.
        kv_bytes: bytes of these tokens' keys and values in the cache.
        vanilla: FLOPs of the stock decoder on the same tokens, with logits and attention counted the same way.
    """

    tokens: int
    total_depth: int
    rows: int
    body: int
    attention: int
    head: int
    expectation: int
    gates: int
    kv_bytes: int
    vanilla: int

    @classmethod
    def nothing(cls) -> Cost:
        """Returns the zero cost, the start of a sum."""
        return cls(*(0 for _ in fields(cls)))

    @property
    def iterations(self) -> float:
        """Returns the mean depth of real tokens; the paper's "3.8x" is a mean depth of 3.8."""
        return self.total_depth / max(1, self.tokens)

    @property
    def flops(self) -> int:
        return self.body + self.attention + self.head + self.expectation + self.gates

    @property
    def ratio(self) -> float:
        """Returns the FLOPs divided by those of the stock decoder on the same tokens."""
        return self.flops / max(1, self.vanilla)

    def __add__(self, other: Cost) -> Cost:
        return Cost(*map(sum, zip(astuple(self), astuple(other), strict=True)))


def cost_of(
    depth: Tensor,
    config: Recurrence,
    *,
    shape: Shape | None = None,
    past: int | Tensor = 0,
    max_iterations: int | None = None,
    logits: int | None = None,
    every_gate: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    attention: Attention = "causal",
) -> Cost:
    """Returns the cost of a forward in which tokens have these depths and halted tokens are skipped.

    Dense execution skips nothing: it costs as much as full depth, also for padding.

    Args:
        depth: the depth of each token, ``[batch, time]``, as a forward returns it; 0 for padding.
        config: the method and its settings.
        shape: the backbone's shape; ``None`` computes it from ``config`` in a fraction of a second.
        past: the depths of tokens already in the ledger, ``[batch, past]``, or their number if all have full depth.
        max_iterations: the forward's maximum depth; ``None``: the config's.
        logits: number of tokens for which logits are computed; ``None``: every real token.
        every_gate: whether gates of halted tokens are evaluated too, as with ``output_gates`` or ``labels``.
        dtype: dtype of the cached keys and values.
        attention: ``causal`` or ``square``, see this module's docstring. Packed documents count as one document.
    """
    iterations = config.iterations if max_iterations is None else max_iterations
    depth, past = _checked(depth, past, config, iterations)
    if attention not in get_args(Attention):
        raise InputError(f"attention={attention!r} must be causal or square")
    shape = shape or shape_of(config.backbone_config)
    method = method_class(config.method)
    reuse = method.reuse_rule(config)
    layout = {"passes": method.passes(iterations), "slots": method.slots_per_token(iterations), "reuse": reuse}
    active = [int((depth > i).sum()) for i in range(iterations)]
    tokens, total_depth = active[0], sum(active)
    with_logits = tokens if logits is None else logits
    rows, attended = _rows_and_attention(depth, past, shape, attention, **layout)
    vanilla_rows, vanilla_attention = _rows_and_attention(depth.clamp(max=1), past.clamp(max=1), shape, attention)
    head = 2 * shape.vocabulary * shape.hidden * with_logits
    # Expected embeddings are computed only for tokens that are active in the next iteration.
    mixed = sum(active[1:]) if method.mixes_vocabulary else 0
    gates = sum(([tokens] * iterations if every_gate else active)[: method.gates_asked(iterations)])
    return Cost(
        tokens=tokens,
        total_depth=total_depth,
        rows=rows,
        body=2 * shape.body * rows,
        attention=attended,
        head=head,
        expectation=mixed * expectation_flops(shape),
        gates=gates * method.gate_flops(config),
        kv_bytes=(iterations * tokens if reuse == "none" else total_depth) * shape.kv * dtype.itemsize,
        vanilla=2 * shape.body * vanilla_rows + vanilla_attention + head,
    )


def per_depth(config: Recurrence, *, context: int = 0, shape: Shape | None = None) -> list[Cost]:
    """Returns the cost of decoding one token at each depth 1 … K, after ``context`` tokens and with a bfloat16 cache.

    For methods that cannot halt, depth n means ``max_iterations=n``.
    """
    shape = shape or shape_of(config.backbone_config)
    halts = method_class(config.method).halts
    costs = []
    for depth in range(1, config.iterations + 1):
        most = None if halts else depth
        costs.append(cost_of(torch.tensor([[depth]]), config, shape=shape, past=context, max_iterations=most))
    return costs


def training_flops(config: Recurrence, *, sequence: int, shape: Shape | None = None) -> float:
    """Returns the FLOPs per token of a training step at full depth, in windows of ``sequence`` tokens.

    Backward counts as two forwards, and the head is counted once per hidden state that the loss scores; recomputation
    is left out.
    """
    depth = torch.full((1, sequence), config.iterations)
    cost = cost_of(depth, config, shape=shape, every_gate=True)
    extra_states = method_class(config.method).states_scored(config.iterations) - 1
    return 3 * (cost.flops + extra_states * cost.head) / sequence


def expectation_flops(shape: Shape) -> int:
    """Returns the FLOPs of one expected embedding: V logits, then the weighted sum of V embeddings.

    ``expectation_top_k`` saves no FLOPs: the other probabilities are set to 0, but multiplied with embeddings as well.
    """
    return 4 * shape.vocabulary * shape.hidden


def _rows_and_attention(
    depth: Tensor, past: Tensor, shape: Shape, attention: str, *, passes: int = 1, slots: int = 1, reuse: str = "state"
) -> tuple[int, int]:
    """Returns (rows computed, FLOPs of attention), summed over ``passes`` passes; each token takes ``slots`` slots.

    ``reuse`` is the method's ``reuse_rule``; the default arguments describe the stock decoder.
    """
    grid = torch.cat([past, depth], dim=1).repeat_interleave(slots, dim=1)
    order = (grid > 0).cumsum(1)
    rows = attended = 0
    for i in range(passes):
        query = grid > (0 if reuse in ("kv", "none") else i)  # these two rules compute halted tokens too
        query[:, : past.shape[1] * slots] = False
        if attention == "square":
            key = torch.ones_like(query)
            pairs = {window: int(query.sum()) * grid.shape[1] for window in set(shape.windows)}
        else:
            key = grid > (i if reuse == "absent" else 0)
            pairs = {window: _pairs(query, key, order, window) for window in set(shape.windows)}
        rows += int(query.sum())
        attended += sum(width * pairs[window] for width, window in zip(shape.attention, shape.windows, strict=True))
        # Multi-head latent attention expands the cached rows in each pass, if the sequence has active tokens.
        attended += shape.expansion * int(key[query.any(1)].sum())
    return rows, 2 * attended


def _pairs(query: Tensor, key: Tensor, order: Tensor, window: int | None) -> int:
    """Returns the number of (query, key) pairs that a causal mask allows, or a sliding-window mask with ``window``.

    ``query`` and ``key`` are masks ``[batch, slots]``; ``order`` is each slot's rank among real tokens, in which
    ``window`` is measured, because padding does not count.
    """
    visible = key.cumsum(1)
    if window is not None:
        # Subtract the keys before the window.
        first = torch.searchsorted(order, order - window, right=True)
        visible = visible - nn.functional.pad(visible, (1, 0)).gather(1, first)
    return int(visible[query].sum())


def _checked(depth: Tensor, past: int | Tensor, config: Recurrence, iterations: int) -> tuple[Tensor, Tensor]:
    """Returns the depths of new and of past tokens, on the CPU; raises on depths that the method does not support."""
    if not 1 <= iterations <= config.iterations:
        raise InputError(
            f"max_iterations={iterations} must be between 1 and {config.iterations}, the model's iterations"
        )
    if depth.ndim != 2 or depth.is_floating_point():
        raise InputError(f"depth is {depth.dtype} {tuple(depth.shape)}, it must be whole numbers [batch, time]")
    depth = depth.detach().cpu().long()
    if isinstance(past, int):
        past = torch.full((depth.shape[0], past), iterations)
    past = past.detach().cpu().long()
    if past.ndim != 2 or past.shape[0] != depth.shape[0]:
        raise InputError(f"past has shape {tuple(past.shape)}, it must be [{depth.shape[0]}, tokens]")
    halts = method_class(config.method).halts
    possible = range(iterations + 1) if halts else (0, iterations)
    impossible = [value for value in torch.cat([past, depth], dim=1).unique().tolist() if value not in possible]
    if impossible:
        times = f"1 to {iterations}" if halts else f"{iterations}"
        raise InputError(
            f"depth={impossible}: with {config.method} a token has depth {times} (0: padding); fewer: max_iterations"
        )
    return depth, past
