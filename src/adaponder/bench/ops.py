"""Times the operations over the vocabulary, plain and ours, as shares of the device's measured rates."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from adaponder.bench.timing import Timing, forget, measure, out_of_memory
from adaponder.ops.linear_cross_entropy import linear_cross_entropy_sum, plain_linear_cross_entropy
from adaponder.ops.vocab_expectation import plain_vocab_expectation, vocab_expectation

EXPECTATION, LOSS = "vocab_expectation", "linear_cross_entropy"
OPERATIONS = (EXPECTATION, LOSS)
PLAIN, OURS, KEPT, TORCH = "plain", "ours", "ours, logits kept", "torch"
# Precision of tensors, as in training; products are computed in the precision of the measurement.
HELD = torch.float32


class Size(NamedTuple):
    tokens: int
    hidden: int
    vocabulary: int

    def __str__(self) -> str:
        return f"{self.tokens:,} tokens, d = {self.hidden:,}, vocabulary {self.vocabulary:,}"


# Batches of the paper's 70M and 410M on a GPU; a CPU gets what it can do in a moment.
ON_GPU = (Size(65536, 512, 50304), Size(16384, 1024, 50304))
ON_CPU = (Size(1024, 128, 4096),)


class Work(NamedTuple):
    """The least work of an operation: FLOPs of its matrix products, bytes of operands and results."""

    flops: int
    bytes: int


@dataclass(frozen=True)
class Case:
    """One implementation of one operation, forward alone or with its backward."""

    op: str
    size: Size
    implementation: str
    backward: bool

    @property
    def name(self) -> str:
        return f"{self.implementation}, {'with backward' if self.backward else 'forward'}"


@dataclass(frozen=True)
class Result:
    """A case's repetitions; without a ``timing``, memory did not suffice for them."""

    case: Case
    timing: Timing | None = None


def work_of(op: str, size: Size, *, backward: bool) -> Work:
    """The roofline's two counts, nothing computed twice or stored in between counted.

    A product of tokens x d with d x vocabulary is 2 n d V FLOPs. The expectation needs two (logits, mixture) and its
    backward four (into probabilities, table, hidden states, head); the loss one, and its backward two. Every operand is
    read once and every result written once, as training holds them, in float32; targets take 8 bytes each.
    """
    n, d, v = size
    rows, matrix = n * d, v * d
    if op == EXPECTATION:
        products = 6 if backward else 2
        elements = 2 * rows + 2 * matrix  # hidden states, head and table in, mixture out
        elements += 2 * rows + 2 * matrix if backward else 0  # d mixture in, d hidden, d head and d table out
        targets = 0
    else:
        products = 3 if backward else 1
        elements = rows + matrix + n  # hidden states and head in, losses out
        elements += rows + matrix + n if backward else 0  # d losses in, d hidden and d head out
        targets = n
    return Work(products * 2 * n * d * v, elements * HELD.itemsize + 8 * targets)


def cases(sizes: Sequence[Size]) -> list[Case]:
    """Every operation at every size: plain, ours, ours with logits kept, torch's own loss where this torch has it."""
    chosen = []
    for op in OPERATIONS:
        ways = [PLAIN, OURS, *([KEPT] if op == EXPECTATION else [TORCH] if torch_has_it() else [])]
        chosen += [
            Case(op, size, way, backward)
            for size in sizes
            for way in ways
            for backward in (False, True)
            if backward or way != KEPT  # forward alone keeps nothing
        ]
    return chosen


def torch_has_it() -> bool:
    return hasattr(nn.functional, "linear_cross_entropy") and hasattr(nn, "LinearCrossEntropyOptions")


def compare(
    chosen: Iterable[Case], *, device: torch.device, dtype: torch.dtype, seed: int, warmup: int, repeats: int
) -> Iterator[Result]:
    """Yields each case's result as soon as it is measured."""
    for case in chosen:
        try:
            result = measure_case(case, device=device, dtype=dtype, seed=seed, warmup=warmup, repeats=repeats)
        except Exception as error:
            if not out_of_memory(error):
                raise
            result = Result(case)
        yield result


def measure_case(
    case: Case, *, device: torch.device, dtype: torch.dtype, seed: int, warmup: int, repeats: int
) -> Result:
    """Times one case; raises torch's own error if memory does not suffice."""
    forget(device)
    step = operation(case, device=device, dtype=dtype, seed=seed)
    return Result(case, measure(step, device, warmup=warmup, repeats=repeats))


def operation(case: Case, *, device: torch.device, dtype: torch.dtype, seed: int) -> Callable[[], Sequence[Tensor]]:
    """A function that computes the case's result, or its gradients, on fixed random operands."""
    generator = torch.Generator(device).manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=HELD)

    n, d, v = case.size
    leaves = [draw(n, d), draw(v, d) * 0.02, *([draw(v, d) * 0.02] if case.op == EXPECTATION else [])]
    for leaf in leaves:
        leaf.requires_grad_(case.backward)
    if case.op == EXPECTATION:
        compute, grad = _expectation(case.implementation), draw(n, d)
    else:
        targets = torch.randint(v, (n,), generator=generator, device=device)
        compute, grad = _loss(case.implementation, targets, dtype), None

    def step() -> Sequence[Tensor]:
        with torch.set_grad_enabled(case.backward):
            with torch.autocast(device.type, dtype, enabled=dtype != HELD):
                out = compute(*leaves)
            return torch.autograd.grad(out, leaves, grad if grad is None else grad.to(out)) if case.backward else (out,)

    return step


def _expectation(implementation: str) -> Callable[..., Tensor]:
    if implementation == PLAIN:
        return plain_vocab_expectation
    return partial(vocab_expectation, keep_logits=implementation == KEPT)


def _loss(implementation: str, targets: Tensor, dtype: torch.dtype) -> Callable[..., Tensor]:
    if implementation == TORCH:
        options = nn.LinearCrossEntropyOptions()
        # Its chunks ignore autocast, so operands are cast here.
        return lambda hidden, weight: nn.functional.linear_cross_entropy(
            hidden.to(dtype), weight.to(dtype), targets, options=options
        )
    if implementation == PLAIN:
        return lambda hidden, weight: plain_linear_cross_entropy(hidden, weight, targets).mean()
    every = torch.ones(targets.shape, device=targets.device)
    return lambda hidden, weight: linear_cross_entropy_sum(hidden, weight, targets, every) / len(targets)


def as_row(result: Result, plain: Result | None, *, matmul_rate: float, copy_rate: float) -> dict[str, Any]:
    """A record's line: the result, relative to the plain one, and as shares of the device's measured rates."""
    case, timing = result.case, result.timing
    work = work_of(case.op, case.size, backward=case.backward)
    row: dict[str, Any] = {
        "op": case.op,
        **case.size._asdict(),
        "implementation": case.implementation,
        "backward": case.backward,
        "fits": timing is not None,
        "flops": work.flops,
        "bytes": work.bytes,
    }
    empty = ("milliseconds", "spread", "peak_bytes", "matmul_share", "copy_share", "times_plain", "memory_of_plain")
    row |= {"seconds": []} | dict.fromkeys(empty)
    if timing is not None:
        row |= {
            "milliseconds": timing.median * 1e3,
            "seconds": timing.seconds,
            "spread": timing.spread,
            "peak_bytes": timing.peak_bytes,
            "matmul_share": work.flops / timing.median / matmul_rate,
            "copy_share": work.bytes / timing.median / copy_rate,
        }
        if plain is not None and plain.timing is not None:
            row["times_plain"] = plain.timing.median / timing.median
            if timing.peak_bytes is not None and plain.timing.peak_bytes is not None:
                row["memory_of_plain"] = timing.peak_bytes / plain.timing.peak_bytes
    return row
