"""Head and expectation of a tick's rows equal the plain ones; rows that halt cost nothing and leave zeros."""

import pytest
import torch

from adaponder.ops.row_linear import triton as products
from adaponder.ops.row_vocabulary import torch as plain
from adaponder.ops.row_vocabulary import triton as kernels
from adaponder.ops.vocab_expectation import plain_vocab_expectation
from kernel_support import PLACES, draw, error, widest

pytestmark = pytest.mark.usefixtures("poisoned")

FLOOR = {torch.float32: 1e-6, torch.bfloat16: 6e-3}
# (rows, d, vocabulary, width of the table)
SHAPES = [(1, 32, 61, 16), (3, 20, 130, 40), (7, 16, 33, 24), (0, 8, 20, 8)]


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    if not torch.cuda.is_available():
        monkeypatch.setattr(products, "few_cut", lambda inputs, outputs: products.Cut(8, 1))
        monkeypatch.setattr(kernels, "slices_for", lambda width: kernels.Slices(3, 16, 16, 1, 1))


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("device", PLACES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_logits_equal_the_heads(shape, device, bias):
    rows, d, vocabulary, _ = shape
    dtype = widest(device)
    hidden, weight, shift = (
        draw(*size, seed=seed, dtype=dtype, device=device)
        for seed, size in enumerate([(rows, d), (vocabulary, d), (vocabulary,)])
    )
    ours = kernels.row_logits(hidden, weight, bias=shift if bias else None)
    assert ours.dtype == dtype
    truth = plain.row_logits(hidden.double(), weight.double(), bias=shift.double() if bias else None)
    assert error(ours, truth) <= FLOOR[dtype]


@pytest.mark.parametrize("sharpness", [0.3, 8.0])
@pytest.mark.parametrize("device", PLACES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_expectation_equals_the_plain_one(shape, device, sharpness):
    rows, _, vocabulary, width = shape
    dtype = widest(device)
    logits = draw(rows, vocabulary, seed=3, dtype=dtype, device=device) * sharpness
    table = draw(vocabulary, width, seed=4, dtype=dtype, device=device)
    logits[:1, : vocabulary // 2] = -float("inf")  # tokens that cannot come
    truth = plain.row_expectation(logits.double(), table.double(), scale=1.7)
    ours, same = (version.row_expectation(logits, table, scale=1.7) for version in (kernels, plain))
    assert ours.dtype == dtype
    assert error(ours, truth) <= error(same, truth) + FLOOR[dtype]


@pytest.mark.parametrize("most", [16, 2], ids=["few", "many"])
def test_rows_that_do_not_go_on_leave_zeros_and_touch_nothing(monkeypatch, most, interpreted):
    monkeypatch.setattr(kernels, "ROWS", most)
    logits, table = draw(5, 61, seed=3).float(), draw(61, 24, seed=4).float()
    goes_on = torch.tensor([True, False, True, False, False])
    logits[1] = float("nan") if most == 16 else logits[1]  # never looked at
    ours = kernels.row_expectation(logits, table, goes_on, scale=0.5)
    truth = plain.row_expectation(logits[goes_on].double(), table.double(), scale=0.5)
    assert error(ours[goes_on], truth) <= 1e-6
    assert not ours[~goes_on].any()


def test_where_no_row_goes_on_the_table_is_not_read(monkeypatch, interpreted):
    def multiplied(*arguments, **options):
        raise AssertionError("a program multiplied with the table")

    logits, table = draw(3, 61, seed=3).float(), draw(61, 24, seed=4).float()
    monkeypatch.setattr(kernels.tl, "dot", multiplied)
    assert not kernels.row_expectation(logits, table, torch.zeros(3, dtype=torch.bool)).any()
    with pytest.raises(Exception, match="multiplied with the table"):
        kernels.row_expectation(logits, table, torch.tensor([False, True, False]))


@pytest.mark.parametrize("top_k", [None, 1, 5, 1000])
def test_the_plain_expectation_is_the_backbones(top_k):
    hidden, weight, table = draw(4, 8, seed=0), draw(20, 8, seed=1), draw(20, 6, seed=2)
    goes_on = torch.tensor([True, True, False, True])
    ours = plain.row_expectation(plain.row_logits(hidden, weight), table, goes_on, scale=2.0, top_k=top_k)
    theirs = plain_vocab_expectation(hidden, weight, table, top_k=top_k) * 2.0
    assert error(ours[goes_on], theirs[goes_on]) <= 1e-15
    assert not ours[2].any()
