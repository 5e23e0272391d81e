"""The loop against a plain one, resume against never having stopped, several processes against one."""

import gc
import json
import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch

import adaponder
from adaponder import AdaPonderForCausalLM, FixedDepth, Objective
from adaponder.backbones import wrapper
from adaponder.data import Sampler, Shards
from adaponder.errors import AdaPonderError, InputError
from adaponder.evaluation.scoring import ScoringOptions, score
from adaponder.evaluation.text import Text, Windows
from adaponder.recipes import Recipe
from adaponder.training.build import build_model
from adaponder.training.data import shards_folder
from adaponder.training.distributed import World
from adaponder.training.loop import Trainer
from adaponder.training.run import train
from adaponder.training.schedule import policy_at
from support import METHODS
from training_support import assert_same_weights, losses, metrics, small, uneven, weights


@pytest.fixture(scope="module")
def apart(tmp_path_factory):
    return uneven(tmp_path_factory.mktemp("uneven"))


def plain_loop(recipe: Recipe, shards: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
    """What the loop must equal: nothing but torch. Cross-entropy is a mean over targets, ponder over micro-steps."""
    opened, plan = Shards.open(shards, "train"), recipe.train
    sampler = Sampler(opened, sequence=recipe.data.sequence, global_batch=plan.global_batch, seed=plan.seed)
    model = build_model(recipe, opened.vocab_size)
    rates = {True: plan.lr, False: plan.gate_lr}
    groups = [
        {
            "params": [
                p for n, p in model.named_parameters() if n.startswith("backbone") == own and (p.ndim > 1) == big
            ],
            "weight_decay": plan.weight_decay if big else 0.0,
            "peak": rates[own],
        }
        for own in (True, False)
        for big in (True, False)
    ]
    optimizer = torch.optim.AdamW([g for g in groups if g["params"]], betas=plan.betas, eps=1e-8)
    warmup, measured = round(plan.warmup * plan.steps), []
    for step in range(plan.steps):
        done = (step - warmup) / (plan.steps - 1 - warmup)
        cosine = plan.min_lr_ratio + (1 - plan.min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * done))
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * ((step + 1) / warmup if step < warmup else cosine)
        drawn = sampler.batch(step)
        tokens, documents = torch.from_numpy(drawn.tokens), torch.from_numpy(drawn.documents)
        targets = tokens[:, 1:].clone()
        if not recipe.data.attend_across_documents:
            targets[documents[:, 1:] != documents[:, :-1]] = -100
        k = 0.0 if step <= 3 else plan.k_max * min(1.0, (step - 3) / 2)
        objective = Objective(ponder_weight=plan.ponder_weight if step >= 3 else 0.0, ponder_fraction=k)
        halting = {} if step >= 3 else {"policy": FixedDepth(3)}
        if not recipe.data.attend_across_documents:
            halting["document_ids"] = documents[:, :-1]
        loss, size = torch.zeros((), dtype=torch.double), plan.micro_batch or plan.global_batch
        for first in range(0, plan.global_batch, size):
            part = slice(first, first + size)
            how = {key: value[part] if key == "document_ids" else value for key, value in halting.items()}
            output = model(tokens[part, :-1], targets=targets[part], objective=objective, **how)
            share = (targets[part] != -100).sum() / (targets != -100).sum().double()
            loss = loss + output.terms["cross_entropy"] * share
            loss = loss + objective.ponder_weight * output.terms.get("ponder", 0.0) * size / plan.global_batch
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), plan.clip)
        optimizer.step()
        measured.append(float(loss.detach()))
    return measured, model.state_dict()


APART = ("data.attend_across_documents=false", "train.micro_batch=1", "train.steps=8")


@pytest.mark.one_of(3)
@pytest.mark.parametrize(
    ("data", "how"),
    [("apart", APART), ("shards", ["train.steps=30"]), ("apart", [*APART, "data.sequence=1"])],
    ids=["documents apart", "together", "no targets in some rows"],
)
def test_the_loop_equals_plain_lines_through_both_stages(data, how, tmp_path, request):
    shards = request.getfixturevalue(data)
    recipe = small(shards, "train.dtype=float64", "train.save_every=0", *how)
    expected, state = plain_loop(recipe, shards)
    done = train(recipe, out=tmp_path / "run", quiet=True)
    assert losses(tmp_path / "run") == pytest.approx(expected, rel=1e-9)
    for name, value in done.trainer.model.state_dict().items():
        torch.testing.assert_close(value, state[name], rtol=1e-9, atol=1e-9)
    assert data == "apart" or expected[-1] < 0.7 * expected[0], "it must learn for this to mean anything"


def test_a_step_with_nothing_to_predict_is_a_step_of_the_other_terms(apart, tmp_path):
    steps = ["train.steps=16", "train.ponder_start=0", "train.ponder_full=0", "train.save_every=0"]
    how = ["data.sequence=1", "train.global_batch=1", "data.attend_across_documents=false", "train.eval_tokens=2"]
    train(small(apart, *how, *steps), out=tmp_path / "run", quiet=True)
    lines = [line for line in metrics(tmp_path / "run") if "ponder" in line]
    assert any(line["cross_entropy"] == 0 and line["loss"] == line["ponder"] > 0 for line in lines)
    assert all(math.isfinite(loss) for loss in losses(tmp_path / "run"))


@pytest.mark.one_of(3)
@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains_evaluates_and_opens_with_from_pretrained(shards, tmp_path, method):
    done = train(small(shards, "train.steps=5", method=method), out=tmp_path / "run", quiet=True)
    model = AdaPonderForCausalLM.from_pretrained(done.final)
    assert model.config.method == method
    line = metrics(tmp_path / "run")[-1]
    assert 1 <= line["validation_depth"] <= 3
    assert line["validation_loss"] < math.log(300) + 1


def test_validation_is_what_evaluation_scores_and_never_holds_the_logits_of_all_tokens(shards, tmp_path):
    """Five windows, four at once: the three that fill up the second batch do not count."""
    sizes = ["train.eval_tokens=160", "train.steps=1", "model.tau=0.99"]
    recipe = small(shards, "train.dtype=float64", "train.ponder_start=0", "train.ponder_full=0", *sizes)
    trainer = train(recipe, out=tmp_path / "run", quiet=True).trainer
    for gate in trainer.model.method.gates:  # so that depths differ
        gate.out.weight.data.normal_(std=20.0, generator=torch.Generator().manual_seed(0))
    logits = []
    trainer.model.register_forward_hook(lambda module, args, output: logits.append(output.logits))
    measured = trainer.evaluate(160)
    assert logits == [None, None]
    stream = trainer.validation.read(0, 161)
    text = Text(stream, np.zeros(1, np.int64), ("",), np.ones(1, np.int64), None)
    scores = score(trainer.model, text, Windows(32), how=ScoringOptions(execution="dense"))
    assert measured["validation_loss"] == pytest.approx(scores.loss, rel=1e-12)
    assert measured["validation_depth"] == pytest.approx(scores.depth.mean(), rel=1e-12)
    halted = [(scores.depth <= depth).mean() for depth in (1, 2)]
    assert measured["validation_halted"] == pytest.approx(halted, rel=1e-12)


def test_kept_logits_change_no_bit_and_a_run_may_go_on_with_them(shards, tmp_path, monkeypatch):
    spy = MagicMock(wraps=wrapper.vocab_expectation)
    monkeypatch.setattr(wrapper, "vocab_expectation", spy)
    short = ("train.steps=5", "train.eval_tokens=32")
    train(small(shards, *short), out=tmp_path / "plain", quiet=True)
    assert {call.kwargs["keep_logits"] for call in spy.call_args_list} == {False}
    spy.reset_mock()
    keeping = small(shards, "train.keep_logits=true", *short)
    halfway = str(tmp_path / "plain" / "checkpoints" / "step-00000004")
    for name, resume in (("kept", None), ("resumed", halfway)):
        train(keeping, out=tmp_path / name, resume=resume, quiet=True)
        assert_same_weights(tmp_path / name, tmp_path / "plain")
    assert {call.kwargs["keep_logits"] for call in spy.call_args_list} == {True}


def test_gates_alone_train_first_and_the_backbone_waits(shards, tmp_path):
    recipe = small(shards, "train.freeze_backbone_steps=4", "train.halt_before_ponder=true")
    done = train(recipe, out=tmp_path / "run", quiet=True)
    start = build_model(recipe, Shards.open(shards, "train").vocab_size).state_dict()
    halfway = AdaPonderForCausalLM.from_pretrained(tmp_path / "run" / "checkpoints" / "step-00000004").state_dict()
    moved = {name for name, value in halfway.items() if not torch.equal(value, start[name])}
    assert moved
    assert all(name.startswith("method.") for name in moved)
    end = done.trainer.model.state_dict()
    assert any(not torch.equal(value, end[name]) for name, value in halfway.items() if name.startswith("backbone."))


@pytest.mark.one_of(4)
@pytest.mark.filterwarnings("error:.*gradient clipping")
@pytest.mark.parametrize("method", METHODS)
def test_with_one_iteration_every_parameter_trains_and_a_run_resumes(shards, tmp_path, method):
    recipe = small(shards, "model.iterations=1", "train.steps=2", "train.save_every=1", method=method)
    train(recipe, out=tmp_path / "whole", quiet=True)
    assert not [name for name in weights(tmp_path / "whole" / "final") if "gates" in name]
    middle = str(tmp_path / "whole" / "checkpoints" / "step-00000001")
    train(recipe, out=tmp_path / "resumed", resume=middle, quiet=True)
    assert_same_weights(tmp_path / "resumed", tmp_path / "whole")


def test_a_tied_weight_is_saved_once_and_resumed_under_both_names(shards, tmp_path):
    recipe = small(shards, "model.backbone.tie_word_embeddings=true", "train.steps=3")
    train(recipe, out=tmp_path / "whole", quiet=True)
    middle = tmp_path / "whole" / "checkpoints" / "step-00000002"
    train(recipe, out=tmp_path / "resumed", resume=str(middle), quiet=True)
    for folder in (middle, tmp_path / "whole" / "final"):
        tied = {"backbone.gpt_neox.embed_in.weight", "backbone.lm_head.weight"} & weights(folder).keys()
        assert tied == {"backbone.gpt_neox.embed_in.weight"}
    assert_same_weights(tmp_path / "resumed", tmp_path / "whole")


LAUNCH = """
import sys
from pathlib import Path
sys.path[:0] = {paths!r}
import torch; torch.set_num_threads(1)
from contextlib import nullcontext
from training_support import small
from adaponder.training import run
from adaponder.training.distributed import join
with join("cpu") as world:
    run.join = lambda device: nullcontext(world)  # processes find each other once, for all runs
    for name, overrides in {runs!r}.items():
        recipe, resume = small(Path({shards!r}), *overrides), {resume!r}.get(name)
        run.train(recipe, out=Path({out!r}) / name, resume=resume, quiet=True)
"""


def launch(processes: int, shards: Path, out: Path, runs: dict[str, list[str]], resume: dict | None = None) -> None:
    """Trains each of the runs, one after another, in so many processes; some resume from a checkpoint."""
    paths = [str(Path(__file__).parents[2]), str(Path(adaponder.__file__).parents[1])]
    script = out / "launch.py"
    script.write_text(LAUNCH.format(paths=paths, shards=str(shards), runs=runs, resume=resume or {}, out=str(out)))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run([*command, str(script)], capture_output=True, text=True, env=environment, check=False)
    assert result.returncode == 0, result.stderr[-3000:]


SHARED = ["train.dtype=float64", "train.save_every=0", "data.attend_across_documents=false", "train.steps=10"]
SHARED += ["train.eval_tokens=160"]  # five windows: not as many for every process
PHASES = ["train.freeze_backbone_steps=2", "train.halt_before_ponder=true"]
# What two processes train, and the micro-batch with which one process takes the same rows at once.
TOGETHER = {
    "ddp": ([*PHASES, "train.parallel=ddp"], 2),
    "fsdp": ([*PHASES, "train.parallel=fsdp", "train.keep_logits=true"], 2),
    "nothing to predict in some rows": (["data.sequence=1", "train.steps=6", "train.eval_tokens=5"], 2),
    "each gate by itself": (["model.ponder_pool=each", "train.steps=4"], 2),
    "each process for itself": (["train.ponder_scope=process"], 1),
    "mor": (["model.method=mor", "model.iterations=4", "train.capacity_warmup=4", "train.steps=4"], 2),
    "ouro": (["model.method=ouro", "train.steps=4"], 2),
    "labels in some rows": (["model.method=anytime", "model.gate_share=0.5", "train.steps=4"], 2),
}


@pytest.mark.every
def test_two_processes_train_like_one_that_takes_their_rows_together(apart, tmp_path):
    """Unequal numbers of targets, two micro-steps, a change of phase: the same losses, terms and weights to 1e-9."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    runs = {name: [*SHARED, *how, "train.micro_batch=1"] for name, (how, _) in TOGETHER.items()}
    launch(2, apart, tmp_path / "two", runs)
    for name, (how, together) in TOGETHER.items():
        recipe = small(apart, *SHARED, *how, f"train.micro_batch={together}")
        assert_targets_differ(recipe, apart)
        train(recipe, out=tmp_path / "one" / name, quiet=True)
        one, two = (metrics(tmp_path / folder / name) for folder in ("one", "two"))
        terms = ("loss", "cross_entropy", "ponder", "router", "lookahead", "helped", "entropy")
        for term in (*terms, "grad_norm", "validation_loss"):
            expected = [line[term] for line in one if term in line]
            assert [line[term] for line in two if term in line] == pytest.approx(expected, rel=1e-9), (name, term)
        theirs = weights(tmp_path / "two" / name / "final")
        for parameter, value in weights(tmp_path / "one" / name / "final").items():
            torch.testing.assert_close(theirs[parameter], value, rtol=1e-9, atol=1e-9, msg=f"{name}: {parameter}")


@pytest.mark.every
def test_two_processes_that_resume_draw_the_same_dropout_each(shards, tmp_path):
    """Compact execution draws dropout for active rows alone, so the random states of the processes differ."""
    how = ["train.execution=compact", "train.halt_before_ponder=true", "train.gate_start=0", "model.gate_bias=0"]
    how += ["model.tau=0.5", "model.backbone.hidden_dropout=0.2", "train.save_every=4"]
    middle = tmp_path / "whole" / "checkpoints" / "step-00000004"
    launch(2, shards, tmp_path, {"whole": how, "resumed": how}, {"resumed": str(middle)})
    leading, other = json.loads((middle / "state.json").read_text())["rng"]
    assert leading != other, "each process must have drawn as many numbers as its rows need"
    assert losses(tmp_path / "resumed") == losses(tmp_path / "whole")[4:]
    assert_same_weights(tmp_path / "resumed", tmp_path / "whole")


def assert_targets_differ(recipe: Recipe, shards: Path) -> None:
    """In some micro-step the two rows have unequal numbers of targets; of windows of one token, some have none."""
    sampler = Sampler(Shards.open(shards, "train"), sequence=recipe.data.sequence, global_batch=4, seed=0)
    documents = np.stack([sampler.batch(step).documents for step in range(4)])
    counts = (documents[..., 1:] == documents[..., :-1]).sum(-1).reshape(-1, 2)
    assert (counts[:, 0] != counts[:, 1]).any()
    assert recipe.data.sequence > 1 or (counts == 0).any()


@pytest.mark.one_of(2)
@pytest.mark.parametrize("checkpointing", ["true", "false"], ids=["replayed", "kept"])
def test_compact_training_equals_dense_training(shards, tmp_path, checkpointing, monkeypatch):
    """Halting tokens are skipped, and nothing else changes: half of them halt early here."""
    original = Trainer.__post_init__

    def with_gates_that_disagree(self):
        original(self)
        generator = torch.Generator().manual_seed(0)
        for gate in self.model.method.gates:
            gate.out.weight.data.normal_(std=20.0, generator=generator)

    monkeypatch.setattr(Trainer, "__post_init__", with_gates_that_disagree)
    same = ["train.dtype=float64", "model.tau=0.5", "train.halt_before_ponder=true", "model.gate_bias=0.0"]
    same += [f"train.gradient_checkpointing={checkpointing}", "train.ponder_start=2", "train.ponder_full=3"]
    same += ["train.steps=5", "train.save_every=0"]
    for execution in ("dense", "compact"):
        train(small(shards, f"train.execution={execution}", *same), out=tmp_path / execution, quiet=True)
    assert min(line["mean_depth"] for line in metrics(tmp_path / "dense") if "mean_depth" in line) < 2.9
    assert losses(tmp_path / "compact") == pytest.approx(losses(tmp_path / "dense"), abs=1e-10)
    ours, theirs = weights(tmp_path / "compact" / "final"), weights(tmp_path / "dense" / "final")
    assert all(torch.allclose(ours[name], theirs[name], rtol=0, atol=1e-9) for name in theirs)


def test_what_a_recipe_does_not_get_is_remarked(shards, tmp_path, capsys):
    (tmp_path / "one.txt").write_text("a few words\n" * 99)
    prepared = tmp_path / "data" / "one.txt-train-bpe-300"
    raw = (f"data.source={tmp_path / 'one.txt'}", "data.tokenizer=train-bpe:300", "data.validation=1e-9")
    for data, overrides, remarks in (
        (shards, ("train.gate_start=2", "train.ponder_start=2"), ["gate_start", "ponder_start=2"]),
        (shards, ("train.gate_start=1", "train.ponder_start=0"), ["gate_start=1 is after ponder_start=0"]),
        (shards, raw, ["assigned to validation", "no validation loss"]),
        (prepared, ("data.validation=0.2",), ["validation=1e-09", "data.validation"]),
    ):
        out = tmp_path / str(len(list(tmp_path.iterdir())))
        train(small(data, "train.steps=2", *overrides), out=out, data=tmp_path / "data", quiet=True)
        printed = " ".join(capsys.readouterr().out.split())
        assert all(remark in printed for remark in remarks)


def test_data_prepared_otherwise_names_the_folder_of_the_data_and_not_of_the_run(tmp_path):
    (tmp_path / "one.txt").write_text("the cat sat " * 99)
    source = f"data.source={tmp_path / 'one.txt'}"
    shards_folder(small(tmp_path, source), tmp_path / "data", World())
    with pytest.raises(InputError, match="validation") as refused:
        shards_folder(small(tmp_path, source, "data.validation=0.5"), tmp_path / "data", World())
    assert str(refused.value).startswith(source)
    assert f"--out {tmp_path}" not in str(refused.value)


def test_logs_without_a_terminal_show_the_step_the_total_and_the_time_left(shards, tmp_path, capsys):
    train(small(shards, "train.steps=3"), out=tmp_path / "run")
    lines = re.findall(r"^step (\d) of 3  loss .*  \d:\d\d:\d\d left$", capsys.readouterr().out, flags=re.MULTILINE)
    assert lines == ["0", "1", "2"]


def test_a_warning_of_collapse_names_validation_and_comes_once(shards, tmp_path, capsys):
    """This method halts tokens at random in training, so only depths in validation can show a collapse."""
    gates = ["model.iterations=2", "model.gate_bias=-9", "model.tau=0.5", "train.ponder_weight=0"]
    often = ("train.steps=2", "train.eval_every=1")
    train(small(shards, *gates, *often, method="reread"), out=tmp_path / "run", quiet=True)
    printed = " ".join(capsys.readouterr().out.split())
    assert printed.count("the gates have collapsed") == 1
    assert "step 0: validation: the gates have collapsed, every token halts after one iteration" in printed


@pytest.fixture
def traced(monkeypatch):
    """Where there is no C++ compiler only the tracing half of torch.compile can run: the half that could go wrong."""
    plain, patch = torch.compile, monkeypatch.setattr
    return lambda backend: patch(torch, "compile", lambda function, options=None: plain(function, backend=backend))


@pytest.mark.parametrize(
    ("by", "backend"),
    [
        ("layer", "eager"),
        pytest.param("layer", "aot_eager", marks=pytest.mark.compiler),
        pytest.param("pass", "aot_eager", marks=pytest.mark.compiler),
    ],
)
def test_compiled_training_equals_eager_training_and_compiles_few_graphs(shards, tmp_path, traced, by, backend):
    traced(backend)
    long = ["train.steps=6", "train.ponder_start=1", "train.ponder_full=5", "train.save_every=0"]
    for name, how in (("eager", []), ("compiled", ["train.compile=true", f"train.compile_by={by}"])):
        recipe = small(shards, "train.dtype=float64", *how, *long)
        torch._dynamo.utils.counters.clear()
        train(recipe, out=tmp_path / name, quiet=True)
    assert losses(tmp_path / "compiled") == pytest.approx(losses(tmp_path / "eager"), abs=1e-12)
    # The first pass, the later ones and three functions between them, in training and in evaluation: not one for every
    # step of k's warm-up.
    assert 5 <= torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 10


@pytest.mark.compiler
@pytest.mark.parametrize("by", ["pass", "layer"])
def test_a_change_of_phase_does_not_run_out_of_graphs(shards, tmp_path, traced, by):
    """Each phase has graphs of its own for training and evaluation; past its limit the compiler would go eager."""
    traced("eager")
    how = ["train.compile=true", f"train.compile_by={by}", "train.freeze_backbone_steps=3", "train.eval_every=1"]
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        train(small(shards, *how), out=tmp_path / "run", quiet=True)
    assert len(losses(tmp_path / "run")) == 8


def test_a_steered_run_resumes_bit_for_bit_between_two_turns(shards, tmp_path):
    steps = ["train.steps=10", "train.save_every=1", "train.eval_tokens=32"]
    recipe = small(shards, "train.target_depth=2.2", "train.target_every=2", *steps)
    train(recipe, out=tmp_path / "whole", quiet=True)
    pressure = [line["pressure"] for line in metrics(tmp_path / "whole") if "pressure" in line]
    turned = [step for step in range(1, 10) if pressure[step] != pressure[step - 1]]
    assert turned == [6, 8], "after every second step, from step 5 on"
    for step in (7, 8):
        middle = tmp_path / "whole" / "checkpoints" / f"step-{step:08d}"
        train(recipe, out=tmp_path / str(step), resume=str(middle), quiet=True)
        assert_same_weights(tmp_path / str(step), tmp_path / "whole")


def test_the_capacity_of_mor_shrinks_along_half_a_cosine(shards, tmp_path):
    """After 0, 1/4, 1/2, 3/4 and all of the warm-up the capacity has gone this much of the way from 1."""
    four = ["model.method=mor", "model.iterations=4"]
    plan = small(shards, *four, "train.capacity_warmup=8", "train.steps=12").train
    method = build_model(small(shards, *four), 300).method
    _, *capacities = method.config.capacities
    assert capacities == [0.97, 0.93, 0.9]
    for step, way in ((0, 0.0), (2, 0.1464466094), (4, 0.5), (6, 0.8535533906), (8, 1.0), (11, 1.0)):
        shares = policy_at(plan, method, step).schedule.shares
        assert shares == pytest.approx([1 - way * (1 - capacity) for capacity in capacities], abs=1e-9), step
    at_once = policy_at(replace(plan, capacity_warmup=0), method, 0)
    assert at_once.schedule.shares == pytest.approx(capacities)
    train(small(shards, *four, "train.capacity_warmup=2", "train.steps=3"), out=tmp_path / "run", quiet=True)
    depths = [line["mean_depth"] for line in metrics(tmp_path / "run") if "mean_depth" in line]
    tokens = 32
    kept = [[int(tokens * (1 - way * (1 - share)) + 1e-9) for share in capacities] for way in (0.0, 0.5, 1.0)]
    assert depths == pytest.approx([1 + sum(numbers) / tokens for numbers in kept])


@pytest.mark.parametrize(
    ("field", "value", "method"),
    [
        ("train.target_depth", "3.0", "adaponder"),
        ("train.target_depth", "2.0", "ponder"),
        ("train.freeze_backbone_steps", "4", "ponder"),
        ("train.exit_stage", "2", "ouro"),  # without freeze_backbone_steps to the end
    ],
)
def test_a_setting_that_the_method_cannot_follow_is_refused(shards, tmp_path, field, value, method):
    with pytest.raises(AdaPonderError, match=f"{field}={value}"):
        train(small(shards, f"{field}={value}", method=method), out=tmp_path / "a", quiet=True)


def test_weights_and_biases_gets_what_the_log_gets(shards, tmp_path, monkeypatch):
    recipe = small(shards, "train.steps=2", "train.save_every=0")
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(AdaPonderError, match="--wandb"):
        train(recipe, out=tmp_path / "without", wandb="ponder", quiet=True)
    wandb = MagicMock()  # the library itself would call home
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    train(recipe, out=tmp_path / "with", wandb="ponder", quiet=True)
    assert wandb.init.call_args.kwargs["project"] == "ponder"
    assert wandb.init.call_args.kwargs["config"]["train"]["steps"] == 2
    logged = [call.args[0] for call in wandb.init.return_value.log.call_args_list]
    assert [scalars["loss"] for scalars in logged if "loss" in scalars] == losses(tmp_path / "with")
    wandb.init.return_value.finish.assert_called_once()


@pytest.mark.gpu
def test_a_training_step_does_not_wait_for_the_gpu(shards, tmp_path):
    class Watched(Trainer):
        def _one_step(self):
            torch.cuda.set_sync_debug_mode("error" if self.step >= 2 else "default")
            try:
                super()._one_step()
            finally:
                torch.cuda.set_sync_debug_mode("default")

    recipe = small(shards, "train.log_every=0", "train.save_every=0")
    assert train(recipe, out=tmp_path / "run", device="cuda", trainer_class=Watched).step == 8


def test_the_garbage_collector_leaves_out_what_a_run_keeps_until_it_ends(shards, tmp_path):
    frozen = []

    class Watched(Trainer):
        def _after_step(self, phase_end):
            frozen.append(gc.get_freeze_count())
            return super()._after_step(phase_end)

    before = gc.get_freeze_count()
    train(small(shards, "train.steps=6", "train.save_every=0"), out=tmp_path / "run", trainer_class=Watched)
    assert min(frozen) > before + 10_000
    assert gc.get_freeze_count() == 0
