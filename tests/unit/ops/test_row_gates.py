"""Each row gets the gate of its own iteration."""

import pytest
import torch
from torch import Tensor, nn

from adaponder.halting import Gate
from adaponder.inference.tick import RowGates, stack_gates
from adaponder.ops.row_gates import torch as plain
from adaponder.ops.row_gates import triton as kernels
from kernel_support import PLACES, draw, error, widest

pytestmark = pytest.mark.usefixtures("poisoned")
ITERATION = torch.tensor([0, 2, 1, 1, 5])


def gates_of(width: int, dtype: torch.dtype, count: int = 3) -> nn.ModuleList:
    torch.manual_seed(0)
    gates = nn.ModuleList(Gate(20, width=width, bias=0.5) for _ in range(count))
    for parameter in gates.parameters():
        nn.init.normal_(parameter)
    return gates.to(dtype)


def one_by_one(gates: nn.ModuleList, values: Tensor) -> Tensor:
    asked = [gates[min(int(i), len(gates) - 1)](row[None])[0] for i, row in zip(ITERATION, values, strict=True)]
    return torch.stack(asked).detach()


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("width", [0, 2])
def test_each_row_gets_the_gate_of_its_iteration(width, count):
    gates, values = gates_of(width, torch.float64, count), draw(5, 20, seed=1)
    row_gates = RowGates(gates)
    assert row_gates.stacked is not None
    logits = row_gates(values[:, None], ITERATION[:, None]).detach()
    assert logits.shape == (5, 1)
    assert torch.allclose(logits[:, 0], one_by_one(gates, values), atol=1e-13, rtol=0)


class _Strange(Gate):
    pass


def test_other_modules_are_called():
    torch.manual_seed(0)
    gates = nn.ModuleList([_Strange(20, width=1, bias=0.0), Gate(20, width=1, bias=0.0)]).double()
    gates[1].inner = nn.Sequential(gates[1].inner, nn.Tanh())
    assert stack_gates(gates) is None
    assert stack_gates(nn.ModuleList([gates[1]])) is None
    assert stack_gates(nn.ModuleList([gates_of(0, torch.float64)[0], gates_of(1, torch.float64)[0]])) is None
    values = draw(5, 20, seed=1)
    assert torch.allclose(RowGates(gates)(values, ITERATION), one_by_one(gates, values), atol=1e-13)


@pytest.mark.parametrize("few", [8, 2], ids=["few", "many"])
@pytest.mark.parametrize("device", PLACES)
def test_the_kernel_equals_the_plain_version(device, few, monkeypatch):
    monkeypatch.setattr(kernels, "FEW", few)
    dtype = widest(device)
    floor = {torch.float32: 1e-6, torch.bfloat16: 5e-3}[dtype]
    gates = gates_of(2, dtype).to(device)
    stacked = stack_gates(gates)
    values, iteration = draw(5, 20, seed=1, dtype=dtype, device=device), ITERATION.to(device)
    truth = one_by_one(gates.double().cpu(), values.double().cpu())
    logits = kernels.stacked_gates(stacked, values, iteration)
    assert logits.dtype == torch.float32
    assert error(logits, truth) <= floor
    counter = kernels.counter_on(values.device)
    for _ in range(2):  # the counter serves the next call as well
        assert torch.equal(logits, kernels.stacked_gates(stacked, values, iteration, counter=counter))
    assert error(plain.stacked_gates(stacked, values, iteration), truth) <= floor
