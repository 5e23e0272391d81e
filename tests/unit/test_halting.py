"""Gates start open and say how far; halting compares in float32; the ponder loss averages the lowest gates only."""

import math

import pytest
import torch

import support
from adaponder import AdaPonderError, AdaPonderForCausalLM, Objective, halting
from adaponder.halting import bottom_k_mean, ponder_fraction, ponder_pool, pool_count, stays_active


@pytest.mark.parametrize(
    ("step", "expected"),
    [(0, 0.0), (99, 0.0), (100, 0.0), (101, 0.003), (150, 0.15), (199, 0.297), (200, 0.3), (201, 0.3), (10**9, 0.3)],
)
def test_the_ponder_fraction_is_0_then_a_ramp_then_constant(step, expected):
    assert ponder_fraction(step, start=100, full=200, k_max=0.3) == pytest.approx(expected, rel=1e-12, abs=0)
    assert ponder_fraction(step, start=100, full=100, k_max=0.3) == (0.3 if step >= 100 else 0.0)


def test_a_ponder_ramp_does_not_end_before_it_starts():
    with pytest.raises(AdaPonderError, match=r"ponder_full=99.*ponder_start=100"):
        ponder_fraction(150, start=100, full=99, k_max=0.3)


@pytest.mark.parametrize(
    ("fraction", "size", "count"),
    [
        (0.29, 100, 29),  # 0.29 * 100 is 28.999999999999996
        *((0.299, 100, 29), (0.0, 100, 0), (1.0, 100, 100), (0.3, 3, 0), (0.5, 3, 1), (1.0, 0, 0)),
    ],
)
def test_the_pool_count_is_the_floor_of_the_true_product(fraction, size, count):
    assert pool_count(fraction, size) == count


@pytest.mark.parametrize("shape", [(1,), (10,), (4, 5), (2, 3, 7)])
@pytest.mark.parametrize("fraction", [0.1, 0.29, 0.5, 1.0])
def test_the_bottom_k_mean_equals_that_of_the_sorted_values(shape, fraction):
    values = torch.rand(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    count = math.floor(fraction * values.numel() + 1e-9)
    lowest = sorted(values.flatten().tolist())[:count]
    expected = sum(lowest) / count if count else 0.0
    assert float(bottom_k_mean(values, fraction)) == pytest.approx(expected, rel=1e-14, abs=0)


def test_the_bottom_k_mean_pulls_on_the_chosen_values_only_and_on_as_many_of_equal_ones():
    values = torch.tensor([0.9, 0.1, 0.5, 0.2, 0.7], dtype=torch.float64, requires_grad=True)
    bottom_k_mean(values, 0.4).backward()
    assert values.grad.tolist() == [0.0, 0.5, 0.0, 0.5, 0.0]
    values = torch.full((10,), 0.3, dtype=torch.float64, requires_grad=True)
    bottom_k_mean(values, 0.4).backward()
    assert sorted(values.grad.tolist()) == [0.0] * 6 + [0.25] * 4


@pytest.mark.parametrize(("size", "fraction"), [(100, 0.0), (100, 0.009), (0, 1.0), (3, 0.3)])
def test_the_bottom_k_mean_of_nothing_is_exactly_0_and_pulls_on_nobody(size, fraction):
    values = torch.rand(size, dtype=torch.float64, requires_grad=True)
    mean = bottom_k_mean(values, fraction)
    assert float(mean) == 0.0
    assert (mean.shape, mean.dtype) == ((), torch.float64)
    (values.sum() + mean).backward()
    assert values.grad.tolist() == [1.0] * size


LOGITS = torch.tensor([[[1.0, 2.0], [-1.0, 3.0], [0.5, -2.0]], [[9.0, 9.0], [-3.0, 1.0], [0.1, 0.2]]])
REAL = torch.tensor([[True, True, True], [False, True, True]])
DEPTH = torch.tensor([[3, 1, 2], [0, 1, 3]])  # K = 3, so two gates


@pytest.mark.parametrize("on", ["probabilities", "logits"])
def test_the_ponder_pool_holds_every_gate_of_every_real_token_and_no_padding(on):
    pool = ponder_pool(LOGITS, REAL, DEPTH, on=on, pool="all")
    logits = torch.tensor([1.0, 2.0, -1.0, 3.0, 0.5, -2.0, -3.0, 1.0, 0.1, 0.2])
    expected = torch.sigmoid(logits) if on == "probabilities" else logits
    assert torch.equal(pool.flatten(), expected)


def test_the_closed_ponder_pool_counts_gates_after_the_halt_as_constant_0():
    logits = LOGITS.clone().requires_grad_()
    pool = ponder_pool(logits, REAL, DEPTH, on="probabilities", pool="closed")
    # The gate that closed a token was still open to decide: it counts; only those after it do not.
    open_gates = torch.tensor([[1, 1], [1, 0], [1, 1], [1, 0], [1, 1]], dtype=torch.bool)
    s = torch.sigmoid(LOGITS[REAL])
    assert torch.equal(pool.view(5, 2), torch.where(open_gates, s, 0.0))
    pool.sum().backward()
    assert torch.equal(logits.grad[REAL] != 0, open_gates)
    assert float(logits.grad[~REAL].abs().sum()) == 0.0


def test_the_ponder_term_of_a_model_is_the_bottom_k_mean_of_its_gates():
    model, ids = support.tiny(), support.ids()
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    output = model(ids, attention_mask=mask, labels=ids, objective=Objective(ponder_weight=2.0, ponder_fraction=0.4))
    lowest = output.gates[mask.bool()].flatten().sort().values[: int(0.4 * 15 * 2)]
    assert output.terms["ponder"].item() == pytest.approx(lowest.mean().item(), rel=1e-12)
    total = output.terms["cross_entropy"] + 2.0 * output.terms["ponder"]
    assert output.loss.item() == pytest.approx(total.item(), rel=1e-12)


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
def test_with_each_gate_ranked_by_itself_the_ponder_term_is_the_mean_of_their_bottom_k_means(padded):
    model, ids = support.tiny(ponder_pool="each"), support.ids()
    mask = torch.ones_like(ids)
    mask[0, :3] = 0 if padded else 1
    output = model(ids, attention_mask=mask, labels=ids, objective=Objective(ponder_weight=2.0, ponder_fraction=0.4))
    gates = output.gates[mask.bool()]
    lowest = gates.sort(dim=0).values[: int(0.4 * len(gates))]
    assert output.terms["ponder"].item() == pytest.approx(lowest.mean().item(), rel=1e-12)
    together = gates.flatten().sort().values[: int(0.4 * gates.numel())]
    assert lowest.mean().item() != pytest.approx(together.mean().item(), rel=1e-3)


def test_with_each_gate_ranked_by_itself_one_iteration_has_no_gate_to_rank():
    model, ids = support.tiny(ponder_pool="each", iterations=1), support.ids()
    output = model(ids, labels=ids, objective=Objective(ponder_weight=2.0, ponder_fraction=0.4))
    assert output.loss.item() == output.terms["cross_entropy"].item()


@pytest.mark.parametrize("tau", [1e-4, 0.3, 0.9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_threshold_is_compared_in_float32_whatever_the_precision(dtype, tau):
    at = torch.tensor(tau, dtype=torch.float32)
    below = torch.nextafter(at, torch.tensor(0.0))
    above = torch.nextafter(at, torch.tensor(1.0))
    probability = torch.stack([below, at, above]).to(dtype)
    assert stays_active(probability, tau).tolist() == [False, True, True]


def test_the_threshold_ignores_what_float32_cannot_see():
    # In float64 this is below 0.3; in float32 both are the same number.
    assert bool(stays_active(torch.tensor(0.3 - 1e-12, dtype=torch.float64), 0.3))
    assert not bool(stays_active(torch.tensor(0.3 - 1e-6, dtype=torch.float64), 0.3))


@pytest.mark.parametrize(
    ("dtype", "kept"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
    ids=str,
)
def test_the_gate_probability_is_never_below_float32(dtype, kept):
    logit = torch.tensor([-30.0, -9.25, 0.0, 8.0], dtype=dtype)
    probability = halting.gate_probability(logit)
    assert probability.dtype == kept
    assert torch.equal(probability, torch.sigmoid(logit.to(kept)))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert halting.gate_probability(logit).dtype == kept


def test_the_gate_equals_its_equation():
    gate = halting.Gate(16, width=4, bias=1.0).double()
    hidden = torch.randn(5, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    inner = torch.nn.functional.gelu(hidden @ gate.inner.weight.T + gate.inner.bias)
    assert gate.inner.weight.shape == (64, 16)
    assert torch.allclose(gate(hidden), (inner @ gate.out.weight.T + gate.out.bias)[:, 0], rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("shared", [False, True], ids=["one-each", "shared"])
@pytest.mark.parametrize("width", [0, 4])
def test_the_gates_of_a_new_model_all_start_at_the_sigmoid_of_the_configured_bias(width, shared):
    gate = {"gate_width": width, "gate_bias": 1.5, "shared_gate": shared}
    model = AdaPonderForCausalLM.from_backbone(support.stock(), iterations=3, **gate)
    gates = model(support.ids()).gates
    assert gates.shape == (2, 9, 2)
    assert torch.equal(gates, torch.sigmoid(torch.full_like(gates, 1.5)))
    assert len(model.method.gates) == (1 if shared else 2)


@pytest.mark.parametrize("method", support.HALTING)
@pytest.mark.parametrize(("dtype", "wide"), [(torch.float64, torch.float64), (torch.bfloat16, torch.float32)])
def test_a_policy_is_given_the_signal_in_the_models_precision_and_at_least_float32(method, dtype, wide):
    model, seen = support.tiny(method, dtype=dtype).eval(), []

    def watch(rows):
        seen.append(rows.gate.dtype)
        return torch.ones_like(rows.active)

    model(support.ids(1, 4), policy=watch)
    assert set(seen) == {wide}
