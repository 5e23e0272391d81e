"""What reading costs: iterations, FLOPs and K/V bytes of every method, from shapes and depths alone.

A FLOP count here is 2 per multiply-add of the matrix products of one forward. Norms, softmax, activations and rotary
angles are left out, and so is what a policy computes for itself (the logits that an entropy rule looks at).

Attention has two honest counts. ``causal`` counts the keys that a query may see: what the method needs, what a kernel
that skips masked blocks comes near to, and what the table "True cost of 4x" counts. ``square`` counts every query row
against every key slot: what a dense masked kernel does and what torch's flop counter reports.
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
    """How many parameters the stock decoder has, and how many the method adds to it."""

    backbone: int
    added: int

    @property
    def total(self) -> int:
        return self.backbone + self.added


def parameters_of(config: Recurrence, *, shape: Shape | None = None) -> Parameters:
    """The stock decoder's parameters, and the method's: gates, routers, exit or pause vector, biases included."""
    added = method_class(config.method).own_parameters(config)
    return Parameters((shape or shape_of(config.backbone_config)).parameters, added)


@dataclass(frozen=True)
class Cost:
    """What a batch cost, in sums over its tokens: costs of several batches, or of a prefill and its decode, add up.

    Cut into prefill and decode, a text costs the same, except where each pass unfolds compressed keys anew.

    Attributes:
        tokens: real tokens, padding not counted.
        reads: their depths added up.
        rows: rows that the body computed; more than ``reads`` where halted tokens are computed again.
        body: FLOPs of the layers' matrices.
        attention: FLOPs of queries with keys and of weights with values.
        head: FLOPs of the logits that were asked for.
        expectation: FLOPs of expected embeddings.
        gates: FLOPs of gates, routers and exits.
        kv_bytes: bytes of the keys and values that these tokens leave behind.
        vanilla: FLOPs of the stock decoder on the same tokens, logits and attention count.
    """

    tokens: int
    reads: int
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
        """Zero of everything: what a sum begins with."""
        return cls(*(0 for _ in fields(cls)))

    @property
    def iterations(self) -> float:
        """Mean depth of real tokens: the paper's x."""
        return self.reads / max(1, self.tokens)

    @property
    def flops(self) -> int:
        return self.body + self.attention + self.head + self.expectation + self.gates

    @property
    def ratio(self) -> float:
        """The true x: FLOPs relative to the stock decoder on the same tokens."""
        return self.flops / max(1, self.vanilla)

    def __add__(self, other: Cost) -> Cost:
        return Cost(*(mine + theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)))


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
    """What one forward costs that reads each token as often as ``depth [batch, time]`` says, skipping what it can.

    Dense execution skips nothing: it costs what full depth costs, for padding too.

    Args:
        depth: how often each token is read; 0 for padding. A forward returns it.
        config: the method and its settings.
        shape: of the backbone; read off ``config`` when absent (a fraction of a second: keep it for many batches).
        past: tokens already in the ledger: their depths ``[batch, past]``, or how many there are, read to the full.
            Only mor looks at the depths: there a halted token is out of sight.
        max_iterations: the forward's ``max_iterations``: no gate is asked after the last iteration.
        logits: how many tokens get logits; by default every real one.
        every_gate: gates of halted tokens are evaluated too, as a forward does for ``output_gates`` or ``labels``.
        dtype: of keys and values.
        attention: ``causal`` or ``square``, see the top of this module. Packed documents count as one.
    """
    iterations = config.iterations if max_iterations is None else max_iterations
    depth, past = _checked(depth, past, config, iterations)
    if attention not in get_args(Attention):
        raise InputError(f"attention={attention!r}: causal or square")
    shape = shape or shape_of(config.backbone_config)
    method = method_class(config.method)
    layout = _layout(config, iterations)
    active = [int((depth > i).sum()) for i in range(iterations)]
    tokens, reads = active[0], sum(active)
    with_logits = tokens if logits is None else logits
    rows, attended = _reading(depth, past, shape, layout, attention)
    once = _reading(depth.clamp(max=1), past.clamp(max=1), shape, _Layout(), attention)
    head = 2 * shape.vocabulary * shape.hidden * with_logits
    # The expected embedding is made for the tokens, and only those, that the next iteration reads.
    mixed = sum(active[1:]) if method.mixes_vocabulary else 0
    gates = sum(([tokens] * iterations if every_gate else active)[: method.gates_asked(iterations)])
    return Cost(
        tokens=tokens,
        reads=reads,
        rows=rows,
        body=2 * shape.body * rows,
        attention=attended,
        head=head,
        expectation=mixed * expectation_flops(shape),
        gates=gates * method.gate_flops(config),
        kv_bytes=(iterations * tokens if layout.stores_all else reads) * shape.kv * dtype.itemsize,
        vanilla=2 * shape.body * once.rows + once.attention + head,
    )


def per_depth(
    config: Recurrence,
    *,
    context: int = 0,
    shape: Shape | None = None,
) -> list[Cost]:
    """What decoding one token costs at depth 1 … K, with ``context`` tokens before it, keys and values in bfloat16.

    A method that cannot halt gets depth n from ``max_iterations=n``.
    """
    shape, halts = shape or shape_of(config.backbone_config), method_class(config.method).halts
    return [
        cost_of(
            torch.tensor([[depth]]),
            config,
            shape=shape,
            past=context,
            max_iterations=None if halts else depth,
        )
        for depth in range(1, config.iterations + 1)
    ]


def training_flops(config: Recurrence, *, sequence: int, shape: Shape | None = None) -> float:
    """FLOPs that one token of a training step needs, in windows of ``sequence`` tokens, every one read K times.

    A backward is two forwards. The head counts once for every state that the method's loss scores. What is computed
    again in backward to save memory does not count.
    """
    row = torch.full((1, sequence), config.iterations)
    cost = cost_of(row, config, shape=shape, every_gate=True)
    again = method_class(config.method).states_scored(config.iterations) - 1
    return 3 * (cost.flops + again * cost.head) / sequence


def expectation_flops(shape: Shape) -> int:
    """One expected embedding: logits over V, then a mixture of V embeddings.

    ``expectation_top_k`` changes which of them count, not what is multiplied: the others get probability 0.
    """
    return 4 * shape.vocabulary * shape.hidden


class _Layout(NamedTuple):
    """How a method lays rows out; by default like the stock decoder.

    ``passes`` of the body over ``slots`` per token; in iterations after it halted a token is ``absent``, or is computed
    all the same (``computes_all``), or even leaves rows (``stores_all``).
    """

    passes: int = 1
    slots: int = 1
    absent: bool = False
    computes_all: bool = False
    stores_all: bool = False


def _layout(config: Recurrence, iterations: int) -> _Layout:
    method = method_class(config.method)
    reuse = method.reuse_rule(config)
    return _Layout(
        passes=method.passes(iterations),
        slots=method.slots_per_token(iterations),
        absent=reuse == "absent",
        computes_all=reuse in ("kv", "none"),
        stores_all=reuse == "none",
    )


class _Reading(NamedTuple):
    """All passes together: rows through the body, FLOPs of attention."""

    rows: int
    attention: int


def _reading(depth: Tensor, past: Tensor, shape: Shape, layout: _Layout, attention: Attention) -> _Reading:
    grid = torch.cat([past, depth], dim=1).repeat_interleave(layout.slots, dim=1)
    order = (grid > 0).cumsum(1)
    before = past.shape[1] * layout.slots
    rows = attended = 0
    for i in range(layout.passes):
        query = grid > (0 if layout.computes_all else i)
        query[:, :before] = False
        if attention == "square":
            key = torch.ones_like(query)
            pairs = {window: int(query.sum()) * grid.shape[1] for window in set(shape.windows)}
        else:
            key = grid > (i if layout.absent else 0)
            pairs = {window: _pairs(query, key, order, window) for window in set(shape.windows)}
        rows += int(query.sum())
        attended += sum(width * pairs[window] for width, window in zip(shape.attention, shape.windows, strict=True))
        # Cached rows are unfolded anew in each pass, for every sequence that still has something to read.
        attended += shape.expansion * int(key[query.any(1)].sum())
    return _Reading(rows, 2 * attended)


def _pairs(query: Tensor, key: Tensor, order: Tensor, window: int | None) -> int:
    """How many (query, key) pairs a causal mask lets through.

    All are ``[batch, slots]``; ``order`` is the rank among real tokens, which is what a window counts in.
    """
    visible = key.cumsum(1)
    if window is not None:
        # The keys up to the newest one that has left the window, by rank.
        gone = torch.searchsorted(order, order - window, right=True)
        visible = visible - nn.functional.pad(visible, (1, 0)).gather(1, gone)
    return int(visible[query].sum())


def _checked(depth: Tensor, past: int | Tensor, config: Recurrence, iterations: int) -> tuple[Tensor, Tensor]:
    """The depths of new and of past tokens, on the CPU, after checking that this method can have had them."""
    if not 1 <= iterations <= config.iterations:
        raise InputError(f"max_iterations={iterations}: from 1 to {config.iterations}, the model's iterations")
    if depth.ndim != 2 or depth.is_floating_point():
        raise InputError(f"depth is {depth.dtype} {tuple(depth.shape)}: whole numbers [batch, time] are needed")
    depth = depth.detach().cpu().long()
    if isinstance(past, int):
        past = torch.full((depth.shape[0], past), iterations)
    past = past.detach().cpu().long()
    if past.ndim != 2 or past.shape[0] != depth.shape[0]:
        raise InputError(f"past has shape {tuple(past.shape)}: [{depth.shape[0]}, tokens] is needed")
    halts = method_class(config.method).halts
    possible = range(iterations + 1) if halts else (0, iterations)
    strange = [value for value in torch.cat([past, depth], dim=1).unique().tolist() if value not in possible]
    if strange:
        times = f"1 to {iterations}" if halts else f"{iterations}"
        raise InputError(
            f"depth={strange}: {config.method} reads a token {times} times (0: padding); for fewer, say max_iterations"
        )
    return depth, past
