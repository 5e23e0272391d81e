"""The small functions between passes, compiled: the same numbers as eager ones, one graph each for all iterations."""

import copy
import shutil

import pytest
import torch

from adaponder.backbones.wrapper import Backbone
from adaponder.halting import Gate, freeze_halted, pondered, read_gate
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
    return [
        value.detach(),
        *torch.autograd.grad(value, wanted, torch.ones_like(value).cumsum(0), materialize_grads=True),
    ]


ACTIVE = torch.tensor([[True, False, True, True, False], [False, False, False, False, True]])
CASES = {
    "gate": (read_gate, 4, [drawn(*ROWS, 16)]),
    "linear gate": (read_gate, 0, [drawn(*ROWS, 16)]),
    "eq. 9": (pondered, None, [drawn(*ROWS, 16), drawn(*ROWS, 16, seed=1), ACTIVE, drawn(*ROWS, seed=2).sigmoid()]),
    "halted tokens": (freeze_halted, None, [ACTIVE, drawn(*ROWS, 16), drawn(*ROWS, 16, seed=1)]),
}


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.compiler)])
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


def test_a_gate_speaks_in_float32_whoever_computes_it_in_half_precision():
    """Dense runs compute it compiled and compact ones do not: neither rounds what it says to bf16."""
    exact, given = gate(4), drawn(64, 16)
    truth = exact(given)
    low = copy.deepcopy(exact).float()
    torch._dynamo.reset()
    for function in (read_gate, torch.compile(read_gate, backend="aot_eager", fullgraph=True)):
        with torch.autocast("cpu", torch.bfloat16):
            found = function(low, given.float())
        assert found.dtype == torch.float32
        assert float((found.double() - truth).detach().norm() / truth.detach().norm()) < 4e-3
        assert not torch.equal(found, found.bfloat16().float()), "not rounded to bf16 in the end"
    assert gate(4, torch.bfloat16)(given.bfloat16()).dtype == torch.float32


def test_they_are_compiled_with_passes_for_dense_runs_only(monkeypatch):
    model = tiny(iterations=3).eval()
    assert model.wrapped.compiled(freeze_halted) is freeze_halted
    model.compile_passes(backend="eager")
    assert model.wrapped.compiled(freeze_halted) is model.wrapped.compiled(freeze_halted) is not freeze_halted
    assert copy.deepcopy(model).wrapped.compiled(freeze_halted) is not model.wrapped.compiled(freeze_halted)
    asked = []
    compiled = Backbone.compiled
    monkeypatch.setattr(Backbone, "compiled", lambda self, function: asked.append(function) or compiled(self, function))
    model(torch.arange(6)[None], execution="compact")
    assert not asked
    model(torch.arange(6)[None], execution="dense")
    assert set(asked) == {read_gate, pondered, freeze_halted}
