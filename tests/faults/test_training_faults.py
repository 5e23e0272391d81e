"""Kill it, fill the disk, flip a byte, poison a step: the run ends as if nothing had been (promises 1 to 13)."""

import errno
import itertools
import json
import math
import os
import random
import re
import resource
import shutil
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from adaponder import AdaPonderError, AdaPonderForCausalLM, files
from adaponder.backbones.shape import shape_of
from adaponder.checkpoints import manifest
from adaponder.checkpoints.manifest import write_manifest
from adaponder.data import Sampler, Shards
from adaponder.errors import CheckpointError, InputError, TrainingError
from adaponder.recipes import Recipe
from adaponder.training import checkpoint
from adaponder.training import run as run_module
from adaponder.training.checkpoint import newest_complete, step_folder, verify_checkpoint
from adaponder.training.data import sampler_of
from adaponder.training.distributed import World
from adaponder.training.loop import Trainer
from adaponder.training.resume import Start, find_start, recipe_changes
from adaponder.training.run import locked_run_folder, train
from adaponder.training.telemetry import Telemetry
from fault_support import contents, full_disk, in_child, killed
from training_support import assert_same_weights, losses, small
from training_support import metrics as all_metrics

WEIGHTS, OPTIMIZER, STATE, MANIFEST = "model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"
FROZEN, S0, S1, STEPS = 2, 3, 5, 8
# What a clock decides is not compared.
CLOCKED = ("time", "tokens_per_second")


@pytest.fixture(scope="module", autouse=True)
def quick():
    """A killed process loses nothing that fsync would save, and the shape of one config is measured once."""
    known: dict[str, Any] = {}

    def remembered(config: Any) -> Any:
        key = config.to_json_string()
        return known.get(key) or known.setdefault(key, shape_of(config))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: None)
        patch.setattr("adaponder.training.loop.shape_of", remembered)
        yield


def recipe_of(shards: Path, *overrides: str) -> Recipe:
    """Gates alone until FROZEN, stage 2 from S0, k full at S1: every kind of step in eight, a save after each."""
    plan = [f"train.freeze_backbone_steps={FROZEN}", "train.save_every=1", *overrides]
    return small(shards, f"train.ponder_start={S0}", f"train.ponder_full={S1}", f"train.steps={STEPS}", *plan)


@pytest.fixture(scope="module")
def recipe(shards) -> Recipe:
    return recipe_of(shards)


@pytest.fixture(scope="module")
def whole(recipe, tmp_path_factory) -> Path:
    """The run that nothing befell, with the checkpoint of every step; tests break copies of it."""
    out = tmp_path_factory.mktemp("whole") / "run"
    train(recipe, out=out, quiet=True)
    return out


def metrics(run: Path) -> list[dict[str, Any]]:
    return [{name: value for name, value in line.items() if name not in CLOCKED} for line in all_metrics(run)]


def assert_as_if_nothing_had_been(run: Path, whole: Path) -> None:
    """The same final bits, and each step's line once with the same figures."""
    assert [line["step"] for line in metrics(run) if "loss" in line] == list(range(STEPS))
    assert metrics(run) == metrics(whole)
    assert_same_weights(run, whole)
    assert not list(run.rglob(".partial*"))


def stopped_after(whole: Path, step: int, out: Path) -> Path:
    """A copy of the whole run as it was when the checkpoint of ``step`` had just been saved."""
    (out / "checkpoints").mkdir(parents=True)
    for number in range(1, step + 1):
        shutil.copytree(step_folder(whole, number), step_folder(out, number))
    lines = (whole / "metrics.jsonl").read_text().splitlines()
    (out / "metrics.jsonl").write_text("".join(line + "\n" for line in lines if json.loads(line)["step"] < step))
    return out


def complete_steps(run: Path) -> list[int]:
    found = []
    for folder in sorted((run / "checkpoints").glob("step-*")):
        with suppress(CheckpointError):
            found.append(verify_checkpoint(folder)["step"])
    return found


def reseal(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Changes a checkpoint's state as if it had been saved so."""
    state = json.loads((folder / STATE).read_text())
    change(state)
    (folder / STATE).write_text(json.dumps(state))
    write_manifest(folder, step=state["step"])


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def killed_at(point: Callable[[], None], recipe: Recipe, out: Path, **options: Any) -> bool:
    """Trains in a child that dies at the point; returns whether it was reached."""

    def act() -> None:
        point()
        train(recipe, out=out, quiet=True, **options)

    return killed(act)


def dies(owner: Any, name: str, number: int = 1, *, at: str = "", after: bool = False) -> Callable[[], None]:
    """Arranges death before or after the ``number``-th call, of those whose first argument contains ``at``."""

    def arm() -> None:
        original, calls = getattr(owner, name), itertools.count(1)

        def hooked(*arguments: Any, **named: Any) -> Any:
            deadly = (not at or at in str(arguments[0])) and next(calls) == number
            result = None if deadly and not after else original(*arguments, **named)
            if deadly:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        setattr(owner, name, hooked)

    return arm


def half_a_manifest() -> None:
    """Arranges death when half of the fifth manifest is on disk."""
    original, calls = Path.write_bytes, itertools.count(1)

    def hooked(self: Path, data: bytes) -> int:
        if self.name == f"{MANIFEST}.tmp" and next(calls) == 5:
            original(self, data[: len(data) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        return original(self, data)

    Path.write_bytes = hooked


class Point(NamedTuple):
    """Where a run dies, and the step whose checkpoint must be the newest whole one then."""

    name: str
    arm: Callable[[], None]
    newest: int


# The n-th save is the one after step n. Two are kept: the save of step 3 prunes that of step 1.
PARTIAL = ".partial-step-00000005"
POINTS = [
    Point("after the weights", dies(AdaPonderForCausalLM, "save_pretrained", 5, after=True), 4),
    Point("after the optimizer", dies(checkpoint, "save_file", 5, after=True), 4),
    Point("before the state", dies(Path, "write_text", at=f"{PARTIAL}/{STATE}"), 4),
    Point("before the manifest", dies(manifest, "replace_file", at=PARTIAL), 4),
    Point("within the manifest", half_a_manifest, 4),
    Point("before the rename", dies(Path, "rename", at=PARTIAL), 4),
    Point("after the rename, before the parent is flushed", dies(Path, "rename", at=PARTIAL, after=True), 5),
    Point("within a prune", dies(os, "unlink", at=OPTIMIZER), 3),
    Point("before the final rename", dies(Path, "rename", at=".partial-final"), 7),
    Point("after the final rename", dies(Path, "rename", at=".partial-final", after=True), 7),
    Point("between backward and update", dies(torch.nn.utils, "clip_grad_norm_", 6, after=True), 5),
    Point("between update and save", dies(torch.optim.AdamW, "step", 6, after=True), 5),
    Point("between a line of metrics and its save", dies(Telemetry, "log", 6, after=True), 5),
    Point("before the first step", dies(Trainer, "_one_step"), 0),
]


@pytest.mark.one_of(5)
@pytest.mark.parametrize("point", POINTS, ids=lambda point: point.name)
def test_a_run_killed_anywhere_ends_like_one_that_was_not(shards, whole, tmp_path, point):
    kept_two, out = recipe_of(shards, "train.keep=2"), tmp_path / "run"
    assert killed_at(point.arm, kept_two, out), "the point was never reached"
    assert (complete_steps(out) or [0])[-1] == point.newest
    done = train(kept_two, out=out, resume="auto", quiet=True)
    assert done.final == out / "final"
    assert_as_if_nothing_had_been(out, whole)
    assert complete_steps(out) == [6, 7]


def test_a_resume_that_is_killed_loses_no_line_of_metrics(recipe, whole, tmp_path):
    """The history is rewritten when a run resumes: it dies before the new one replaces the old."""
    out = stopped_after(whole, 4, tmp_path / "run")
    assert killed_at(dies(os, "replace", at="metrics.jsonl.tmp"), recipe, out, resume="auto")
    train(recipe, out=out, resume="auto", quiet=True)
    assert_as_if_nothing_had_been(out, whole)


@pytest.mark.parametrize("change", [[], ["train.keep=1", "train.log_every=3"]], ids=["same", "what decides nothing"])
def test_resuming_a_finished_run_prints_so_and_changes_nothing(
    shards, whole, tmp_path, monkeypatch, no_training, capsys, change
):
    out = Path(shutil.copytree(whole, tmp_path / "run"))
    before = contents(out)
    monkeypatch.setattr(run_module, "open_data", lambda *_: pytest.fail("data was opened though nothing is to be done"))
    done = train(recipe_of(shards, *change), out=out, resume="auto", quiet=True)
    assert (done.final, done.step, done.trainer) == (out / "final", STEPS, None)
    assert "nothing was changed" in capsys.readouterr().out
    assert contents(out) == before


def test_a_finished_run_is_trained_longer_if_changes_are_allowed(shards, whole, tmp_path):
    out, longer = Path(shutil.copytree(whole, tmp_path / "run")), recipe_of(shards, f"train.steps={STEPS + 1}")
    assert train(longer, out=out, resume="auto", allow_changes=True, quiet=True).step == STEPS + 1
    assert verify_checkpoint(out / "final")["step"] == STEPS + 1
    assert len(losses(out)) == STEPS + 1


def test_a_checkpoint_is_on_disk_before_its_name_and_its_name_before_others_go(shards, whole, tmp_path, monkeypatch):
    """What a kill cannot show and a power cut would: the order of flushes, rename and prune."""
    out, order = stopped_after(whole, 4, tmp_path / "run"), []

    def record(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def hooked(path: Path, *rest: Any, **named: Any) -> Any:
            order.append((name, Path(path).name))
            return original(path, *rest, **named)

        patch.setattr(owner, name, hooked)

    with monkeypatch.context() as patch:
        for owner, name in ((files, "flush"), (Path, "rename"), (shutil, "rmtree")):
            record(owner, name)
        train(recipe_of(shards, "train.keep=2"), out=out, resume="auto", quiet=True)
    renamed = order.index(("rename", PARTIAL))
    flushed = {name for call, name in order[:renamed] if call == "flush"}
    assert flushed >= {path.name for path in step_folder(whole, 5).iterdir()}
    assert order[renamed - 1] == ("flush", PARTIAL)
    assert order[renamed + 1] == ("flush", "checkpoints")
    assert order.index(("rmtree", "step-00000003")) > renamed + 1


@pytest.mark.every
@pytest.mark.parametrize("number", range(200))
def test_a_run_killed_twice_at_random_ends_like_one_that_was_not(shards, whole, tmp_path, number):
    """A timer ends the process between any two instructions; the resumed run is killed as well."""
    draw, kept_two, out = random.Random(number), recipe_of(shards, "train.keep=2"), tmp_path / "run"
    times = [line["time"] for line in all_metrics(whole)]
    for resume in (None, "auto"):

        def act(seconds: float = draw.uniform(0.001, times[-1] - times[0]), resume: str | None = resume) -> None:
            signal.setitimer(signal.ITIMER_REAL, seconds)
            train(kept_two, out=out, resume=resume, quiet=True)

        assert in_child(act) in (0, signal.SIGALRM)  # a resumed run is shorter and may end before its timer
    train(kept_two, out=out, resume="auto", quiet=True)
    assert_as_if_nothing_had_been(out, whole)


def limited_to(size: int) -> Callable[..., None]:
    """Saves under a real limit of the kernel instead of a raised error: safetensors has errors of its own."""
    original = checkpoint.save_checkpoint

    def limited(*arguments: Any, **named: Any) -> None:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
        try:
            original(*arguments, **named)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    return limited


FULL = {
    "100,000 bytes left": (checkpoint, "save_checkpoint", limited_to(100_000)),
    "weights": (AdaPonderForCausalLM, "save_pretrained", full_disk),
    "manifest": (manifest, "replace_file", full_disk),
    "100 bytes left": (checkpoint, "save_checkpoint", limited_to(100)),
    "flush": (files, "flush", lambda path, flush=files.flush: (full_disk if PARTIAL in str(path) else flush)(path)),
    "rename": (Path, "rename", full_disk),
}


@pytest.mark.one_of(3)
@pytest.mark.parametrize("place", FULL)
def test_a_full_disk_is_named_and_the_checkpoint_before_stays_whole(recipe, whole, tmp_path, monkeypatch, place):
    out = stopped_after(whole, 4, tmp_path / "run")
    with monkeypatch.context() as patch:
        patch.setattr(*FULL[place])
        with pytest.raises(CheckpointError, match=r"step-00000005.*(No space left|File too large)"):
            train(recipe, out=out, resume="auto", quiet=True)
    assert complete_steps(out) == [1, 2, 3, 4]
    assert not list(out.rglob(".partial*"))
    train(recipe, out=out, resume="auto", quiet=True)
    assert_as_if_nothing_had_been(out, whole)


def forward_at(step: int, *, before: Callable[[Trainer], Any] | None = None, after: Any = None) -> Callable[..., Any]:
    """Returns ``Trainer._forward``; at ``step`` it calls ``before(trainer)`` or ``after(output)`` as well."""
    original = Trainer._forward

    def hooked(self: Trainer, *arguments: Any) -> Any:
        if before is not None and self.step == step:
            before(self)
        output = original(self, *arguments)
        if after is not None and self.step == step:
            after(output)
        return output

    return hooked


@pytest.mark.parametrize(
    ("named", "owner", "call"),
    [
        ("metrics.jsonl", Path, "open"),
        ("tensorboard", SummaryWriter, "flush"),
        ("a file of the run", Telemetry, "advance"),
    ],
)
def test_a_disk_that_fills_up_between_saves_ends_the_run(shards, whole, tmp_path, monkeypatch, named, owner, call):
    out, rarely = tmp_path / "run", recipe_of(shards, "train.save_every=0")
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_forward", forward_at(S0, before=lambda _: patch.setattr(owner, call, full_disk)))
        with pytest.raises(TrainingError, match=named) as refused:
            train(rarely, out=out, quiet=True)
    assert "\n" not in str(refused.value)
    assert complete_steps(out) == [FROZEN]
    train(rarely, out=out, resume="auto", quiet=True)
    assert_as_if_nothing_had_been(out, whole)


def test_tensorboard_shows_the_steps_of_a_resumed_run_once(recipe, whole, tmp_path):
    out = Path(shutil.copytree(whole, tmp_path / "run"))
    for folder in (out / "final", *(step_folder(out, step) for step in range(5, STEPS))):
        shutil.rmtree(folder)
    train(recipe, out=out, resume="auto", quiet=True)
    board = EventAccumulator(str(out / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    assert [event.step for event in board.Scalars("loss")] == list(range(STEPS))
    assert [event.value for event in board.Scalars("loss")] == pytest.approx(losses(whole), rel=1e-6)
    assert len(board.Scalars("halted/1")) == STEPS


@pytest.fixture
def no_training(monkeypatch):
    def never(*arguments: Any, **named: Any) -> Any:
        raise AssertionError("a model was built although nothing could be written")

    monkeypatch.setattr(run_module, "build_model", never)
    monkeypatch.setattr(Trainer, "train", never)


@pytest.mark.parametrize("call", ["mkdir", "open"])
def test_a_read_only_folder_is_refused_before_the_first_step(recipe, tmp_path, monkeypatch, no_training, call):
    """The error is raised by hand, because root may write anywhere."""
    out, original = tmp_path / "run", getattr(Path, call)

    def read_only(self: Path, *arguments: Any, **named: Any) -> Any:
        if self.is_relative_to(out):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self))
        return original(self, *arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr(Path, call, read_only)
        with pytest.raises(InputError, match=f"--out {out}"):
            train(recipe, out=out, quiet=True)


CHANGES = {
    "train.global_batch": ("4", "2"),
    "data.sequence": ("32", "16"),
    "model.iterations": ("3", "2"),
    "train.ponder_weight": ("1.0", "0.5"),
    "train.dtype": ("float32", "bfloat16"),
    "train.seed": ("0", "1"),
}


def stopped(step: int, damage: Callable[[Path], Any] = lambda folder: None) -> Callable[[Path, Path], Any]:
    """Builds a run folder that stopped after ``step``, with damage to the checkpoint of that step."""
    return lambda whole, out: damage(step_folder(stopped_after(whole, step, out), step))


def finished(damage: Callable[[Path], Any] = lambda folder: None) -> Callable[[Path, Path], Any]:
    return lambda whole, out: damage(Path(shutil.copytree(whole, out)))


def truncated(name: str) -> Callable[[Path], None]:
    return lambda folder: truncate(folder / name)


def torn_metrics(checkpoint: Path) -> None:
    with (checkpoint.parents[1] / "metrics.jsonl").open("a") as file:
        file.write('{"time": 1.0, "step": 4, "lo')


def resealed(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: reseal(folder, lambda state: state.update(changes))


class Resume(NamedTuple):
    """How a run folder is built, the recipe's overrides, the options of the resume, and the text it prints."""

    build: Callable[[Path, Path], Any]
    overrides: tuple[str, ...] = ()
    options: dict[str, Any] = {}
    printed: str = ""


RESUMES = {
    **{f"at step {step}": Resume(stopped(step)) for step in sorted({0, FROZEN, S0 - 1, S0, S0 + 1, S1, STEPS - 1})},
    "from a named checkpoint, though newer ones exist": Resume(
        stopped(STEPS - 1), options={"resume": S0}, printed=f"resuming at step {S0} from"
    ),
    "after a torn line of metrics": Resume(stopped(4, torn_metrics)),
    "with other settings that decide nothing": Resume(stopped(4), ("train.save_every=0", "train.keep=1")),
    "with another number of processes": Resume(
        stopped(4, resealed(world=2)), options={"allow_changes": True}, printed="processes: 2 → 1\n"
    ),
    "a damaged final model": Resume(finished(truncated(f"final/{WEIGHTS}")), printed=rf"skipped: .*final/{WEIGHTS}"),
    **{
        f"past a truncated {name}": Resume(
            stopped(5, truncated(name)), printed=rf"(?s)skipped: .*step-00000005/{name}.*resuming at step 4 from"
        )
        for name in (WEIGHTS, OPTIMIZER, STATE, MANIFEST, "config.json")
    },
}


@pytest.mark.one_of(3)
@pytest.mark.parametrize("name", RESUMES)
def test_a_run_resumes_like_one_that_never_stopped(shards, whole, tmp_path, capsys, name):
    case, out = RESUMES[name], tmp_path / "run"
    case.build(whole, out)
    options = {"resume": "auto"} | case.options
    if options["resume"] != "auto":
        options["resume"] = str(step_folder(out, options["resume"]))
    torch.manual_seed(1234)  # earlier random draws of the process must not matter
    train(recipe_of(shards, *case.overrides), out=out, quiet=True, **options)
    assert re.search(case.printed, capsys.readouterr().out)
    assert_as_if_nothing_had_been(out, whole)


class Refusal(NamedTuple):
    """How a run folder is built, options of ``train``, the error and the words in it, and the recipe's overrides."""

    build: Callable[[Path, Path], Any]
    options: dict[str, Any]
    error: type[AdaPonderError]
    named: str
    overrides: tuple[str, ...] = ()


def nothing(whole: Path, out: Path) -> None:
    pass


AUTO, LONGER = {"resume": "auto"}, (f"train.steps={STEPS + 1}",)
REFUSALS = {
    "a parent that does not exist": Refusal(nothing, {"out": "absent/run"}, InputError, "--out .*absent"),
    "a parent that is a file": Refusal(nothing, {"out": "file/run"}, InputError, "--out .*file"),
    "a file as folder": Refusal(nothing, {"out": "file"}, InputError, "--out .*file"),
    "a folder with something in it": Refusal(stopped(1), {}, InputError, "--out .*--resume auto"),
    "weights without a checkpoint": Refusal(nothing, {"weights_only": True}, InputError, "--weights-only"),
    "changes without a checkpoint": Refusal(nothing, {"allow_changes": True}, InputError, "--allow-changes"),
    "no such checkpoint": Refusal(stopped(1), {"resume": "OUT/nowhere"}, CheckpointError, "--resume .*nowhere"),
    "a run folder as checkpoint": Refusal(nothing, {"resume": "WHOLE"}, CheckpointError, "run folder"),
    "a named checkpoint with a truncated file": Refusal(
        stopped(5, truncated(WEIGHTS)), {"resume": "OUT/checkpoints/step-00000005"}, CheckpointError, WEIGHTS
    ),
    "other settings": Refusal(
        stopped(4),
        AUTO,
        TrainingError,
        "".join(f"(?=.*{name}: {before} → {now})" for name, (before, now) in CHANGES.items())
        + rf"([^→]*→){{{len(CHANGES)}}}[^→]*$",
        tuple(f"{name}={now}" for name, (_, now) in CHANGES.items()),
    ),
    "another model, though changes are allowed": Refusal(
        stopped(4), AUTO | {"allow_changes": True}, TrainingError, "model.iterations", ("model.iterations=2",)
    ),
    "another number of processes": Refusal(stopped(4, resealed(world=2)), AUTO, TrainingError, "processes: 2 → 1"),
    "other data of the same name": Refusal(stopped(4, resealed(data="0" * 64)), AUTO, TrainingError, "data"),
    "a finished run, longer": Refusal(
        finished(), AUTO, TrainingError, f"train.steps: {STEPS} → {STEPS + 1};.*--allow-changes", LONGER
    ),
    "a finished run, from its weights": Refusal(
        finished(), AUTO | {"weights_only": True}, InputError, "--weights-only", LONGER
    ),
    "a finished run without checkpoints": Refusal(
        lambda whole, out: shutil.copytree(whole / "final", out / "final"),
        AUTO | {"allow_changes": True},
        CheckpointError,
        "--weights-only",
        LONGER,
    ),
    "over a run, from its final model": Refusal(
        finished(), {"resume": "OUT/final", "weights_only": True}, InputError, "--out .*step-"
    ),
    "over a run, from another run": Refusal(
        finished(), {"resume": "WHOLE/checkpoints/step-00000004"}, InputError, "--out .*step-"
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_run_that_cannot_start_is_refused_and_changes_nothing(shards, whole, tmp_path, no_training, name):
    case = REFUSALS[name]
    (tmp_path / "file").write_text("not a folder")
    case.build(whole, tmp_path / "run")
    before = contents(tmp_path)
    options = {"out": "run"} | case.options
    options["out"] = tmp_path / options["out"]
    if "resume" in options:
        options["resume"] = options["resume"].replace("OUT", str(tmp_path / "run")).replace("WHOLE", str(whole))
    with pytest.raises(case.error, match=case.named):
        train(recipe_of(shards, *case.overrides), quiet=True, **options)
    assert contents(tmp_path) == before


def test_a_recipe_that_is_refused_leaves_the_folder_to_the_corrected_one(shards, tmp_path):
    with pytest.raises(TrainingError, match="micro_batch=3"):
        train(recipe_of(shards, "train.micro_batch=3"), out=tmp_path / "run", quiet=True)
    train(recipe_of(shards, "train.steps=3", "train.freeze_backbone_steps=0"), out=tmp_path / "run", quiet=True)


def test_pruning_never_counts_a_broken_checkpoint_as_one_that_is_kept(shards, whole, tmp_path):
    """One is kept, and the one of step 7 is broken: at every instant some whole checkpoint must be there."""
    out, kept_one = stopped_after(whole, 7, tmp_path / "run"), recipe_of(shards, "train.keep=1")
    for step in (5, 6, 7):
        truncate(step_folder(out, step) / WEIGHTS)
    assert killed_at(dies(Trainer, "_one_step", 2), kept_one, out, resume="auto")
    assert complete_steps(out)[-1:] == [5]
    train(kept_one, out=out, resume="auto", quiet=True)
    assert_as_if_nothing_had_been(out, whole)


def test_a_run_that_goes_back_keeps_what_it_saves_from_there(shards, whole, tmp_path):
    """An older checkpoint is named: the run that continues from it, not the one left behind, is resumed next."""
    out = stopped_after(whole, 7, tmp_path / "run")
    other = recipe_of(shards, "train.keep=2", "train.ponder_weight=0.5")
    older = str(step_folder(out, 2))
    assert killed_at(dies(Trainer, "_one_step", 3), other, out, resume=older, allow_changes=True)
    newest = newest_complete(out)[0]
    assert newest == step_folder(out, 4)
    assert verify_checkpoint(newest)["recipe"]["train"]["ponder_weight"] == 0.5


def test_a_manifest_that_lists_no_files_is_refused(whole, tmp_path):
    folder = step_folder(stopped_after(whole, 1, tmp_path / "run"), 1)
    for listed in ([], [STATE]):
        write_manifest(folder, listed, step=1)
        with pytest.raises(CheckpointError, match="not a manifest of a whole checkpoint"):
            verify_checkpoint(folder)


@pytest.mark.parametrize("missing", ["optimizer", "rng", "optimizer and rng of a final model"])
def test_without_optimizer_or_rng_only_the_weights_go_on(recipe, whole, tmp_path, missing):
    folder = step_folder(stopped_after(whole, 4, tmp_path / "run"), 4)
    if missing == "optimizer":
        (folder / OPTIMIZER).unlink()
    elif missing == "rng":
        reseal(folder, lambda state: state.pop("rng"))
    else:
        folder = whole / "final"
    with pytest.raises(CheckpointError, match="--weights-only"):
        train(recipe, out=tmp_path / "other", resume=str(folder), quiet=True)
    out = tmp_path / "new"
    assert killed_at(dies(Trainer, "_one_step", 2), recipe, out, resume=str(folder), weights_only=True)
    assert complete_steps(out) == [1], "it begins at step 0"
    backbone = [name for name in load_file(folder / WEIGHTS) if name.startswith("backbone.")]  # frozen in step 0
    saved, began = load_file(step_folder(out, 1) / WEIGHTS), load_file(folder / WEIGHTS)
    assert all(torch.equal(saved[name], began[name]) for name in backbone)


def signals_at(step: int, *numbers: int) -> Callable[..., Any]:
    """A step like any other, in the midst of which signals arrive."""
    return forward_at(step, after=lambda output: [os.kill(os.getpid(), number) for number in numbers])


@pytest.mark.parametrize(("number", "step"), [(signal.SIGTERM, 0), (signal.SIGINT, S0)])
def test_a_signal_stops_the_run_at_a_step_with_a_checkpoint(shards, whole, tmp_path, monkeypatch, capsys, number, step):
    rarely, out = recipe_of(shards, "train.save_every=0"), tmp_path / "run"
    handlers = [signal.getsignal(signal_number) for signal_number in (signal.SIGTERM, signal.SIGINT)]
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_forward", signals_at(step, number))
        done = train(rarely, out=out, quiet=True)
    assert done.final is None
    assert done.step == step + 1
    assert not (out / "final").exists()
    assert complete_steps(out)[-1] == step + 1
    assert "stopping after this step" in capsys.readouterr().err
    assert [signal.getsignal(signal_number) for signal_number in (signal.SIGTERM, signal.SIGINT)] == handlers
    train(rarely, out=out, resume="auto", quiet=True)
    assert_as_if_nothing_had_been(out, whole)


def test_a_signal_in_the_last_step_lets_the_run_finish(recipe, whole, tmp_path, monkeypatch):
    out = stopped_after(whole, STEPS - 1, tmp_path / "run")
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_forward", signals_at(STEPS - 1, signal.SIGTERM))
        assert train(recipe, out=out, resume="auto", quiet=True).final == out / "final"
    assert_as_if_nothing_had_been(out, whole)


def test_a_second_signal_exits_at_once(recipe, whole, tmp_path):
    out = tmp_path / "run"

    def act() -> None:
        Trainer._forward = signals_at(S0, signal.SIGTERM, signal.SIGINT)
        train(recipe, out=out, quiet=True)

    status = in_child(act)
    assert os.WIFEXITED(status)
    assert os.WEXITSTATUS(status) == 130
    assert complete_steps(out)[-1] == S0, "the step was not finished"
    train(recipe, out=out, resume="auto", quiet=True)
    assert_as_if_nothing_had_been(out, whole)


def bad_loss(value: float, step: int) -> Callable[..., Any]:
    return forward_at(step, after=lambda output: setattr(output, "loss", output.loss * value))


def bad_weight(value: float, step: int) -> Callable[..., Any]:
    return forward_at(step, before=lambda trainer: next(trainer.model.backbone.parameters()).data.fill_(value))


def assert_finite_checkpoints(run: Path, steps: list[int]) -> None:
    assert complete_steps(run) == steps
    for step in steps:
        for name in (WEIGHTS, OPTIMIZER):
            saved = load_file(step_folder(run, step) / name)
            assert [key for key, value in saved.items() if not value.isfinite().all()] == []
    assert not (run / "final").exists()


@pytest.mark.parametrize(
    ("poison", "value", "step", "save_every"),
    [(bad_loss, math.nan, FROZEN - 1, 1), (bad_weight, math.inf, STEPS - 1, 3)],
)
def test_a_step_that_is_not_a_number_ends_the_run_and_is_never_saved(
    shards, whole, tmp_path, monkeypatch, save_every, step, poison, value
):
    out, plan = tmp_path / "run", recipe_of(shards, f"train.save_every={save_every}")
    opened = Shards.open(shards, "train")
    sampler = Sampler(opened, sequence=32, global_batch=plan.train.global_batch, seed=plan.train.seed)
    windows = ", ".join(map(str, sampler.batch(step).windows.tolist()))
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_forward", poison(value, step))
        with pytest.raises(TrainingError, match=rf"step {step}: .*(nan|inf) on windows \[{windows}\]"):
            train(plan, out=out, quiet=True)
    good = [number for number in range(1, step + 1) if number % save_every == 0 or number == FROZEN]
    assert_finite_checkpoints(out, good)
    lines = [line for line in metrics(out) if "loss" in line]
    assert [line["loss"] for line in lines if line["step"] < step] == losses(whole)[:step]
    assert [line["step"] for line in lines] == list(range(step + 1)), "each step has one line"
    assert not math.isfinite(lines[-1]["loss"])
    assert re.search(rf'"step": {step}, .*"loss": (NaN|-?Infinity)', (out / "metrics.jsonl").read_text())
    train(plan, out=out, resume="auto", quiet=True)
    assert_as_if_nothing_had_been(out, whole)


def test_a_bad_step_is_shown_though_only_every_tenth_is_logged(shards, tmp_path, monkeypatch):
    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_forward", bad_loss(math.nan, S0))
        with pytest.raises(TrainingError, match=f"step {S0}:"):
            train(recipe_of(shards, "train.log_every=10"), out=out, quiet=True)
    assert [(line["step"], math.isnan(line["loss"])) for line in metrics(out)] == [(S0, True)]


def test_an_update_that_overflows_is_never_saved_though_its_gradient_was_finite(recipe, tmp_path, monkeypatch):
    """The gradient's norm does not see it: the weights themselves must be looked at before they are saved."""
    out, original, calls = tmp_path / "run", torch.optim.AdamW.step, itertools.count(1)

    def hooked(self: torch.optim.AdamW, *arguments: Any) -> None:
        original(self, *arguments)
        if next(calls) == S0 + 1:
            with torch.no_grad():
                self.param_groups[0]["params"][0].view(-1)[0] = math.inf

    with monkeypatch.context() as patch:
        patch.setattr(torch.optim.AdamW, "step", hooked)
        with pytest.raises((TrainingError, CheckpointError)):
            train(recipe, out=out, quiet=True)
    assert_finite_checkpoints(out, list(range(1, S0 + 1)))


@pytest.mark.parametrize(
    ("before", "now", "changes"),
    [
        ("sqrt(d)", "sqrt(d)", []),
        ("sqrt(d)", "4.0", []),
        (4.0, "sqrt(2.5 d)", ["model.embedding_scale: 4.0 → sqrt(2.5 d)"]),
    ],
)
def test_embedding_scales_are_compared_as_the_numbers_they_mean(recipe, shards, before, now, changes):
    recorded = json.loads(json.dumps(recipe.as_dict()))
    recorded["model"]["embedding_scale"] = before
    assert recipe_changes(recorded, recipe_of(shards, f"model.embedding_scale={now}")) == changes


def test_a_resumed_run_draws_the_same_dropout(shards, whole, tmp_path):
    dropping = recipe_of(shards, "model.backbone.hidden_dropout=0.2", "train.eval_every=3")
    train(dropping, out=tmp_path / "whole", quiet=True)
    assert losses(tmp_path / "whole") != losses(whole), "dropout must act for this to mean anything"
    out = stopped_after(tmp_path / "whole", S0 + 1, tmp_path / "resumed")
    torch.manual_seed(1234)
    train(dropping, out=out, resume="auto", quiet=True)
    assert_as_if_nothing_had_been(out, tmp_path / "whole")


def test_each_process_resumes_its_own_random_state(recipe, whole, tmp_path, capsys):
    folder = step_folder(stopped_after(whole, 4, tmp_path / "run"), 4)
    sampler = sampler_of(recipe, Shards.open(Path(recipe.data.source), "train"))
    saved = [{"cpu": torch.Generator().manual_seed(seed).get_state().numpy().tobytes().hex()} for seed in (1, 2)]

    def start(rank: int) -> Start:
        options = {"weights_only": False, "allow_changes": False}
        return find_start(recipe, folder, str(folder), sampler, World(rank, 2), **options)

    reseal(folder, lambda state: state.update(world=2, rng=saved))
    assert [start(rank).random_state for rank in range(2)] == saved
    reseal(folder, lambda state: state.update(rng=saved[:1]))
    capsys.readouterr()
    start(0)
    assert "random states of 1 of 2 processes" in capsys.readouterr().out


def test_a_second_run_in_the_same_folder_names_the_first(recipe, tmp_path, no_training):
    out = tmp_path / "run"
    with locked_run_folder(out, World(), None):
        for resume in (None, "auto"):
            with pytest.raises(InputError, match=f"--out {out} .*process {os.getpid()} on "):
                train(recipe, out=out, resume=resume, quiet=True)
