"""Conversion: from stock, from PonderLM as released, between methods and back, each with its proof."""

import itertools
import json
import resource
import shutil
from unittest.mock import ANY, Mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2Config, PreTrainedTokenizerFast

from adaponder import AdaPonderForCausalLM, FixedDepth
from adaponder.checkpoints import loading as checkpoints
from adaponder.conversion import convert
from adaponder.errors import CheckpointError, InputError
from stock_support import make_stock
from support import FAMILIES, METHODS, ids, stock


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made")
    make_stock(folder, seed=0)
    return folder


@pytest.fixture
def source(made, tmp_path):
    return shutil.copytree(made, tmp_path / "stock")


def ponderlm(folder, *, steps=3, scale=True, multiply=True):
    """A checkpoint with the keys and flags of the PonderLM release."""
    base = stock(dtype=torch.float32)
    base.save_pretrained(folder)
    state = {name: value.clone() for name, value in base.state_dict().items()}
    state["embed_out.weight"] = state.pop("lm_head.weight")
    state["adapter.weight"] = torch.randn(16, 32)
    for old in folder.glob("*.safetensors"):
        old.unlink()
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    flags = {"ponderinglm": True, "pondering_steps": steps, "scale_embeds": scale, "mutiply_pondering_steps": multiply}
    (folder / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text()) | flags))
    return base


# Every method and every family once.
PAIRS = list(zip(METHODS, itertools.cycle(FAMILIES))) + list(zip(itertools.cycle(METHODS[1:]), FAMILIES))


@pytest.mark.one_of(4)
@pytest.mark.parametrize(("method", "family"), sorted(set(PAIRS)))
def test_a_stock_checkpoint_keeps_its_function_at_one_iteration(tmp_path, family, method):
    base = stock(family, dtype=torch.float32)
    base.save_pretrained(tmp_path / "stock")
    done = convert.convert(str(tmp_path / "stock"), tmp_path / "out", method=method, iterations=3)
    assert [check.holds for check in done.checks] == [True]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.config.method == method
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "stock")
    assert torch.equal(model(ids(), max_iterations=1).logits, reloaded(ids()).logits)


@pytest.mark.parametrize(("steps", "scale", "multiply"), [(1, True, True), (3, False, True), (3, True, False)])
def test_a_ponderlm_release_becomes_adaponder_and_ponder(tmp_path, steps, scale, multiply):
    base = ponderlm(tmp_path / "source", steps=steps, scale=scale, multiply=multiply)
    done = convert.convert(str(tmp_path / "source"), tmp_path / "ada", gate_bias=6.0)
    assert done.kind == "ponderlm"
    assert done.iterations == steps + 1
    assert done.gates_open == pytest.approx(0.997527, abs=1e-6)
    assert all(check.holds for check in done.checks)
    at_bias = done.checks[2]
    # The gates scale each update by s, so the distance is of the order of 1 - s.
    assert at_bias.difference < 50 * (1 - done.gates_open)
    convert.convert(str(tmp_path / "source"), tmp_path / "ponder", method="ponder")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "ponder")
    assert model.config.embedding_scale == (4.0 if scale else 1.0)
    assert model.config.initial_multiplier == (steps if multiply else 1)

    table = base.gpt_neox.embed_in.weight * (4.0 if scale else 1.0)
    embedding = table[ids()] * (steps if multiply else 1)
    for _ in range(steps):
        embedding = embedding + base(inputs_embeds=embedding).logits.softmax(-1) @ table
    expected = base(inputs_embeds=embedding).logits
    torch.testing.assert_close(model(ids()).logits, expected, rtol=1e-4, atol=1e-4)
    adaponder = AutoModelForCausalLM.from_pretrained(tmp_path / "ada")
    assert adaponder(ids()).depth.unique().tolist() == [steps + 1]


def test_between_methods_and_there_and_back_the_backbone_stays(tmp_path, source):
    convert.convert(str(source), tmp_path / "ada", iterations=3)
    with pytest.raises(InputError, match="has this method already"):
        convert.convert(str(tmp_path / "ada"), tmp_path / "again")
    done = convert.convert(str(tmp_path / "ada"), tmp_path / "loop", method="loop")
    assert done.iterations == 3
    assert done.checks[0].holds
    convert.convert(str(tmp_path / "ada"), tmp_path / "plain", method="vanilla")
    done = convert.convert(str(tmp_path / "plain"), tmp_path / "deep", method="adaponder")
    assert (done.kind, done.iterations) == ("vanilla", 4)
    done = convert.convert(str(tmp_path / "ada"), tmp_path / "back", method="backbone")
    assert done.checks[0].difference == 0
    before, after = (AutoModelForCausalLM.from_pretrained(folder) for folder in (source, tmp_path / "back"))
    assert type(after) is type(before)
    assert all(torch.equal(value, after.state_dict()[name]) for name, value in before.state_dict().items())
    assert (tmp_path / "back" / "tokenizer.json").exists()


def test_back_from_scaled_embeddings_folds_the_scale_or_says_why_not(tmp_path):
    ponderlm(tmp_path / "source")
    convert.convert(str(tmp_path / "source"), tmp_path / "ponder", method="ponder")
    done = convert.convert(str(tmp_path / "ponder"), tmp_path / "back", method="backbone")
    assert done.checks[0].holds
    tied = AdaPonderForCausalLM.from_backbone(stock("gpt2", dtype=torch.float32), embedding_scale=4.0)
    assert isinstance(tied.backbone.config, GPT2Config)
    tied.save_pretrained(tmp_path / "tied")
    with pytest.raises(InputError, match="shares with its head"):
        convert.convert(str(tmp_path / "tied"), tmp_path / "nowhere", method="backbone")


def test_the_loss_at_each_depth_is_shown_on_a_given_text_and_another_scale_is_told(tmp_path, source):
    done = convert.convert(str(source), tmp_path / "ada", iterations=3, text="def f(x): return x + 1")
    model = AdaPonderForCausalLM.from_pretrained(tmp_path / "ada")
    words = PreTrainedTokenizerFast.from_pretrained(tmp_path / "ada")
    tokens = words("def f(x): return x + 1", return_tensors="pt").input_ids
    assert len(done.losses) == 3
    for depth, loss in enumerate(done.losses, 1):
        expected = model(tokens, labels=tokens, policy=FixedDepth(depth)).loss
        assert loss == pytest.approx(float(expected), abs=1e-5)
    done = convert.convert(str(source), tmp_path / "scaled", embedding_scale=2.0)
    assert done.checks[0].bound is None, "another scale computes something else"
    assert done.checks[0].difference > 1e-3


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"text": "x"}, "--text: at least two tokens"),
        ({"method": "backbone", "text": "x + 1"}, "--text has no effect with --method backbone"),
        ({"method": "backbone", "gate_width": 2}, "--gate-width has no effect with --method backbone"),
    ],
)
def test_what_cannot_be_done_as_told_is_refused_before_anything_is_written(tmp_path, source, settings, says):
    with pytest.raises(InputError, match=says):
        convert.convert(str(source), tmp_path / "out", **settings)
    assert not (tmp_path / "out").exists()


def test_a_run_folder_is_a_checkpoint(tmp_path, source):
    run = tmp_path / "run"
    shutil.copytree(source, run / "checkpoints" / "step-00000010")
    shutil.copytree(source, run / "checkpoints" / "step-00000200")
    assert checkpoints.fetch(str(run)).name == "step-00000200"
    shutil.copytree(source, run / "final")
    assert checkpoints.fetch(str(run)).name == "final"
    with pytest.raises(CheckpointError, match="neither a model folder"):
        checkpoints.fetch(str(tmp_path))


def test_a_hub_name_is_asked_of_the_hub_without_pickles(monkeypatch, tmp_path, source):
    monkeypatch.setattr(checkpoints, "snapshot_download", snapshot := Mock(return_value=str(source)))
    convert.convert("EleutherAI/pythia-tiny", tmp_path / "ada", revision="step3000")
    snapshot.assert_called_with("EleutherAI/pythia-tiny", revision="step3000", allow_patterns=ANY)
    assert not any("bin" in pattern or "py" in pattern for pattern in snapshot.call_args.kwargs["allow_patterns"])


def test_nothing_is_left_behind_when_a_conversion_fails(tmp_path, monkeypatch):
    monkeypatch.setattr("adaponder.conversion.checks.plain_ponder", lambda *args, **kwargs: torch.ones(2, 24, 61))
    ponderlm(tmp_path / "ponderlm")
    with pytest.raises(CheckpointError, match="nothing was written"):
        convert.convert(str(tmp_path / "ponderlm"), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["ponderlm"]


def test_a_file_that_cannot_grow_is_one_line_and_nothing_is_left(tmp_path, source):
    """The kernel's limit on file sizes is set, because safetensors raises an error of its own for it."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    try:
        with pytest.raises(CheckpointError, match=r"out could not be saved: .*File too large.*; nothing was written"):
            convert.convert(str(source), tmp_path / "out", iterations=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [path.name for path in tmp_path.iterdir()] == ["stock"]


def test_foreign_keys_of_a_source_are_listed(tmp_path, source):
    state = load_file(source / "model.safetensors")
    del state["gpt_neox.layers.0.mlp.dense_h_to_4h.weight"]
    state["surprise.weight"] = torch.zeros(2)
    state["gpt_neox.final_layer_norm.bias"] = torch.zeros(3)
    save_file(state, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError) as error:
        convert.convert(str(source), tmp_path / "out")
    for part in ("dense_h_to_4h.weight", "surprise.weight", "final_layer_norm.bias", "(3,)"):
        assert part in str(error.value)
