"""Every kernel equals its reference: odd shapes, several blocks per row, every gradient, every precision it runs in.

Without a GPU the kernels run in Triton's interpreter, which is right for float32 and float16 and wrong for bf16: bf16
is tested on a GPU (``pytest -m gpu``), where all of this file runs again.
"""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="no Triton on this platform")

from adaponder.ops import compact_attention as attention_op
from adaponder.ops import linear_cross_entropy as loss_op
from adaponder.ops import rows as row_kernels
from adaponder.ops import vocab_expectation as expectation_op
from adaponder.ops.compact_attention import PackedRows
from adaponder.ops.compact_attention import triton as attention_kernel
from adaponder.ops.linear_cross_entropy import triton as loss_kernels
from adaponder.ops.masks import Places
from adaponder.ops.vocab_expectation import triton as expectation_kernels
from poison import poisoned  # noqa: F401

pytestmark = pytest.mark.usefixtures("poisoned")

# (tokens, d, vocabulary, e): less than a block, exactly one, one and a bit, several.
SHAPES = [(1, 1, 1, 1), (7, 5, 32, 3), (13, 16, 33, 16), (5, 8, 131, 8), (0, 5, 11, 3)]
GPU = pytest.param("cuda", marks=pytest.mark.gpu, id="gpu")
PLACES = [pytest.param("cpu", id="interpreted"), GPU]


@pytest.fixture(autouse=True)
def _small_blocks(request, monkeypatch):
    """PackedRows of several blocks at sizes an interpreter can walk."""
    if "large" not in request.keywords:
        monkeypatch.setattr(row_kernels, "BLOCK", 32)
        monkeypatch.setattr(attention_kernel, "BLOCKS", {128: (16, 16, 2)})


@pytest.fixture(autouse=True)
def _where_it_can_run(request):
    place = request.node.callspec.params.get("device", "cpu") if hasattr(request.node, "callspec") else "cpu"
    for_gpu = request.node.get_closest_marker("gpu") is not None
    if place == "cpu" and not for_gpu and torch.cuda.is_available():
        pytest.skip("kernels are compiled for the GPU in this process, not interpreted")


def draw(*shape: int, seed: int, dtype: torch.dtype, device: str) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)


def expectation_case(shape, *, dtype, device, bias=True, sharpness=1.0, seed=0) -> list[Tensor]:
    tokens, d, vocabulary, e = shape
    make = {"dtype": dtype, "device": device}
    leaves = [draw(tokens, d, seed=seed, **make) * sharpness, draw(vocabulary, d, seed=seed + 1, **make)]
    leaves += [draw(vocabulary, e, seed=seed + 2, **make)]
    return leaves + ([draw(vocabulary, seed=seed + 3, **make)] if bias else [])


def loss_case(shape, *, dtype, device, bias=True, sharpness=1.0, seed=0) -> list[Tensor]:
    hidden, weight, _, *rest = expectation_case(
        shape, dtype=dtype, device=device, bias=bias, sharpness=sharpness, seed=seed
    )
    return [hidden, weight, *rest]


def targets_for(tokens: int, vocabulary: int, device: str) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    targets = torch.randint(vocabulary, (tokens,), generator=generator)
    targets[::3] = -100
    return targets.to(device)


def differentiate(function, leaves: list[Tensor]) -> list[Tensor]:
    """The result and the gradient of every leaf, for one fixed random cotangent."""
    leaves = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    result = function(*leaves)
    cotangent = draw(*result.shape, seed=9, dtype=result.dtype, device=str(result.device))
    result.backward(cotangent)
    return [result.detach(), *(leaf.grad for leaf in leaves)]


def run_expectation(op, chunk: int | None = None):
    options = {} if chunk is None else {"chunk": chunk}
    return lambda hidden, weight, table, bias=None: op(hidden, weight, table, bias=bias, **options)


def run_loss(op, targets: Tensor, chunk: int | None = None):
    options = {} if chunk is None else {"chunk": chunk}
    return lambda hidden, weight, bias=None: op(hidden, weight, targets, bias=bias, **options)


def run_sum(op, targets: Tensor, token_weights: Tensor, chunk: int | None = None):
    options = {} if chunk is None else {"chunk": chunk}
    return lambda hidden, weight, bias=None: op(hidden, weight, targets, token_weights, bias=bias, **options)


def plain_sum(hidden: Tensor, weight: Tensor, targets: Tensor, token_weights: Tensor, *, bias: Tensor | None) -> Tensor:
    losses = loss_op.plain_linear_cross_entropy(hidden, weight, targets, bias=bias)
    return (losses * token_weights).sum()


def weights_for(tokens: int, device: str) -> Tensor:
    weights = draw(tokens, seed=6, dtype=torch.float32, device=device).abs()
    weights[1::4] = 0
    return weights


def lost(found: list[Tensor], truth: list[Tensor]) -> list[float]:
    """Relative errors (Frobenius); an empty result has lost nothing, and nothing may be NaN."""
    assert all(value.isfinite().all() for value in found)
    return [
        float((mine.double() - true).norm() / true.norm().clamp_min(1e-30)) if true.numel() else 0.0
        for mine, true in zip(found, truth, strict=True)
    ]


# What a kernel may lose beyond the plain version: a quarter of a rounding, because sums run in another order; in
# float32, in which no GPU runs them, two.
SLACK = {torch.float32: 2.0, torch.float16: 0.25, torch.bfloat16: 0.25}
SEEDS = range(0, 40, 10)


def assert_no_worse(make_case, ours, plain, dtype: torch.dtype) -> None:
    """Judged against float64 truth, draw by draw: the mean ratio of errors is 1.1 at most, or nearer than chance tells.

    A draw whose gradient nearly cancels loses a thousand times what others do, in both versions and as rounding will
    have it on this processor; a mean of errors would be that draw's alone. So ratios are averaged, by their logarithms.
    """
    slack, ratios = SLACK[dtype] * torch.finfo(dtype).eps, []
    for seed in SEEDS:
        case = make_case(dtype=dtype, seed=seed)
        truth = differentiate(plain, [leaf.double() for leaf in case])
        mine, theirs = (torch.tensor(lost(differentiate(version, case), truth)) for version in (ours, plain))
        ratios.append(((mine + slack) / (theirs + slack)).log())
    ratio = torch.stack(ratios)
    chance = 2 * ratio.std(0) / len(ratio) ** 0.5
    assert (ratio.mean(0) <= math.log(1.1) + chance).all(), ratio.exp()


def precisions(device: str) -> list[torch.dtype]:
    # The interpreter computes bf16 wrongly, and no cast is added to please it. A GPU runs kernels in half precision.
    return [torch.float16, torch.bfloat16 if device == "cuda" else torch.float32]


@pytest.mark.one_of(3)
@pytest.mark.parametrize("sharpness", [0.1, 10.0])
@pytest.mark.parametrize(("bias", "chunk"), [(True, 3), (False, None)], ids=["bias", "no-bias"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("device", PLACES)
def test_the_expectation_is_no_worse_than_the_plain_one(device, shape, chunk, bias, sharpness):
    make = partial(expectation_case, shape, device=device, bias=bias, sharpness=sharpness)
    ours = run_expectation(expectation_kernels.vocab_expectation, chunk)
    for dtype in precisions(device):
        assert_no_worse(make, ours, run_expectation(expectation_op.plain_vocab_expectation), dtype)


@pytest.mark.one_of(3)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("device", PLACES)
def test_kept_logits_change_no_bit_and_serve_a_second_backward(device, shape):
    op = expectation_kernels.vocab_expectation
    for dtype in precisions(device):
        case = expectation_case(shape, dtype=dtype, device=device)
        plain = differentiate(run_expectation(op, 3), case)
        kept = differentiate(run_expectation(partial(op, keep_logits=True), 3), case)
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(kept, plain, strict=True))
        leaves = [leaf.requires_grad_() for leaf in case]
        total = run_expectation(partial(op, keep_logits=True), 3)(*leaves).float().square().sum()
        first, second = torch.autograd.grad(total, leaves, retain_graph=True), torch.autograd.grad(total, leaves)
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(first, second, strict=True))


@pytest.mark.one_of(3)
@pytest.mark.parametrize("sharpness", [0.1, 10.0])
@pytest.mark.parametrize(("bias", "chunk"), [(True, 3), (False, None)], ids=["bias", "no-bias"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("device", PLACES)
def test_the_loss_is_no_worse_than_the_plain_one(device, shape, chunk, bias, sharpness):
    targets = targets_for(shape[0], shape[2], device)
    make = partial(loss_case, shape, device=device, bias=bias, sharpness=sharpness)
    ours = run_loss(loss_kernels.linear_cross_entropy, targets, chunk)
    for dtype in precisions(device):
        assert_no_worse(make, ours, run_loss(loss_op.plain_linear_cross_entropy, targets), dtype)


@pytest.mark.one_of(3)
@pytest.mark.parametrize("sharpness", [0.1, 10.0])
@pytest.mark.parametrize(("bias", "chunk"), [(True, 3), (False, None)], ids=["bias", "no-bias"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("device", PLACES)
def test_the_sum_of_losses_is_no_worse_than_the_plain_one(device, shape, chunk, bias, sharpness):
    data = targets_for(shape[0], shape[2], device), weights_for(shape[0], device)
    make = partial(loss_case, shape, device=device, bias=bias, sharpness=sharpness)
    ours = run_sum(loss_kernels.linear_cross_entropy_sum, *data, chunk)
    for dtype in precisions(device):
        assert_no_worse(make, ours, run_sum(plain_sum, *data), dtype)


@pytest.mark.parametrize("device", PLACES)
def test_one_kernel_writes_what_two_would(device):
    logits = draw(50, 131, seed=1, dtype=torch.float16, device=device)
    targets, weights = targets_for(50, 131, device), weights_for(50, device)
    targets[1], targets[2] = -1, 131  # not there: NaN, as for the losses
    apart = loss_kernels.losses(logits, targets), loss_kernels.slopes_(logits.clone(), targets, weights)
    together = loss_kernels.losses_and_slopes_(logits.clone(), targets, weights)
    assert apart[0].isnan().sum() == 2
    torch.testing.assert_close(together, apart, equal_nan=True)


@pytest.mark.parametrize("device", PLACES)
def test_huge_logits_neither_overflow_nor_vanish(device):
    case = expectation_case((7, 5, 131, 3), dtype=torch.float32, device=device, sharpness=1e4)
    ours, *gradients = differentiate(run_expectation(expectation_kernels.vocab_expectation, 3), case)
    likeliest = (case[0].double() @ case[1].double().t() + case[3].double()).argmax(-1)
    assert torch.allclose(ours, case[2][likeliest], atol=1e-5)
    assert all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize("device", PLACES)
def test_what_is_ignored_costs_nothing_and_teaches_nothing(device):
    case = loss_case((7, 5, 131, 3), dtype=torch.float32, device=device)
    nobody = torch.full((7,), -100, device=device)
    for ours in (
        run_loss(loss_kernels.linear_cross_entropy, nobody, 3),
        run_sum(loss_kernels.linear_cross_entropy_sum, nobody, torch.ones(7, device=device), 3),
    ):
        for value in differentiate(ours, case):
            assert not value.any()


@pytest.mark.parametrize("device", PLACES)
def test_an_expanded_gradient_is_read_as_what_it_says(device):
    hidden, weight, bias = loss_case((7, 5, 131, 3), dtype=torch.float32, device=device)
    targets = targets_for(7, 131, device)
    ours, plain = [], []
    for op, found in ((loss_kernels.linear_cross_entropy, ours), (loss_op.plain_linear_cross_entropy, plain)):
        leaf = hidden.clone().requires_grad_()
        op(leaf, weight, targets, bias=bias).sum().backward()  # the gradient of a sum has stride 0
        found.append(leaf.grad)
    assert torch.allclose(ours[0], plain[0], atol=1e-5)


def test_the_kernels_mix_the_whole_vocabulary_only():
    hidden, weight, table, _ = expectation_case((7, 5, 33, 3), dtype=torch.float32, device="cpu")
    with pytest.raises(ValueError, match="top_k=2"):
        expectation_kernels.vocab_expectation(hidden, weight, table, top_k=2)


def scattered(active: Tensor, *, holes: bool, device: str) -> PackedRows:
    """PackedRows at the active slots of each sequence; with holes, some keys are absent."""
    sequences, slots = active.shape
    place = active.flatten().nonzero().squeeze(1).to(device)
    slot = torch.arange(slots, device=device).expand(sequences, -1)
    present = None
    if holes:
        present = torch.rand(sequences, slots, generator=torch.Generator().manual_seed(3)).to(device) < 0.7
    here = (place % slots)[None]
    return PackedRows(place // slots, Places(here, here), Places(slot, slot, present=present))


def patterns() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ragged = torch.rand(4, 37, generator=generator) < torch.tensor([0.9, 0.05, 0.5, 0.3])[:, None]
    empty = ragged.clone()
    empty[1:3] = False
    one = torch.zeros(3, 20, dtype=torch.bool)
    one[1, 19] = True
    return {
        "all": torch.ones(2, 33, dtype=torch.bool),
        "ragged": ragged,
        "gaps": empty,
        "one": one,
        "none": one & False,
    }


@pytest.mark.one_of(5)
@pytest.mark.parametrize("holes", [False, True], ids=["whole", "holes"])
@pytest.mark.parametrize(("heads", "key_heads", "size"), [(2, 2, 16), (4, 2, 8), (3, 1, 20)], ids=str)
@pytest.mark.parametrize("pattern", list(patterns()))
@pytest.mark.parametrize("device", PLACES)
def test_attention_of_scattered_rows_is_no_worse_than_the_reference(device, pattern, heads, key_heads, size, holes):
    active = patterns()[pattern]
    rows = scattered(active, holes=holes, device=device)
    if pattern == "none":
        query = torch.zeros(0, heads, size, device=device)
        keys = torch.zeros(3, key_heads, 20, size, device=device)
        assert attention_kernel.compact_attention(query, keys, keys, rows).shape == (0, heads, size)
        return
    compare_attention(active, rows, heads=heads, key_heads=key_heads, size=size, device=device)


@pytest.mark.every
@pytest.mark.parametrize("device", PLACES)
def test_rows_that_see_whole_blocks_of_keys_are_no_worse_either(device):
    active = torch.rand(1, 190, generator=torch.Generator().manual_seed(4)) < 0.8
    rows = scattered(active, holes=False, device=device)
    compare_attention(active, rows, heads=2, key_heads=1, size=16, device=device)


def plain_attention(query: Tensor, keys: Tensor, values: Tensor, rows: PackedRows) -> Tensor:
    """Equals the operation, written out in the precision of its inputs, as Hugging Face's eager attention computes it.

    Judged by this, not by torch's own attention: that takes another backend for every shape, some of which compute in
    float32, and one of which returns NaN (masks.masked_attention).
    """
    groups = query.shape[1] // keys.shape[1]
    wide = torch.promote_types(query.dtype, torch.float32)
    mixed = []
    for (sequence, part), mask in zip(rows.parts, rows.masks(None), strict=True):
        k, v = (x[sequence].repeat_interleave(groups, 0) for x in (keys, values))
        scores = query[part].transpose(0, 1) @ k.mT * query.shape[-1] ** -0.5
        weights = scores.masked_fill(~mask[0], -torch.inf).softmax(-1, dtype=wide).to(query.dtype)
        mixed.append((weights @ v).transpose(0, 1))
    return torch.cat(mixed)


def attention_case(
    active: Tensor, *, heads: int, key_heads: int, size: int, device: str, dtype, seed=0
) -> list[Tensor]:
    make = {"dtype": dtype, "device": device}
    query = draw(int(active.sum()), heads, size, seed=seed + 1, **make)
    shape = active.shape[0], key_heads, active.shape[1], size
    keys, values = (draw(*shape, seed=seed + place, **make) for place in (2, 3))
    # Laid out as a decoder hands them over: token by token.
    return [query, *(x.transpose(1, 2).contiguous().transpose(1, 2) for x in (keys, values))]


def compare_attention(active: Tensor, rows: PackedRows, *, device: str, **shape: int) -> None:
    make = partial(attention_case, active, device=device, **shape)
    # One row's gradients are few numbers, so one draw says little; interpreted, many rows take long.
    seeds = SEEDS if device == "cuda" or active.sum() == 1 else SEEDS[:1]
    for dtype in precisions(device):
        for version in (attention_kernel, attention_op.reference):
            judge_attention(version.compact_attention, [make(dtype=dtype, seed=seed) for seed in seeds], rows)


def judge_attention(version, cases: list[list[Tensor]], rows: PackedRows) -> None:
    """Errors against float64 truth, of the result and of every gradient: the root of their mean square over draws."""
    ours, plain, dtype = partial(version, rows=rows), partial(plain_attention, rows=rows), cases[0][0].dtype
    errors = []
    for case in cases:
        truth = differentiate(plain, [x.double() for x in case])
        errors.append([lost(differentiate(each, case), truth) for each in (ours, plain)])
    mine, theirs = torch.tensor(errors).square().mean(0).sqrt()
    assert (mine <= 1.1 * theirs + SLACK[dtype] * torch.finfo(dtype).eps).all(), (dtype, mine, theirs)


def test_scattered_rows_equal_the_same_rows_of_full_attention():
    active = patterns()["ragged"]
    rows = scattered(active, holes=False, device="cpu")
    query, keys, values = (draw(4, 2, 37, 8, seed=seed, dtype=torch.float64, device="cpu") for seed in (1, 2, 3))
    full = torch.nn.functional.scaled_dot_product_attention(query, keys, values, is_causal=True)
    found = attention_op.compact_attention(query.transpose(1, 2)[active], keys, values, rows)
    assert torch.allclose(found, full.transpose(1, 2)[active], rtol=0, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("pattern", ["all", "ragged", "gaps", "one"])
def test_what_a_compiler_calls_is_the_reference_forward_and_backward(pattern, dtype):
    active = patterns()[pattern]
    rows = scattered(active, holes=pattern == "ragged", device="cpu")
    make = {"dtype": dtype, "device": "cpu"}
    query = 3 * draw(int(active.sum()), 4, 8, seed=1, **make)
    given = [query, *(draw(active.shape[0], 2, active.shape[1], 8, seed=seed, **make) for seed in (2, 3))]
    plain = partial(attention_op.reference.compact_attention, rows=rows)
    truth = differentiate(plain, [x.double() for x in given])
    ours = lost(differentiate(partial(attention_op.opaque.compact_attention, rows=rows), given), truth)
    for mine, theirs in zip(ours, lost(differentiate(plain, given), truth), strict=True):
        assert mine <= 1.1 * theirs + SLACK.get(dtype, 8) * torch.finfo(dtype).eps


def opaque_arguments(device, dtype):
    rows = scattered(patterns()["ragged"], holes=True, device=device)
    query = draw(len(rows.sequence), 4, 16, seed=1, dtype=dtype, device=device).requires_grad_()
    keys, values = (draw(4, 2, 37, 16, seed=seed, dtype=dtype, device=device).requires_grad_() for seed in (2, 3))
    return rows, (query, keys, values, rows.sequence, rows.query.slot, rows.key.slot, rows.key.present, 0.3)


def test_what_a_compiler_calls_keeps_the_rules_of_an_operation():
    rows, given = opaque_arguments("cpu", torch.float64)
    torch.library.opcheck(torch.ops.adaponder.compact_attention.default, given)
    for unknown in ({"dropout": 0.1}, {"window": 3}):
        with pytest.raises(ValueError, match="a compiled pass knows none"):
            attention_op.opaque.compact_attention(*given[:3], rows, **unknown)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_what_a_compiler_calls_keeps_the_rules_on_a_gpu_too(dtype):
    _, given = opaque_arguments("cuda", dtype)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.adaponder.compact_attention.default, given, test_utils=checks)


def test_the_kernel_refuses_what_it_does_not_know():
    rows = scattered(patterns()["ragged"], holes=False, device="cpu")
    query = torch.randn(len(rows.sequence), 2, 16)
    keys = torch.randn(4, 2, 37, 16)
    with pytest.raises(ValueError, match="windows"):
        attention_kernel.compact_attention(query, keys, keys, rows, window=4)
    with pytest.raises(ValueError, match="another size"):
        attention_kernel.compact_attention(query, keys, keys[..., :8], rows)


@pytest.mark.gpu
@pytest.mark.large
@pytest.mark.parametrize("shape", [(300, 64, 50304, 64), (77, 128, 16384, 96), (130, 64, 50257, 64)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_real_vocabularies_on_a_gpu(dtype, shape):
    device = "cuda"
    targets = targets_for(shape[0], shape[2], device)
    make = {"shape": shape, "device": device, "sharpness": 0.3}
    plain = run_expectation(expectation_op.plain_vocab_expectation)
    ours = run_expectation(expectation_op.vocab_expectation, 128)
    assert_no_worse(partial(expectation_case, **make), ours, plain, dtype)
    plain = run_loss(loss_op.plain_linear_cross_entropy, targets)
    ours = run_loss(loss_op.linear_cross_entropy, targets, 128)
    assert_no_worse(partial(loss_case, **make), ours, plain, dtype)
    weights = weights_for(shape[0], device)
    plain = run_sum(plain_sum, targets, weights)
    ours = run_sum(loss_op.linear_cross_entropy_sum, targets, weights, 128)
    assert_no_worse(partial(loss_case, **make), ours, plain, dtype)
    # Many warps to a row here: were a target's logit read after its slope was written, this would show it.
    logits = draw(shape[0], shape[2], seed=1, dtype=dtype, device=device)
    apart = loss_kernels.losses(logits, targets), loss_kernels.slopes_(logits.clone(), targets, weights)
    together = loss_kernels.losses_and_slopes_(logits.clone(), targets, weights)
    torch.testing.assert_close(together, apart)


@pytest.mark.gpu
@pytest.mark.large
@pytest.mark.parametrize("holes", [False, True], ids=["whole", "holes"])
@pytest.mark.parametrize(("heads", "key_heads", "size"), [(4, 4, 64), (6, 2, 80), (4, 1, 128)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_real_heads_on_a_gpu(dtype, heads, key_heads, size, holes):
    generator = torch.Generator().manual_seed(1)
    active = torch.rand(5, 700, generator=generator) < torch.tensor([0.9, 0.02, 0.5, 0.0, 1.0])[:, None]
    rows = scattered(active, holes=holes, device="cuda")
    make = partial(attention_case, active, heads=heads, key_heads=key_heads, size=size, device="cuda")
    judge_attention(attention_op.compact_attention, [make(dtype=dtype)], rows)


@pytest.mark.parametrize("device", PLACES)
def test_logits_of_minus_infinity_are_no_nan(device):
    """A whole first block that can never be drawn, by its bias."""
    case = expectation_case((5, 8, 131, 8), dtype=torch.float32, device=device)
    case[3][:64] = -float("inf")
    for ours, plain, leaves in (
        (
            run_expectation(expectation_kernels.vocab_expectation, 3),
            run_expectation(expectation_op.plain_vocab_expectation),
            case,
        ),
        (
            run_loss(loss_kernels.linear_cross_entropy, torch.full((5,), 100, device=device), 3),
            run_loss(loss_op.plain_linear_cross_entropy, torch.full((5,), 100, device=device)),
            [case[0], case[1], case[3]],
        ),
    ):
        for mine, theirs in zip(differentiate(ours, leaves), differentiate(plain, leaves), strict=True):
            assert torch.allclose(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("device", PLACES)
def test_a_target_that_does_not_exist_makes_its_loss_nan(device):
    hidden, weight, bias = loss_case((4, 5, 33, 3), dtype=torch.float32, device=device)
    targets = torch.tensor([3, -1, 33, -100], device=device)
    found = loss_kernels.linear_cross_entropy(hidden, weight, targets, bias=bias)
    assert found.isnan().tolist() == [False, True, True, False]
    for weights in (torch.ones(4, device=device), torch.tensor([1.0, 0.0, 0.0, 1.0], device=device)):
        assert loss_kernels.linear_cross_entropy_sum(hidden, weight, targets, weights, bias=bias).isnan()


@pytest.mark.gpu
def test_a_gpu_runs_the_kernels_and_a_compiler_or_float64_gets_the_torch_version(monkeypatch):
    called = []
    original = expectation_kernels.softmax_
    monkeypatch.setattr(expectation_kernels, "softmax_", lambda *given: called.append(1) or original(*given))
    hidden, weight, table, _ = expectation_case((7, 5, 33, 3), dtype=torch.bfloat16, device="cuda")
    expectation_op.vocab_expectation(hidden, weight, table)
    assert called == [1]
    torch.compile(expectation_op.vocab_expectation, backend="eager")(hidden, weight, table)
    expectation_op.vocab_expectation(hidden.double(), weight.double(), table.double())
    monkeypatch.setenv("ADAPONDER_KERNELS", "0")
    expectation_op.vocab_expectation(hidden, weight, table)
    assert called == [1]
