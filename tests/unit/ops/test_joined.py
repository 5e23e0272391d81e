"""The gradient of a fused product, joined in place: found where it is, and bit for bit the same."""

import shutil

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.custom_graph_pass import get_hash_for_files
from torch._inductor.utils import run_and_get_code

from adaponder.ops import joined as op
from support import ids, tiny

ATEN = torch.ops.aten


def targets(graph):
    return [str(node.target) for node in graph.nodes]


def gradients(model, rewrite):
    """(per graph: how many joins, all gradients of the backbone)."""
    joins = []

    def look(module, given):
        rewrite(module.graph)
        module.graph.lint()
        module.recompile()
        joins.append(sum("adaponder.join" in name for name in targets(module.graph)))
        return make_boxed_func(module.forward)

    torch._dynamo.reset()
    model.zero_grad()
    model.compile_passes(by="pass", backend=aot_autograd(fw_compiler=look, bw_compiler=look))
    model(ids(), targets=ids(seed=1), output_logits=False).loss.backward()
    return joins, [parameter.grad.clone() for parameter in model.backbone.parameters()]


@pytest.mark.compiler
def test_every_layers_gradient_is_joined_so_and_is_the_same_bit_for_bit():
    model = tiny(dtype=torch.bfloat16).train()
    nowhere, expected = gradients(model, lambda graph: None)
    joins, found = gradients(model, op.JoinInPlace())
    assert set(nowhere) == {0}
    # Two backward graphs: without and with rows to reuse.
    assert [count for count in joins if count] == [model.wrapped.layers] * 2
    assert all(map(torch.equal, found, expected))


def chain(*, dim=3, parts=3, turn=(0, 2, 1, 3), read_twice=False, laid_out=True, promoted=False):
    """A graph that joins, turns and copies, with a deviation."""
    graph = fx.Graph()
    given = [graph.placeholder(f"x{index}") for index in range(parts)]
    for node in given:
        node.meta["val"] = torch.randn(2, 3, 4, 5)
    if promoted:
        given[0].meta["val"] = given[0].meta["val"].bfloat16()
    cat = graph.call_function(ATEN.cat.default, (given, dim))
    cat.meta["val"] = torch.cat([node.meta["val"] for node in given], dim)
    turned = graph.call_function(ATEN.permute.default, (cat, list(turn)))
    how = {"memory_format": torch.contiguous_format} if laid_out else {}
    copy = graph.call_function(ATEN.clone.default, (turned,), how)
    copy.meta["val"] = cat.meta["val"].permute(turn).contiguous()
    graph.output((copy, cat) if read_twice else copy)
    return graph, [node.meta["val"] for node in given]


def test_parts_are_turned_before_they_are_joined():
    graph, given = chain()
    expected = fx.GraphModule({}, graph)(*given)
    op.JoinInPlace()(graph)
    graph.lint()
    assert targets(graph)[-5:-1] == ["aten.permute.default"] * 3 + ["adaponder.join.default"]
    assert not {"aten.cat.default", "aten.clone.default"} & set(targets(graph))
    assert torch.equal(fx.GraphModule({}, graph)(*given), expected)


@pytest.mark.parametrize(
    "deviation",
    [{"dim": 2}, {"parts": 2}, {"turn": (0, 1, 3, 2)}, {"read_twice": True}, {"laid_out": False}, {"promoted": True}],
    ids=str,
)
def test_whatever_else_is_concatenated_stays(deviation):
    graph, _ = chain(**deviation)
    before = targets(graph)
    op.JoinInPlace()(graph)
    assert targets(graph) == before


def test_it_comes_on_top_of_what_was_asked_of_the_compiler():
    assert op.settings({"backend": "eager", "mode": "x"}) == {"backend": "eager", "mode": "x"}
    plain = op.settings({"fullgraph": True})
    assert plain["fullgraph"]
    assert isinstance(plain["options"][op._SETTING], op.JoinInPlace)
    assert plain == op.settings({"fullgraph": True}), "equal options, so that models share their graphs"
    tuned = op.settings({"mode": "max-autotune-no-cudagraphs", "options": None})
    assert "mode" not in tuned
    assert tuned["options"]["max_autotune"]
    assert set(tuned["options"]) > {op._SETTING}
    for name in (op._SETTING, op._SETTING.replace("_", "-")):
        assert op.settings({"options": {name: None}}) == {"options": {name: None}}, "one's own pass stays"
    with torch._inductor.config.patch({op._SETTING: op.JoinInPlace()}):
        assert op.settings({}) == {}, "so does one that is set for all"


def test_compiled_graphs_are_kept_on_disk_under_this_files_name():
    assert op.JoinInPlace().uuid() == get_hash_for_files((op.__file__,))


@pytest.mark.compiler
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor compiles with g++ on a CPU")
def test_under_the_compiler_it_changes_no_bit(monkeypatch):
    model, joins = tiny(dtype=torch.float32, iterations=2).train(), []
    rewrite = op.JoinInPlace.__call__

    def counted(self, graph):
        rewrite(self, graph)
        joins.extend(name for name in targets(graph) if name == "adaponder.join.default")

    monkeypatch.setattr(op.JoinInPlace, "__call__", counted)
    # Graphs that were made before and kept on disk would not be rewritten again.
    monkeypatch.setattr(op.JoinInPlace, "uuid", lambda self: None)

    def gradient(**options):
        torch._dynamo.reset()
        model.compile_passes(**options)
        model.zero_grad()
        model(ids(), targets=ids(seed=1), output_logits=False).loss.backward()
        return torch.cat([parameter.grad.flatten() for parameter in model.backbone.parameters()])

    found = gradient()
    assert len(joins) == 2, "one layer for all: its backward without and with rows to reuse"
    assert torch.equal(found, gradient(options={op._SETTING: None}))


@pytest.mark.compiler
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor compiles with g++ on a CPU")
def test_compiled_every_part_is_written_to_its_place_and_nothing_is_copied():
    def joined(query, key, value):
        parts = [torch.transpose(part + number, 1, 2) for number, part in enumerate((query, key, value))]
        return op.join(parts)

    given = [torch.randn(2, 3, 4, 5) for _ in range(3)]
    torch._dynamo.reset()
    found, (code,) = run_and_get_code(torch.compile(joined, **op.settings({})), *given)
    assert torch.equal(found, joined(*given))
    assert found.is_contiguous()
    assert code.count("= empty_strided") == 1, "one buffer, the result"
    assert "adaponder.join" not in code
