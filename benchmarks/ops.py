"""Times the operations over the vocabulary, plain, ours and torch's, and compares them with the device's rates."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor, nn

from adaponder.commands.shared import opt
from adaponder.ops.linear_cross_entropy import linear_cross_entropy_sum, plain_linear_cross_entropy
from adaponder.ops.vocab_expectation import plain_vocab_expectation, vocab_expectation
from adaponder.terminal import console
from benchmarks import harness
from benchmarks.cli import tuples
from benchmarks.harness import Common, Precision, Row, Run, number, ratio, speed

EXPECTATION, LOSS = "vocab_expectation", "linear_cross_entropy"
OPERATIONS = (EXPECTATION, LOSS)
PLAIN, OURS, KEPT, TORCH = "plain", "ours", "ours, logits kept", "torch"
# The precision of operands, as in training; products are computed in the precision that is measured.
_OPERANDS = torch.float32
_COLUMNS = {
    "implementation": lambda row: f"{row['implementation']}, {'with backward' if row['backward'] else 'forward'}",
    "ms": speed("milliseconds", ",.3f"),
    "spread": harness.SPREAD,
    "peak GiB": harness.PEAK,
    "x plain": number("times_plain", ".2f"),
    "of matmul": number("matmul_share", ".1%"),
    "of copy": number("copy_share", ".1%"),
}


class Size(NamedTuple):
    """An operation's number of tokens, hidden size and vocabulary size."""

    tokens: int
    hidden: int
    vocabulary: int


# Batches of the paper's 70M and 410M on a GPU; a CPU gets what it computes in a moment.
ON_GPU = (Size(65536, 512, 50304), Size(16384, 1024, 50304))
ON_CPU = (Size(1024, 128, 4096),)


@dataclass(frozen=True)
class OpCase:
    """One implementation of one operation, forward alone or with its backward."""

    op: str
    size: Size
    implementation: str
    backward: bool

    @property
    def name(self) -> str:
        size = " x ".join(map(str, self.size))
        return f"{self.op}: {self.implementation}, {'with backward' if self.backward else 'forward'}, {size}"


def run(
    *,
    size: Annotated[list[str] | None, opt(f"Such as 65536,512,50304{harness.SEVERAL}", "TOKENS,D,VOCABULARY")] = None,
    dtype: Annotated[Precision | None, opt("bfloat16 (default on a GPU) or float32.", "NAME")] = None,
    options: Common,
) -> dict[str, Any]:
    """Time the operations over the vocabulary by themselves, against the device's own matmul and copy.

    [dim]python -m benchmarks ops --device cuda --size 65536,512,50304[/]
    """
    device = options.target
    precision = harness.precision(dtype, device)
    sizes = [Size(*numbers) for numbers in tuples("--size", size, 3, int, "[1, 1099511627776]")]
    sizes = sizes or (ON_GPU if device.type == "cuda" else ON_CPU)
    selected = harness.select(cases(sizes), options.only, always=PLAIN)
    bench = Run(options, "ops", {"sizes": [list(size) for size in sizes], "dtype": precision})
    if not has_torch_loss():
        console.print(f"torch {torch.__version__} has no linear_cross_entropy: no row for it")

    def report(case: OpCase, median: float | None) -> Row:
        flops, moved = work_of(case.op, case.size, backward=case.backward)
        row = {"op": case.op, **case.size._asdict(), "implementation": case.implementation, "backward": case.backward}
        row |= {"variant": case.name, "flops": flops, "bytes": moved, "milliseconds": median and median * 1e3}
        row |= {"matmul_share": ratio(ratio(flops, median), bench.hardware["matmul_flops"])}
        return row | {"copy_share": ratio(ratio(moved, median), bench.hardware["copy_bytes"])}

    prepare = partial(operation, device=device, dtype=getattr(torch, precision), seed=options.seed or 0)
    title = "\n{op}: {tokens:,} tokens, d = {hidden:,}, vocabulary {vocabulary:,}, " + precision
    about: dict[str, Any] = {"title": lambda row: title.format(**row), "columns": _COLUMNS}
    bench.time_all(selected, prepare, report, compare=compare_with_plain, **about)
    return bench.finish()


def cases(sizes: Sequence[Size]) -> list[OpCase]:
    """Returns each operation at each size: plain, ours, and torch's loss if this torch has it."""
    implementations = {EXPECTATION: [PLAIN, OURS, KEPT], LOSS: [PLAIN, OURS, *([TORCH] if has_torch_loss() else [])]}
    return [
        OpCase(op, size, implementation, backward)
        for op, size in itertools.product(OPERATIONS, sizes)
        for implementation, backward in itertools.product(implementations[op], (False, True))
        if backward or implementation != KEPT  # logits are kept only for a backward
    ]


def has_torch_loss() -> bool:
    """Returns whether this version of torch has ``linear_cross_entropy``."""
    return hasattr(nn.functional, "linear_cross_entropy") and hasattr(nn, "LinearCrossEntropyOptions")


def work_of(op: str, size: Size, *, backward: bool) -> tuple[int, int]:
    """Returns the least possible work: FLOPs of matrix products, and bytes of operands and results.

    With n tokens, hidden size d and vocabulary size V, a product takes 2 n d V FLOPs. The expectation has two products
    (logits, mixture), its backward four (for probabilities, table, hidden states, head); the loss has one, its backward
    two. Operands are read once and results written once, in float32 as in training; targets take 8 bytes each.
    """
    n, d, v = size
    if op == EXPECTATION:  # hidden states, head and table in, mixture out; the other way round in backward
        products, elements, targets = (6 if backward else 2), 2 * n * d + 2 * v * d, 0
    else:  # hidden states and head in, losses out; d losses in, d hidden and d head out in backward
        products, elements, targets = (3 if backward else 1), n * d + v * d + n, n
    return products * 2 * n * d * v, (1 + backward) * elements * _OPERANDS.itemsize + 8 * targets


def operation(case: OpCase, *, device: torch.device, dtype: torch.dtype, seed: int) -> Callable[[], Sequence[Tensor]]:
    """Returns a function that computes the case's result, or its gradients, on fixed random operands."""
    generator = torch.Generator(device).manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=_OPERANDS)

    n, d, v = case.size
    leaves, grad = [draw(n, d), draw(v, d) * 0.02], None
    compute: Callable[..., Tensor]
    if case.op == EXPECTATION:
        leaves, grad = [*leaves, draw(v, d) * 0.02], draw(n, d)
        compute = plain_vocab_expectation
        if case.implementation != PLAIN:
            compute = partial(vocab_expectation, keep_logits=case.implementation == KEPT)
    else:
        targets, weights = torch.randint(v, (n,), generator=generator, device=device), torch.ones(n, device=device)
        compute = {
            PLAIN: lambda hidden, weight: plain_linear_cross_entropy(hidden, weight, targets).mean(),
            OURS: lambda hidden, weight: linear_cross_entropy_sum(hidden, weight, targets, weights) / n,
            # torch's version ignores autocast, so operands are cast here.
            TORCH: lambda hidden, weight: nn.functional.linear_cross_entropy(
                hidden.to(dtype), weight.to(dtype), targets, options=nn.LinearCrossEntropyOptions()
            ),
        }[case.implementation]
    for leaf in leaves:
        leaf.requires_grad_(case.backward)

    def step() -> Sequence[Tensor]:
        with torch.set_grad_enabled(case.backward):
            with torch.autocast(device.type, dtype, enabled=dtype != _OPERANDS):
                out = compute(*leaves)
            return torch.autograd.grad(out, leaves, grad if grad is None else grad.to(out)) if case.backward else (out,)

    return step


def compare_with_plain(rows: list[Row]) -> None:
    """Fills in each row's speed and memory relative to the plain version of the same operation and size."""
    same = itemgetter("op", "tokens", "hidden", "vocabulary", "backward")
    plain = {same(row): row for row in rows if row["implementation"] == PLAIN}
    for row in rows:
        base = plain.get(same(row), {})
        row["memory_of_plain"] = ratio(row["peak_bytes"], base.get("peak_bytes"))
        row["times_plain"] = ratio(base.get("milliseconds"), row["milliseconds"])
