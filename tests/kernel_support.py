"""Where kernels are tested (compiled on a GPU, else in Triton's interpreter), and the errors that they may have.

The interpreter is right for float32 and float16 and wrong for bf16, which is tested on a GPU alone (``-m gpu``).
It checks no types: ``kernel_compiler.py`` compiles every launch for a GPU.
"""

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from adaponder import AdaPonderForCausalLM

PLACES = [pytest.param("cpu", id="interpreted"), pytest.param("cuda", marks=pytest.mark.gpu, id="gpu")]
# What a version may lose beyond the plain one: a quarter of a rounding, because sums run in another order; in float32,
# in which no GPU runs kernels, two.
SLACK = {torch.float32: 2.0, torch.float16: 0.25, torch.bfloat16: 0.25}
SEEDS = range(0, 40, 10)


def calm(model: AdaPonderForCausalLM) -> AdaPonderForCausalLM:
    """Shrinks weights, because the passes of a random decoder amplify bf16's rounding without bounds."""
    with torch.no_grad():
        for parameter in model.backbone.parameters():
            parameter.mul_(0.3 if parameter.ndim == 2 else 1)
    return model


def precisions(device: str) -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16 if device == "cuda" else torch.float32]


def widest(device: str) -> torch.dtype:
    """Returns the precision of tests that need only one."""
    return torch.bfloat16 if device == "cuda" else torch.float32


def draw(*shape: int, seed: int, dtype: torch.dtype = torch.float64, device: str = "cpu") -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(device, dtype)


def differentiate(function: Callable[..., Tensor], leaves: Sequence[Tensor]) -> list[Tensor]:
    """Returns the result and the gradient of every leaf, for one fixed random cotangent."""
    leaves = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    result = function(*leaves)
    result.backward(draw(*result.shape, seed=9, dtype=result.dtype, device=str(result.device)))
    return [result.detach(), *(leaf.grad for leaf in leaves)]


def error(found: Tensor, truth: Tensor) -> float:
    """Returns the relative error (Frobenius), 0 for an empty result; nothing may be NaN."""
    assert found.shape == truth.shape
    assert found.isfinite().all()
    truth = truth.double().to(found.device)
    return float((found.double() - truth).norm() / truth.norm().clamp_min(1e-30)) if truth.numel() else 0.0


def errors(found: Sequence[Tensor], truth: Sequence[Tensor]) -> list[float]:
    return [error(mine, true) for mine, true in zip(found, truth, strict=True)]


def assert_no_worse(make_case, ours, plain, dtype: torch.dtype) -> None:
    """Judged against float64 truth, draw by draw: the mean ratio of errors is 1.1 at most, or nearer than chance tells.

    A draw whose gradient nearly cancels loses a thousand times what others do, in both versions and as rounding will
    have it on this processor; a mean of errors would be that draw's alone. So ratios are averaged, by their logarithms.
    """
    slack, ratios = SLACK[dtype] * torch.finfo(dtype).eps, []
    for seed in SEEDS:
        leaves = make_case(dtype=dtype, seed=seed)
        truth = differentiate(plain, [leaf.double() for leaf in leaves])
        mine, theirs = (torch.tensor(errors(differentiate(version, leaves), truth)) for version in (ours, plain))
        ratios.append(((mine + slack) / (theirs + slack)).log())
    ratio = torch.stack(ratios)
    chance = 2 * ratio.std(0) / len(ratio) ** 0.5
    assert (ratio.mean(0) <= math.log(1.1) + chance).all(), ratio.exp()


def assert_close(found: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)
