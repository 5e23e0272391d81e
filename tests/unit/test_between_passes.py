"""The small functions between passes, compiled: the same numbers as eager ones, one graph each for all iterations."""

import copy
import shutil

import pytest
import torch
from torch._dynamo.utils import counters

from adaponder.halting import Gate, pondered, read_gate, settled
from support import tiny

ROWS = (2, 5)


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def gate(width, dtype=torch.float64, seed=0):
    torch.manual_seed(seed)
    made = Gate(16, width=width, bias=1.0)
    made.reset_parameters()
    torch.nn.init.normal_(made.out.weight)
    return made.to(dtype)


def results(function, module, given):
    """Value and every gradient."""
    given = [part.detach().clone().requires_grad_(part.is_floating_point()) for part in given]
    value = function(*([] if module is None else [module]), *given)
    weights = list(module.parameters()) if module is not None else []
    wanted = [part for part in [*given, *weights] if part.requires_grad]
    return [value.detach(), *torch.autograd.grad(value, wanted, torch.ones_like(value).cumsum(0))]


ACTIVE = torch.tensor([[True, False, True, True, False], [False, False, False, False, True]])
CASES = {
    "gate": (read_gate, 4, [drawn(*ROWS, 16)]),
    "linear gate": (read_gate, 0, [drawn(*ROWS, 16)]),
    "eq. 9": (pondered, None, [drawn(*ROWS, 16), drawn(*ROWS, 16, seed=1), ACTIVE, drawn(*ROWS, seed=2).sigmoid()]),
    "settled": (settled, None, [ACTIVE, drawn(*ROWS, 16), drawn(*ROWS, 16, seed=1)]),
}


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("case", CASES)
def test_compiled_they_compute_what_they_do_eagerly(case, backend):
    if backend == "inductor" and shutil.which("g++") is None:
        pytest.skip("inductor compiles with g++ on a CPU")
    function, width, given = CASES[case]
    module = None if width is None else gate(width)
    torch._dynamo.reset()
    compiled = results(torch.compile(function, backend=backend, fullgraph=True), module, given)
    for mine, theirs in zip(compiled, results(function, module, given), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-14)


def test_a_gate_compiled_in_half_precision_is_no_worse_than_an_eager_one():
    """Eagerly its last product is rounded to bf16; compiled the sum stays in float32."""
    exact, given = gate(4), [drawn(64, 16)]
    truth = results(read_gate, exact, given)
    low = copy.deepcopy(exact).float()
    errors = []
    for function in (read_gate, torch.compile(read_gate, backend="aot_eager", fullgraph=True)):
        torch._dynamo.reset()
        with torch.autocast("cpu", torch.bfloat16):
            found = results(function, low, [given[0].float()])
        errors.append(
            [float((mine.double() - true).norm() / true.norm()) for mine, true in zip(found, truth, strict=True)]
        )
    eager, compiled = errors
    assert all(mine <= 1.1 * theirs for mine, theirs in zip(compiled, eager, strict=True))
    assert compiled[0] < 1e-2


def test_one_graph_serves_all_gates():
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(read_gate, backend="aot_eager", fullgraph=True)
    for seed in range(3):
        module = gate(4, seed=seed)
        torch.testing.assert_close(compiled(module, drawn(*ROWS, 16)), module(drawn(*ROWS, 16)))
    assert counters["stats"]["unique_graphs"] == 1


def test_they_are_compiled_with_passes_for_dense_runs_only():
    model = tiny(iterations=3).train()
    assert model.wrapped.fused(settled) is settled
    model.compile_passes(backend="eager")
    assert model.wrapped.fused(settled) is not settled
    assert model.wrapped.fused(settled) is model.wrapped.fused(settled)
    assert copy.deepcopy(model).wrapped.fused(settled) is not model.wrapped.fused(settled)
    torch._dynamo.reset()
    counters.clear()
    model.eval()(torch.arange(6)[None], execution="compact")
    between = counters["stats"]["unique_graphs"]
    model(torch.arange(6)[None], execution="dense")
    assert counters["stats"]["unique_graphs"] - between >= 3
