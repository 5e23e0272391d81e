"""The meter says what torch counts, what the ledger holds and what the masks let through, without running a model."""

from functools import cache
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import Gemma3nTextConfig, LlamaConfig, MixtralConfig

from adaponder import AdaPonderConfig, FixedDepth, ForcedDepths
from adaponder.backbones.shape import Shape, shape_of
from adaponder.errors import BackboneError, InputError
from adaponder.methods.cost import Cost, cost_of, parameters_of, per_depth
from adaponder.ops.masks import Places, visible
from support import FAMILIES, HALTING, METHODS, SHAPE, VOCABULARY, ids, tiny

K = 3
# One sequence padded left and one padded right: every depth up to K occurs, and 0 only as padding.
DEPTHS = torch.tensor([[0, 0, 1, 3, 2], [1, 2, 1, 1, 0]])
MASK = (DEPTHS > 0).long()
SMALL = SHAPE | {"vocab_size": 61}


def counted(model, *args, **kwargs) -> tuple[int, torch.Tensor]:
    """Returns the FLOPs that torch counts in one forward, and depths; attention runs as bmm, which torch counts."""
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), counter:
        output = model(*args, **kwargs)
    return counter.get_total_flops(), output.depth


@cache
def shape_in(family: str) -> Shape:
    return shape_of(FAMILIES[family])


def square(depth: torch.Tensor, config: AdaPonderConfig, *, family: str = "gpt_neox", **options) -> Cost:
    """Returns the cost of a tiny model, counted as torch's counter does, in float64."""
    return cost_of(depth, config, shape=shape_in(family), attention="square", dtype=torch.float64, **options)


def forced(method: str) -> dict:
    return {"policy": ForcedDepths(DEPTHS)} if method in HALTING else {}


def possible(method: str, depths: torch.Tensor) -> torch.Tensor:
    """Returns the depths, or full depth for every real token if the method cannot halt."""
    if method in HALTING:
        return depths
    return (depths > 0).long() * (1 if method == "vanilla" else K)


BACKBONE = FAMILIES["gpt_neox"]
CONFIGS = {method: AdaPonderConfig(backbone_config=BACKBONE, method=method, iterations=K) for method in METHODS}


# Equal, not close: both sides count the same matrix products.
@pytest.mark.parametrize(
    ("method", "settings"),
    [
        *((method, {}) for method in METHODS),
        *(("adaponder", sizes) for sizes in ({"expectation_top_k": 5}, {"expectation_top_k": 999}, {"gate_width": 0})),
    ],
)
def test_a_dense_forward_costs_what_torch_counts(method, settings):
    model = tiny(method, iterations=K, **settings)
    options = {"execution": "dense", "policy": FixedDepth(K) if method in HALTING else None}
    for most in {1, model.config.iterations}:
        flops, depth = counted(model, ids(), max_iterations=most, **options)
        assert square(depth, model.config, max_iterations=most).flops == flops


@pytest.mark.one_of(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_backbone_costs_what_torch_counts_and_weighs_what_the_ledger_holds(family):
    model = tiny("adaponder", family, iterations=2)
    flops, depth = counted(model, ids(2, 5), execution="dense", policy=FixedDepth(2))
    assert square(depth, model.config, family=family).flops == flops
    output = model(ids(2, 5), use_cache=True)
    assert square(output.depth, model.config, family=family).kv_bytes == output.past_key_values.nbytes


@pytest.mark.parametrize(
    ("method", "every_gate"), [("pause", False), ("adaponder", False), *((method, True) for method in HALTING)]
)
def test_a_compact_forward_costs_its_depths_as_torch_counts_them(method, every_gate):
    model = tiny(method, iterations=K)
    options = {"attention_mask": MASK, "execution": "compact", "output_gates": every_gate} | forced(method)
    flops, depth = counted(model, ids(2, 5), **options)
    # A forward without logits_to_keep computes logits for padding too.
    cost = square(depth, model.config, every_gate=every_gate, logits=DEPTHS.numel())
    assert torch.equal(depth, possible(method, DEPTHS))
    assert cost.flops == flops
    assert cost.rows == cost.total_depth == int(depth.sum())


@pytest.mark.parametrize("method", ["pause", *HALTING])
def test_decoding_costs_what_torch_counts(method):
    model = tiny(method, iterations=K)
    prompt, rest = ids(2, 5).split(3, dim=1)
    ledger = model(prompt, attention_mask=MASK[:, :3], use_cache=True, **forced(method)).past_key_values
    past = ledger.depth
    options = {"attention_mask": MASK, "logits_to_keep": 1, "output_gates": False} | forced(method)
    flops, depth = counted(model, rest, past_key_values=ledger, **options)
    assert square(depth, model.config, past=past, logits=len(rest)).flops == flops


@pytest.mark.parametrize("reuse", ["kv", "none"])
def test_tokens_that_are_read_on_after_halting_cost_their_rows(reuse):
    model = tiny("adaponder", iterations=K, reuse=reuse)
    options = {"attention_mask": MASK, "output_gates": False} | forced("adaponder")
    flops, depth = counted(model, ids(2, 5), execution="compact", **options)
    cost = square(depth, model.config, logits=DEPTHS.numel())
    assert cost.flops == flops
    assert cost.rows == K * cost.tokens
    assert cost.total_depth == int(DEPTHS.sum())
    assert cost.kv_bytes == model(ids(2, 5), use_cache=True, **options).past_key_values.nbytes


def test_keys_that_are_cached_compressed_are_unfolded_in_every_pass():
    model = tiny(family="deepseek_v3", iterations=K)
    depths = torch.tensor([[1, 3, 2, 1], [1, 2, 1, 2]])  # in the third iteration one sequence has nothing to read
    options = {"policy": ForcedDepths(depths), "output_gates": False}
    flops, depth = counted(model, ids(2, 4), **options)
    cost = cost_of(depth, model.config, attention="square", dtype=torch.float64)
    assert shape_of(model).expansion > 0
    assert cost.flops == flops
    assert cost.kv_bytes == model(ids(2, 4), use_cache=True, **options).past_key_values.nbytes


@pytest.mark.parametrize("method", METHODS)
def test_keys_and_values_weigh_what_the_ledger_holds(method):
    model = tiny(method)
    output = model(ids(2, 5), attention_mask=MASK, use_cache=True)
    cost = square(output.depth, model.config)
    assert cost.kv_bytes == output.past_key_values.nbytes
    assert cost.tokens == int(MASK.sum())


def pairs_in_masks(depths: torch.Tensor, method: str, window: int | None) -> int:
    """Counts the pairs that the model's masks allow, over the rows it computes."""
    if method == "pause":
        depths = (depths > 0).long().repeat_interleave(K, dim=1)
    slot = torch.arange(depths.shape[1]).expand(depths.shape)
    order = (depths > 0).cumsum(1) - 1
    pairs = 0
    for i in range(int(depths.max())):
        places = Places(slot, order, present=depths > (i if method == "mor" else 0))
        pairs += int(visible(places, places, window=window)[:, 0][depths > i].sum())
    return pairs


@st.composite
def some_depths(draw) -> torch.Tensor:
    batch, time = draw(st.integers(1, 3)), draw(st.integers(1, 9))
    row = st.lists(st.integers(0, K), min_size=time, max_size=time)
    return torch.tensor(draw(st.lists(row, min_size=batch, max_size=batch)))


def bare_shape(*windows: int | None) -> Shape:
    """Returns a shape of attention alone, with one multiply-add for each pair and layer."""
    return Shape(16, VOCABULARY, 0, 0, 0, attention=(1,) * len(windows), windows=windows, kv=1)


@pytest.mark.parametrize("method", ["adaponder", "ponder", "pause", "mor"])
@given(depths=some_depths(), window=st.integers(1, 5))
def test_causal_attention_counts_the_pairs_that_masks_let_through(method, depths, window):
    depths = possible(method, depths)
    cost = cost_of(depths, CONFIGS[method], shape=bare_shape(None, window, window))
    expected = pairs_in_masks(depths, method, None) + 2 * pairs_in_masks(depths, method, window)
    assert cost.attention == 2 * expected


@pytest.mark.parametrize("method", METHODS)
def test_one_iteration_costs_what_the_stock_model_costs(method):
    cost = square(torch.ones(2, 9, dtype=torch.long), CONFIGS[method], max_iterations=1)
    assert cost.flops - cost.gates == cost.vanilla
    assert (cost.gates > 0) == (method == "ouro"), "only ouro's exit speaks after a last iteration"
    assert cost.iterations == 1.0
    assert square(possible(method, torch.full((2, 9), K)), CONFIGS[method]).vanilla == cost.vanilla


@pytest.mark.parametrize("method", METHODS)
def test_the_table_by_depth_is_decoding_one_token(method):
    config, shape = CONFIGS[method], shape_in("gpt_neox")
    table = per_depth(config, context=5, shape=shape)
    assert [cost.total_depth for cost in table] == list(range(1, config.iterations + 1))
    assert all(deeper.flops > cost.flops for cost, deeper in pairwise(table))
    depth = torch.full((1, 6), config.iterations)
    assert table[-1] + cost_of(depth[:, :5], config, shape=shape) == cost_of(depth, config, shape=shape)


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        *((method, {}) for method in METHODS),
        ("adaponder", {"shared_gate": True}),
        ("adaponder", {"gate_width": 0}),
        ("pause", {"pause_token_id": 3}),
    ],
)
def test_parameters_are_those_of_the_model(method, settings):
    model = tiny(method, "gpt2", **settings)  # its head is tied to its embedding
    count = parameters_of(model.config, shape=shape_in("gpt2"))
    assert count.added == sum(parameter.numel() for parameter in model.method.parameters())
    assert count.total == model.num_parameters()


def test_experts_and_a_weight_that_is_borrowed_from_its_layer_are_refused_rather_than_miscounted():
    with pytest.raises(BackboneError, match="multiplied outside a linear layer"):
        shape_of(MixtralConfig(**SMALL, num_local_experts=4, num_key_value_heads=1))
    layers = {"activation_sparsity_pattern": [0.0, 0.0], "layer_types": ["full_attention"] * 2}
    sizes = {"vocab_size_per_layer_input": 61, "hidden_size_per_layer_input": 4, "laurel_rank": 2}
    with pytest.raises(BackboneError, match="0 rows"):
        shape_of(Gemma3nTextConfig(**SMALL, **layers, **sizes, num_kv_shared_layers=0))


@pytest.mark.parametrize(
    ("method", "depth", "options"),
    [
        ("loop", [[K, K - 1]], {}),
        *(("adaponder", depth, {}) for depth in ([[K + 1, 1]], [[-1, 1]], [3, 1], [[1.5, 1.0]])),
        *(("adaponder", [[3, 1]], {"max_iterations": most}) for most in (2, K + 1)),
        ("adaponder", [[3, 1]], {"past": torch.ones(2, 3, dtype=torch.long)}),
        ("adaponder", [[3, 1]], {"attention": "flash"}),
    ],
)
def test_depths_that_a_method_cannot_have_are_refused(method, depth, options):
    with pytest.raises(InputError):
        cost_of(torch.tensor(depth), CONFIGS[method], shape=bare_shape(None), **options)


def test_rotary_angles_that_stretch_change_no_shape():
    stretching = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    assert shape_of(LlamaConfig(**SMALL, rope_parameters=stretching)) == shape_of(LlamaConfig(**SMALL))
