"""Attention of scattered rows: torch version, kernels and compiled call, against attention written out."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.backends.cuda import cudnn_sdp_enabled

from adaponder.ops import compact_attention as op
from adaponder.ops.compact_attention import PackedRows, compact_attention
from adaponder.ops.compact_attention import torch as reference
from adaponder.ops.compact_attention import triton as kernels
from adaponder.ops.masks import Places, spans_of
from kernel_support import PLACES, SEEDS, SLACK, differentiate, draw, errors, precisions

pytestmark = pytest.mark.usefixtures("poisoned")
# Slots per sequence: more than one block of 16.
SLOTS = 21


@pytest.fixture(autouse=True)
def _small_blocks(request, monkeypatch):
    """Makes blocks so small that the interpreter meets several."""
    if "large" not in request.keywords:
        monkeypatch.setattr(kernels, "BLOCKS", {128: (16, 16, 2)})


def scattered(active: Tensor, *, holes: bool, device: str, documents: bool = False) -> PackedRows:
    """Returns the rows of the active slots; with holes, some keys are absent; an id of ``documents`` returns later."""
    sequences, slots = active.shape
    place = active.flatten().nonzero().squeeze(1).to(device)
    slot = torch.arange(slots, device=device).expand(sequences, -1)
    present = None
    if holes:
        present = torch.rand(sequences, slots, generator=torch.Generator().manual_seed(3)).to(device) < 0.7
    here = (place % slots)[None]
    if not documents:
        return PackedRows(place // slots, Places(here, here), Places(slot, slot, present=present))
    document = torch.randint(2, (sequences, slots), generator=torch.Generator().manual_seed(5)).cumsum(1) // 5
    document = document.where(document != 3, 1).to(device)
    key = Places(slot, slot, document, present, spans_of(document))
    return PackedRows(place // slots, Places(here, here, document.flatten()[place][None]), key)


def patterns() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ragged = torch.rand(4, SLOTS, generator=generator) < torch.tensor([0.9, 0.05, 0.5, 0.3])[:, None]
    empty = ragged.clone()
    empty[1:3] = False
    one = torch.zeros(3, 20, dtype=torch.bool)
    one[1, 19] = True
    return {
        "all": torch.ones(2, 20, dtype=torch.bool),
        "ragged": ragged,
        "gaps": empty,
        "one": one,
        "none": one & False,
    }


def by_kernels(query: Tensor, keys: Tensor, values: Tensor, *, rows: PackedRows) -> Tensor:
    return kernels.compact_attention(query, keys, values, rows, query.shape[-1] ** -0.5)


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
        assert by_kernels(query, keys, keys, rows=rows).shape == (0, heads, size)
        return
    compare_attention(active, rows, heads=heads, key_heads=key_heads, size=size, device=device)


@pytest.mark.parametrize("holes", [pytest.param(False, marks=pytest.mark.every), True], ids=["whole", "holes"])
@pytest.mark.parametrize("device", PLACES)
def test_rows_of_packed_documents_are_no_worse_than_the_reference(device, holes):
    active = torch.rand(2, 70, generator=torch.Generator().manual_seed(4)) < torch.tensor([[0.6], [0.9]])
    rows = scattered(active, holes=holes, device=device, documents=True)
    compare_attention(active, rows, heads=2, key_heads=1, size=16, device=device)


@pytest.mark.every
@pytest.mark.parametrize("device", PLACES)
def test_rows_that_see_whole_blocks_of_keys_are_no_worse_either(device):
    active = torch.rand(1, 190, generator=torch.Generator().manual_seed(4)) < 0.8
    rows = scattered(active, holes=False, device=device)
    compare_attention(active, rows, heads=2, key_heads=1, size=16, device=device)


@pytest.mark.gpu
@pytest.mark.large
@pytest.mark.one_of(5)
@pytest.mark.parametrize("documents", [False, True], ids=["sequences", "documents"])
@pytest.mark.parametrize("holes", [False, True], ids=["whole", "holes"])
@pytest.mark.parametrize(("heads", "key_heads", "size"), [(4, 4, 64), (6, 2, 80), (4, 1, 128)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_real_heads_on_a_gpu(dtype, heads, key_heads, size, holes, documents):
    generator = torch.Generator().manual_seed(1)
    active = torch.rand(5, 700, generator=generator) < torch.tensor([0.9, 0.02, 0.5, 0.0, 1.0])[:, None]
    rows = scattered(active, holes=holes, device="cuda", documents=documents)
    case = attention_case(active, heads=heads, key_heads=key_heads, size=size, device="cuda", dtype=dtype)
    judge_attention(compact_attention, [case], rows)


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


def attention_case(active: Tensor, *, heads: int, key_heads: int, size: int, seed=0, **make) -> list[Tensor]:
    query = draw(int(active.sum()), heads, size, seed=seed + 1, **make)
    shape = active.shape[0], key_heads, active.shape[1], size
    keys, values = (draw(*shape, seed=seed + place, **make) for place in (2, 3))
    # Laid out as a decoder passes them on: token by token.
    return [query, *(x.transpose(1, 2).contiguous().transpose(1, 2) for x in (keys, values))]


def compare_attention(active: Tensor, rows: PackedRows, *, device: str, **shape: int) -> None:
    # Interpreted, many rows take long; one row's gradients are few numbers, so one draw is too little.
    seeds = SEEDS if device == "cuda" else SEEDS[: 3 if active.sum() == 1 else 1]
    for dtype in precisions(device):
        cases = [attention_case(active, **shape, dtype=dtype, device=device, seed=seed) for seed in seeds]
        for version in (by_kernels, reference.compact_attention):
            judge_attention(version, cases, rows)


def judge_attention(version, cases: list[list[Tensor]], rows: PackedRows) -> None:
    """Compares root-mean-square errors of the result and every gradient, against float64 over several draws."""
    ours, plain, dtype = partial(version, rows=rows), partial(plain_attention, rows=rows), cases[0][0].dtype
    found = []
    for case in cases:
        truth = differentiate(plain, [x.double() for x in case])
        found.append([errors(differentiate(function, case), truth) for function in (ours, plain)])
    mine, theirs = torch.tensor(found).square().mean(0).sqrt()
    assert (mine <= 1.1 * theirs + SLACK.get(dtype, 8) * torch.finfo(dtype).eps).all(), (dtype, mine, theirs)


def test_scattered_rows_equal_the_same_rows_of_full_attention_and_never_run_by_cudnn(monkeypatch):
    allowed, attend = [], reference.scaled_dot_product_attention

    def observed(*args, **options):
        allowed.append(cudnn_sdp_enabled())
        return attend(*args, **options)

    monkeypatch.setattr(reference, "scaled_dot_product_attention", observed)
    active = patterns()["ragged"]
    rows = scattered(active, holes=False, device="cpu")
    query, keys, values = (draw(4, 2, SLOTS, 8, seed=seed) for seed in (1, 2, 3))
    full = torch.nn.functional.scaled_dot_product_attention(query, keys, values, is_causal=True)
    found = compact_attention(query.transpose(1, 2)[active], keys, values, rows)
    torch.testing.assert_close(found, full.transpose(1, 2)[active], rtol=0, atol=1e-14)
    assert set(allowed) == {False}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("pattern", ["ragged", "gaps", "one"])
def test_a_compiled_pass_calls_the_reference_forward_and_backward(pattern, dtype, monkeypatch):
    monkeypatch.setattr(op, "is_compiling", lambda: True)
    active = patterns()[pattern]
    rows = scattered(active, holes=pattern == "ragged", device="cpu", documents=pattern == "gaps")
    query, keys, values = attention_case(active, heads=4, key_heads=2, size=8, dtype=dtype)
    given = [3 * query, keys, values]
    plain = partial(reference.compact_attention, rows=rows)
    truth = differentiate(plain, [x.double() for x in given])
    ours = errors(differentiate(partial(compact_attention, rows=rows), given), truth)
    for mine, theirs in zip(ours, errors(differentiate(plain, given), truth), strict=True):
        assert mine <= 1.1 * theirs + SLACK.get(dtype, 8) * torch.finfo(dtype).eps
    without_spans = replace(
        rows, query=replace(rows.query, document=rows.query.slot), key=replace(rows.key, spans=None)
    )
    for described, unknown in ((rows, {"dropout": 0.1}), (rows, {"window": 3}), (without_spans, {})):
        with pytest.raises(ValueError, match="cannot be part of a compiled pass"):
            compact_attention(*given, described, **unknown)


@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        pytest.param("cpu", torch.float64, id="cpu"),
        *(pytest.param("cuda", dtype, marks=pytest.mark.gpu) for dtype in (torch.bfloat16, torch.float16)),
    ],
)
def test_the_compiled_call_keeps_the_rules_of_an_operation(device, dtype):
    rows = scattered(patterns()["ragged"], holes=True, device=device, documents=True)
    query = draw(len(rows.sequence), 4, 16, seed=1, dtype=dtype, device=device)
    keys, values = (draw(4, 2, SLOTS, 16, seed=seed, dtype=dtype, device=device) for seed in (2, 3))
    leaves = [x.requires_grad_() for x in (query, keys, values)]
    places = rows.sequence, rows.query.slot, rows.key.slot, rows.key.present, rows.key.spans
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    checks += ("test_aot_dispatch_dynamic",) if device == "cpu" else ()
    torch.library.opcheck(torch.ops.adaponder.compact_attention.default, (*leaves, *places, 0.3), test_utils=checks)


def test_windows_dropout_and_values_of_another_size_do_not_fit_the_kernels():
    rows = scattered(patterns()["ragged"], holes=False, device="cpu")
    query, keys = torch.randn(len(rows.sequence), 2, 16), torch.randn(4, 2, SLOTS, 16)
    fits = partial(kernels.fits, query, keys, rows=rows)
    assert fits(keys, window=None, dropout=0.0)
    assert not fits(keys, window=4, dropout=0.0)
    assert not fits(keys, window=None, dropout=0.1)
    assert not fits(keys[..., :8], window=None, dropout=0.0)
