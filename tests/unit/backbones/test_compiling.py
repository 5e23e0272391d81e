"""Compiled layers and functions between passes: the same numbers, and graphs that do not grow with depth."""

import copy
import shutil
from functools import partial

import pytest
import torch
from torch._dynamo.utils import counters

from adaponder.backbones import compiling
from adaponder.backbones.views import DenseView
from adaponder.backbones.wrapper import Backbone
from adaponder.errors import BackboneError, ConfigError
from adaponder.halting import Gate, freeze_halted, pondered, read_gate
from adaponder.methods import Objective
from kernel_support import draw
from packed_support import PADDED, assert_same, loss_and_gradients, packed_results
from support import METHODS, ids, stock, tiny, wrap

QUICK = ("adaponder",)  # of the methods, those that make test compiles
ASKED = {"targets": ids(2, 9, seed=1), "objective": Objective(ponder_weight=0.3, ponder_fraction=0.2)}


def deep(layers):
    return wrap(stock(num_hidden_layers=layers), iterations=4)


def compile_layers(model, **options):
    torch._dynamo.reset()
    counters.clear()
    model.compile_passes(by="layer", **{"backend": "aot_eager", "fullgraph": True} | options)


@pytest.mark.parametrize(
    ("method", "family"),
    [
        *((method, "gpt_neox") for method in QUICK),
        *(pytest.param(method, "gpt_neox", marks=pytest.mark.compiler) for method in METHODS if method not in QUICK),
        *(pytest.param("adaponder", family, marks=pytest.mark.compiler) for family in ("llama", "gemma3", "gpt2")),
    ],
)
def test_a_layer_compiled_for_all_changes_nothing(method, family):
    model = tiny(method, family, iterations=4).train()
    expected = loss_and_gradients(model, **ASKED)
    compile_layers(model)
    assert_same(loss_and_gradients(model, **ASKED), expected)
    assert counters["stats"]["unique_graphs"] >= 1


def test_a_compiled_layer_that_asks_the_cache_twice_is_counted():
    """A layer gets its part of a view, whose count is taken back."""
    view, rows = DenseView(2, previous=None, active=None), torch.zeros(1, 2, 3, 4)
    for layer, times in enumerate((1, 2)):
        part = view.of_layer(layer)
        for _ in range(times):
            part.update(rows, rows, layer)
        view.take(layer, part)
    with pytest.raises(BackboneError, match=r"layers \[1\] called the cache \[2\] times"):
        view.rows()


@pytest.mark.compiler
def test_graphs_do_not_grow_with_layers_and_iterations():
    made = []
    for layers in (2, 7):
        model = deep(layers).train()
        expected = loss_and_gradients(model, **ASKED)
        compile_layers(model)
        assert_same(loss_and_gradients(model, **ASKED), expected)
        assert_same(loss_and_gradients(model, **ASKED), expected)
        made.append(counters["stats"]["unique_graphs"])
    assert made == [5, 5], "a layer without and with rows to reuse; a gate, eq. 9, frozen states"


@pytest.mark.compiler
def test_the_compiler_has_room_for_every_kind_of_layer():
    """Gemma's two kinds of layers have graphs of their own; beyond its limit the compiler would run eagerly."""
    model = tiny("adaponder", "gemma3", iterations=2)
    compile_layers(model, backend="eager")
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        model.train()(ids(2, 9), targets=ids(2, 9, seed=1)).loss.backward()
        with torch.no_grad():
            model.eval()(ids(2, 9), execution="dense")
    assert counters["stats"]["unique_graphs"] > torch._dynamo.config.recompile_limit


@pytest.mark.parametrize(
    ("trains", "given"),
    [
        pytest.param(False, {}, id="reads-whole"),
        pytest.param(True, {"attention_mask": PADDED}, id="trains-padded"),
    ],
)
@pytest.mark.compiler
def test_packed_rows_of_any_number_share_a_layers_graph(given, trains):
    model = deep(4).train(trains)

    expected = packed_results(model, given, trains)
    compile_layers(model)
    assert_same(packed_results(model, given, trains), expected)
    assert 1 <= counters["stats"]["unique_graphs"] <= 3


@pytest.mark.compiler
def test_a_memory_budget_holds_for_each_layer():
    model, kept, found = deep(3).train(), [], []
    for budget in (1.0, 0.2):
        compile_layers(model, backend="aot_eager_decomp_partition", memory_budget=budget)
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda x, saved=saved: (saved.append(x.numel()), x)[1], lambda x: x
        ):
            loss = model(ids(2, 9), **ASKED).loss
        kept.append(sum(saved))
        found.append(loss.detach())
    assert kept[1] < 0.8 * kept[0]
    torch.testing.assert_close(found[1], found[0])


def test_layers_are_left_as_they_were_also_after_an_error():
    model = deep(3).train()
    before = [dict(layer.__dict__) for layer in model.backbone.base_model.layers]

    def fails(graph, inputs):
        raise RuntimeError("the compiler fell")

    compile_layers(model, backend=fails)
    with pytest.raises(Exception, match="the compiler fell"):
        loss_and_gradients(model, **ASKED)
    assert [layer.__dict__.keys() for layer in model.backbone.base_model.layers] == [b.keys() for b in before]


def test_an_unknown_unit_and_replaced_layers_are_refused():
    model = deep(2).train()
    with pytest.raises(ConfigError, match="by="):
        model.compile_passes(by="module")
    compile_layers(model)
    model.backbone.base_model.layers[1].forward = model.backbone.base_model.layers[1].forward
    with pytest.raises(BackboneError, match="by='pass'"):
        loss_and_gradients(model, **ASKED)


ROWS = (2, 5)


def gate(width, dtype=torch.float64, seed=0):
    torch.manual_seed(seed)
    made = Gate(16, width=width, bias=1.0)
    made.reset_parameters()
    torch.nn.init.normal_(made.out.weight)
    return made.to(dtype)


def results(function, module, given):
    """Returns the value and every gradient."""
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
    "gate": (read_gate, 4, [draw(*ROWS, 16, seed=0)]),
    "linear gate": (read_gate, 0, [draw(*ROWS, 16, seed=0)]),
    "eq. 9": (
        pondered,
        None,
        [draw(*ROWS, 16, seed=0), draw(*ROWS, 16, seed=1), ACTIVE, draw(*ROWS, seed=2).sigmoid()],
    ),
    "halted tokens": (freeze_halted, None, [ACTIVE, draw(*ROWS, 16, seed=0), draw(*ROWS, 16, seed=1)]),
}


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.compiler)])
@pytest.mark.parametrize("case", CASES)
def test_compiled_functions_equal_eager_ones(case, backend):
    if backend == "inductor" and shutil.which("g++") is None:
        pytest.skip("inductor compiles with g++ on a CPU")
    function, width, given = CASES[case]
    module = None if width is None else gate(width)
    torch._dynamo.reset()
    compiled = results(torch.compile(function, backend=backend, fullgraph=True), module, given)
    for mine, theirs in zip(compiled, results(function, module, given), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-14)


def test_a_gate_is_float32_where_half_precision_computes_it():
    """Dense runs compute a gate compiled and compact ones do not: neither rounds the result to bf16."""
    exact, given = gate(4), draw(64, 16, seed=0)
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


def test_functions_between_passes_are_compiled_for_dense_runs_only(monkeypatch):
    model = tiny(iterations=3).eval()
    assert model.wrapped.compiled(freeze_halted) is freeze_halted
    monkeypatch.setattr(compiling, "compiled", lambda function, *_: partial(function))  # the compiler takes seconds
    model.compile_passes()
    assert model.wrapped.compiled(freeze_halted) is model.wrapped.compiled(freeze_halted) is not freeze_halted
    assert copy.deepcopy(model).wrapped.compiled(freeze_halted) is not model.wrapped.compiled(freeze_halted)
    asked, compiled = [], Backbone.compiled
    monkeypatch.setattr(Backbone, "compiled", lambda self, function: asked.append(function) or compiled(self, function))
    model(torch.arange(6)[None], execution="compact")
    assert not asked
    model(torch.arange(6)[None], execution="dense")
    assert set(asked) == {read_gate, pondered, freeze_halted}
