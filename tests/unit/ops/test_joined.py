"""The gradient of a fused product, joined in place: found where it is, and bit for bit the same."""

import shutil

import pytest
import torch
from torch import fx
from torch._inductor.utils import run_and_get_code

from adaponder.ops import joined as op
from support import ids, tiny

ATEN = torch.ops.aten


def targets(graph):
    return [str(node.target) for node in graph.nodes]


def chain(*, dim=3, parts=3, turn=(0, 2, 1, 3), read_twice=False, laid_out=True, promoted=False):
    """Builds a graph that concatenates, permutes and copies, with the given deviation."""
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
def test_every_other_concatenation_stays(deviation):
    graph, _ = chain(**deviation)
    before = targets(graph)
    op.JoinInPlace()(graph)
    assert targets(graph) == before


def test_the_pass_is_added_to_the_callers_compiler_options():
    assert op.settings({"backend": "eager", "mode": "x"}) == {"backend": "eager", "mode": "x"}
    plain = op.settings({"fullgraph": True})
    assert plain["fullgraph"]
    assert isinstance(plain["options"][op._SETTING], op.JoinInPlace)
    assert plain == op.settings({"fullgraph": True}), "equal options, so that models share their graphs"
    tuned = op.settings({"mode": "max-autotune-no-cudagraphs", "options": None})
    assert "mode" not in tuned
    assert tuned["options"]["max_autotune"]
    for name in (op._SETTING, op._SETTING.replace("_", "-")):
        assert op.settings({"options": {name: None}}) == {"options": {name: None}}, "the caller's own pass stays"
    with torch._inductor.config.patch({op._SETTING: op.JoinInPlace()}):
        assert op.settings({}) == {}, "so does one that is set for all"


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
