"""Kill it, fill the disk, flip a byte, poison a step: the run ends as if nothing had been (promises 1 to 14)."""

from __future__ import annotations

import errno
import fcntl
import functools
import itertools
import json
import math
import os
import random
import re
import resource
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file

import adaponder.training
from adaponder import AdaPonderError, AdaPonderForCausalLM, files
from adaponder.backbones.shape import shape_of
from adaponder.checkpoints import manifest
from adaponder.checkpoints.manifest import write_manifest
from adaponder.data import Sampler, Shards
from adaponder.errors import CheckpointError, InputError, TrainingError
from adaponder.ops.vocab_expectation import torch as vocabulary_op
from adaponder.recipes import Recipe
from adaponder.training import checkpoint
from adaponder.training import run as run_module
from adaponder.training.checkpoint import newest_complete, step_folder, verify_checkpoint
from adaponder.training.data import sampler_of
from adaponder.training.distributed import World
from adaponder.training.loop import Trainer
from adaponder.training.resume import Start, find_start, recipe_changes
from adaponder.training.run import owned, train
from adaponder.training.telemetry import Telemetry
from training_support import corpus, losses, small
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
        if key not in known:
            known[key] = shape_of(config)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: None)
        patch.setattr("adaponder.training.loop.shape_of", remembered)
        yield


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> Path:
    return corpus(tmp_path_factory.mktemp("corpus"))


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


# --- looking at runs -----------------------------------------------------------------------------------------------


def metrics(run: Path) -> list[dict[str, Any]]:
    return [{name: value for name, value in line.items() if name not in CLOCKED} for line in all_metrics(run)]


def assert_as_if_nothing_had_been(run: Path, whole: Path) -> None:
    """The same final bits, and each step's line once with the same figures."""
    assert [line["step"] for line in metrics(run) if "loss" in line] == list(range(STEPS))
    assert metrics(run) == metrics(whole)
    assert_same_bits(load_file(run / "final" / WEIGHTS), load_file(whole / "final" / WEIGHTS))
    assert not list(run.rglob(".partial*"))


def assert_same_bits(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name, value in expected.items() if not torch.equal(found[name], value)] == []


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
        try:
            found.append(verify_checkpoint(folder)["step"])
        except CheckpointError:
            continue
    return found


def reseal(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Changes a checkpoint's state as if it had been saved so."""
    state = json.loads((folder / STATE).read_text())
    change(state)
    (folder / STATE).write_text(json.dumps(state))
    write_manifest(folder, step=state["step"])


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


# --- children that die ---------------------------------------------------------------------------------------------


def in_child(act: Callable[[], Any]) -> int:
    """Runs ``act`` in a fork of this warm process; returns its wait status. A child that hangs dies of SIGALRM."""
    torch.set_num_threads(1)
    child = os.fork()
    if child == 0:
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(120)
            act()
            os._exit(0)
        except BaseException:
            traceback.print_exc(file=sys.__stderr__)
            os._exit(1)
    return os.waitpid(child, 0)[1]


def killed(status: int) -> bool:
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def before_file(event: str, ending: str, number: int = 1, *, write: bool = False) -> Callable[[], None]:
    """Death right before the ``number``-th time that ``event`` (of ``sys.audit``) touches a path with that ending."""

    def arm() -> None:
        calls = itertools.count(1)

        def hook(name: str, arguments: tuple) -> None:
            if name != event or not str(arguments[0]).endswith(ending):
                return
            if write and "w" not in str(arguments[1]):
                return
            if next(calls) == number:
                die()

        sys.addaudithook(hook)

    return arm


def around_call(owner: Any, name: str, number: int, *, after: bool) -> Callable[[], None]:
    """Death right before or after the ``number``-th call."""

    def arm() -> None:
        original, calls = getattr(owner, name), itertools.count(1)

        def hooked(*arguments: Any, **named: Any) -> Any:
            mine = next(calls) == number
            if mine and not after:
                die()
            result = original(*arguments, **named)
            if mine and after:
                die()
            return result

        setattr(owner, name, hooked)

    return arm


def half_a_manifest() -> None:
    """Death with the fifth manifest half on disk."""
    original, calls = Path.write_bytes, itertools.count(1)

    def hooked(self: Path, data: bytes) -> int:
        if self.name == f"{MANIFEST}.tmp" and next(calls) == 5:
            original(self, data[: len(data) // 2])
            die()
        return original(self, data)

    Path.write_bytes = hooked


class Point(NamedTuple):
    """Where a run dies, and the step whose checkpoint must be the newest whole one then."""

    name: str
    arm: Callable[[], None]
    newest: int


# The n-th save is the one after step n. Two are kept: the save of step 5 prunes that of step 3.
POINTS = [
    Point("before the folder of a save is made", before_file("os.mkdir", ".partial-step-00000005"), 4),
    Point("after the weights", around_call(AdaPonderForCausalLM, "save_pretrained", 5, after=True), 4),
    Point("after the optimizer", around_call(checkpoint, "save_file", 5, after=True), 4),
    Point("before the state", before_file("open", f"step-00000005/{STATE}", write=True), 4),
    Point("before the manifest", before_file("open", f"step-00000005/{MANIFEST}.tmp", write=True), 4),
    Point("within the manifest", half_a_manifest, 4),
    Point("before the rename", before_file("os.rename", ".partial-step-00000005"), 4),
    Point("after the rename, before the parent is flushed", before_file("open", "/checkpoints", 5), 5),
    Point("within a prune", before_file("os.remove", OPTIMIZER, 3), 5),
    Point("before the final rename", before_file("os.rename", ".partial-final"), 7),
    # The folder's names are flushed when the recipe is written, and then here.
    Point("after the final rename", before_file("open", "/run", 2), 7),
    Point("between backward and update", around_call(torch.nn.utils, "clip_grad_norm_", 6, after=True), 5),
    Point("between update and save", around_call(torch.optim.AdamW, "step", 6, after=True), 5),
    Point("between a line of metrics and its save", around_call(Telemetry, "log", 6, after=True), 5),
    Point("before the first step", around_call(Trainer, "_one_step", 1, after=False), 0),
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


def killed_at(point: Callable[[], None], recipe: Recipe, out: Path, **options: Any) -> bool:
    """Trains in a child that dies at the point; returns whether it was reached."""

    def act() -> None:
        point()
        train(recipe, out=out, quiet=True, **options)

    return killed(in_child(act))


def test_a_resume_that_is_killed_loses_no_line_of_metrics(recipe, whole, tmp_path):
    """The history is rewritten when a run resumes: it dies before the new one replaces the old."""
    out = stopped_after(whole, 4, tmp_path / "run")
    assert killed_at(before_file("os.rename", "metrics.jsonl.tmp"), recipe, out, resume="auto")
    train(recipe, out=out, resume="auto", quiet=True)
    assert_as_if_nothing_had_been(out, whole)


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Every file's bytes and time of change, by its name in ``folder``; whose the folder is does not count."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"]
    return {str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


@pytest.mark.parametrize(
    "change", [[], ["train.keep=1", "train.log_every=3"]], ids=["the same", "what decides nothing"]
)
def test_a_finished_run_that_is_resumed_says_so_and_stays_as_it_is(
    shards, whole, tmp_path, monkeypatch, no_training, capsys, change
):
    out = tmp_path / "run"
    shutil.copytree(whole, out)
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


def test_a_checkpoint_reaches_the_disk_before_its_name_and_its_name_before_older_ones_go(
    shards, whole, tmp_path, monkeypatch
):
    """What a kill cannot show and a power cut would: the order of flushes, rename and prune."""
    out, order = stopped_after(whole, 4, tmp_path / "run"), []
    rename, remove = Path.rename, shutil.rmtree

    def synced(handle: int) -> None:
        order.append(("flushed", Path(os.readlink(f"/proc/self/fd/{handle}")).name))

    def renamed(self: Path, target: Path) -> Path:
        order.append(("renamed", self.name))
        return rename(self, target)

    def removed(path: Path, **named: Any) -> None:
        order.append(("removed", Path(path).name))
        remove(path, **named)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", synced)
        patch.setattr(Path, "rename", renamed)
        patch.setattr(shutil, "rmtree", removed)
        train(recipe_of(shards, "train.keep=2"), out=out, resume="auto", quiet=True)
    saved, partial = step_folder(whole, 5), ".partial-step-00000005"
    named = order.index(("renamed", partial))
    assert {name for act, name in order[:named] if act == "flushed"} >= {path.name for path in saved.iterdir()}
    assert order[named - 1] == ("flushed", partial)
    assert order[named + 1] == ("flushed", "checkpoints")
    assert order.index(("removed", "step-00000003")) > named + 1


FILE_EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "shutil.rmtree"}


def at_event(kind: str, reached: Callable[[int], None]) -> None:
    """Calls ``reached(n)`` at the n-th line that the training package runs, or the n-th touch of a file."""
    calls, home = itertools.count(1), str(Path(adaponder.training.__file__).parent)

    def each_line(frame: Any, event: str, argument: Any) -> Any:
        if event == "line":
            reached(next(calls))
        return each_line

    def audit(name: str, arguments: tuple) -> None:
        if name in FILE_EVENTS:
            reached(next(calls))

    if kind == "line":
        sys.settrace(lambda frame, *_: each_line if frame.f_code.co_filename.startswith(home) else None)
    else:
        sys.addaudithook(audit)


@pytest.fixture(scope="module")
def events(shards, tmp_path_factory) -> dict[str, int]:
    """How many events of each kind a whole run has."""
    found = {}
    for kind in ("line", "file"):
        folder = tmp_path_factory.mktemp(kind)

        def act(kind: str = kind, folder: Path = folder) -> None:
            last = [0]
            at_event(kind, lambda number: last.__setitem__(0, number))
            train(recipe_of(shards, "train.keep=2"), out=folder / "run", quiet=True)
            (folder / "events").write_text(str(last[0]))

        assert in_child(act) == 0
        found[kind] = int((folder / "events").read_text())
    return found


@pytest.mark.every
@pytest.mark.parametrize("number", range(200))
def test_a_run_killed_twice_at_random_ends_like_one_that_was_not(shards, whole, events, tmp_path, number):
    """Any line of the training package or any touch of a file; the resumed run is killed as well."""
    draw = random.Random(number)
    kept_two, out = recipe_of(shards, "train.keep=2"), tmp_path / "run"
    for resume in (None, "auto"):
        kind = draw.choice(("line", "file"))
        deadly = draw.randrange(1, int(0.95 * events[kind]))

        def act(kind: str = kind, deadly: int = deadly, resume: str | None = resume) -> None:
            at_event(kind, lambda number: die() if number == deadly else None)
            train(kept_two, out=out, resume=resume, quiet=True)

        status = in_child(act)
        # A resumed run is shorter and may be over before its event.
        assert killed(status) or (resume and status == 0)
    train(kept_two, out=out, resume="auto", quiet=True)
    assert_as_if_nothing_had_been(out, whole)


# --- 3, 4: nowhere to write ----------------------------------------------------------------------------------------


def full_disk(*arguments: Any, **named: Any) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def full_device() -> Any:
    return open("/dev/full", "ab", buffering=0)


def full_for(name: str) -> Callable[..., int]:
    original = Path.write_text
    return lambda self, *rest, **named: (full_disk if self.name == name else original)(self, *rest, **named)


def full_within(folder: str) -> Callable[[Path], None]:
    original = files.flush
    return lambda path: (full_disk if folder in str(path) else original)(path)


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
    "weights": (AdaPonderForCausalLM, "save_pretrained", full_disk),
    "100,000 bytes left": (checkpoint, "save_checkpoint", limited_to(100_000)),
    "optimizer": (checkpoint, "save_file", full_disk),
    "state": (Path, "write_text", full_for(STATE)),
    "manifest": (manifest, "replace_file", full_disk),
    "100 bytes left": (checkpoint, "save_checkpoint", limited_to(100)),
    "flush": (files, "flush", full_within(".partial-step-00000005")),
    "rename": (Path, "rename", full_disk),
    "4096 bytes left": (checkpoint, "save_checkpoint", limited_to(4096)),
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


@pytest.mark.parametrize(
    ("named", "attribute"),
    [("metrics.jsonl", "file.file"), ("tensorboard/events", "board.file.file"), ("a file of the run", "advance")],
)
def test_a_disk_that_fills_up_between_saves_ends_the_run_in_one_line(
    shards, whole, tmp_path, monkeypatch, named, attribute
):
    out, original = tmp_path / "run", Trainer._forward
    rarely = recipe_of(shards, "train.save_every=0")

    def hooked(self: Trainer, *arguments: Any) -> Any:
        if self.step == S0:
            full = full_disk if attribute == "advance" else full_device()
            *path, last = attribute.split(".")
            setattr(functools.reduce(getattr, path, self.telemetry), last, full)
        return original(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_forward", hooked)
        with pytest.raises(TrainingError, match=f"{named}.* No space left") as refused:
            train(rarely, out=out, quiet=True)
    assert "\n" not in str(refused.value)
    assert complete_steps(out) == [FROZEN]
    train(rarely, out=out, resume="auto", quiet=True)
    assert_as_if_nothing_had_been(out, whole)


@pytest.mark.parametrize("name", ["recipe.yaml", "metrics.jsonl"])
def test_a_disk_that_is_full_when_a_run_resumes_loses_nothing(recipe, whole, tmp_path, monkeypatch, name):
    out, original = stopped_after(whole, 4, tmp_path / "run"), os.replace
    shutil.copy(whole / "recipe.yaml", out)
    before = contents(out)
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda new, old: full_disk() if old.name == name else original(new, old))
        with pytest.raises(TrainingError, match=name):
            train(recipe, out=out, resume="auto", quiet=True)
    kept = {file: found[0] for file, found in contents(out).items() if "tensorboard" not in file}
    assert kept == {file: found[0] for file, found in before.items()}
    train(recipe, out=out, resume="auto", quiet=True)
    assert_as_if_nothing_had_been(out, whole)


def test_a_clock_that_is_set_back_hides_no_step_from_tensorboard(recipe, whole, tmp_path, monkeypatch):
    """A run that stops after step 4, then one under an older clock that stops after 6, then one in the same second."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    out, original, now = tmp_path / "run", Trainer._after_step, time.time()
    for stop, clock in ((5, now), (7, now - 86_400), (STEPS + 1, now - 86_400)):

        def after(self: Trainer, end: int, stop: int = stop) -> bool:
            return original(self, end) or self.step == stop

        with monkeypatch.context() as patch:
            patch.setattr(Trainer, "_after_step", after)
            patch.setattr("adaponder.training.telemetry.time.time", lambda clock=clock: clock)
            train(recipe, out=out, resume="auto", quiet=True)
    board = EventAccumulator(str(out / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    shown = board.Scalars("loss")
    assert [event.step for event in shown] == list(range(STEPS))
    assert [event.value for event in shown] == pytest.approx(losses(whole), rel=1e-6)
    assert len(board.Scalars("halted/1")) == STEPS
    assert_as_if_nothing_had_been(out, whole)


@pytest.fixture
def no_training(monkeypatch):
    """Fails the test if a model is as much as built."""

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


# --- 4, 5, 11, 12: runs that resume, and runs that are refused ----------------------------------------------------

ALL_FILES = (WEIGHTS, OPTIMIZER, STATE, MANIFEST, "config.json")
CHANGES = {
    "train.global_batch": ("4", "2"),
    "data.sequence": ("32", "16"),
    "model.iterations": ("3", "2"),
    "train.ponder_weight": ("1.0", "0.5"),
    "train.dtype": ("float32", "bfloat16"),
    "train.k_max": ("0.5", "0.25"),
    "train.seed": ("0", "1"),
    "train.lr": ("0.01", "0.02"),
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


def older_recipe(folder: Path) -> None:
    reseal(folder, lambda state: state["recipe"]["model"].update(embedding_scale=None))


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
    "a recipe older than recorded embedding scales": Resume(stopped(4, older_recipe)),
    "with another number of processes": Resume(
        stopped(4, resealed(world=2)), options={"allow_changes": True}, printed="processes: 2 → 1\n"
    ),
    "a damaged final model": Resume(finished(truncated(f"final/{WEIGHTS}")), printed=rf"skipped: .*final/{WEIGHTS}"),
    **{
        f"past a truncated {name}": Resume(
            stopped(5, truncated(name)), printed=rf"(?s)skipped: .*step-00000005/{name}.*resuming at step 4 from"
        )
        for name in ALL_FILES
    },
}


@pytest.mark.one_of(2)
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


def only_final(whole: Path, out: Path) -> None:
    shutil.copytree(whole / "final", out / "final")


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
    **{
        f"a named checkpoint with a truncated {name}": Refusal(
            stopped(5, truncated(name)),
            {"resume": "OUT/checkpoints/step-00000005"},
            CheckpointError,
            f"step-00000005/{name}",
        )
        for name in ALL_FILES
    },
    **{
        f"other {' '.join(fields)}": Refusal(
            stopped(4),
            AUTO,
            TrainingError,
            "".join(f"(?=.* {name}: {' → '.join(CHANGES[name])};)" for name in fields)
            + rf"([^→]*→){{{len(fields)}}}[^→]*$",
            tuple(f"{name}={CHANGES[name][1]}" for name in fields),
        )
        for fields in (*([name] for name in CHANGES), list(CHANGES))
    },
    "another number of processes": Refusal(
        stopped(4, resealed(world=2)), AUTO, TrainingError, "in processes: 2 → 1; [^→]*$"
    ),
    "other data of the same name": Refusal(
        stopped(4, resealed(data="0" * 64)), AUTO, TrainingError, "in the data itself; "
    ),
    "a finished run, longer": Refusal(
        finished(), AUTO, TrainingError, f"train.steps: {STEPS} → {STEPS + 1};.*--allow-changes", LONGER
    ),
    "a finished run, from its weights": Refusal(
        finished(), AUTO | {"weights_only": True}, InputError, "--weights-only", LONGER
    ),
    "a finished run without checkpoints": Refusal(
        only_final, AUTO | {"allow_changes": True}, CheckpointError, "--weights-only", LONGER
    ),
    "over a run, from its final model": Refusal(
        finished(), {"resume": "OUT/final", "weights_only": True}, InputError, "--out .*step-"
    ),
    "over a run, from other weights": Refusal(
        finished(), {"resume": "WHOLE/checkpoints/step-00000004", "weights_only": True}, InputError, "--out .*step-"
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


# --- 5, 6, 7: checkpoints that are not what was written ------------------------------------------------------------


def test_pruning_never_counts_a_broken_checkpoint_as_one_that_is_kept(shards, whole, tmp_path):
    """One is kept, and the one of step 7 is broken: at every instant some whole checkpoint must be there."""
    out, kept_one = stopped_after(whole, 7, tmp_path / "run"), recipe_of(shards, "train.keep=1")
    for step in (5, 6, 7):
        truncate(step_folder(out, step) / WEIGHTS)
    assert killed_at(around_call(Trainer, "_one_step", 2, after=False), kept_one, out, resume="auto")
    assert complete_steps(out)[-1:] == [5]
    train(kept_one, out=out, resume="auto", quiet=True)
    assert_as_if_nothing_had_been(out, whole)


def test_a_run_that_goes_back_keeps_what_it_saves_from_there(shards, whole, tmp_path):
    """An older checkpoint is named: the run that continues from it, not the one left behind, is resumed next."""
    out = stopped_after(whole, 7, tmp_path / "run")
    other = recipe_of(shards, "train.keep=2", "train.ponder_weight=0.5")
    point, older = around_call(Trainer, "_one_step", 3, after=False), str(step_folder(out, 2))
    assert killed_at(point, other, out, resume=older, allow_changes=True)
    newest = newest_complete(out)[0]
    assert newest == step_folder(out, 4)
    assert verify_checkpoint(newest)["recipe"]["train"]["ponder_weight"] == 0.5


@pytest.mark.parametrize("name", [WEIGHTS, OPTIMIZER, STATE, "config.json"])
@pytest.mark.parametrize("place", [0.0, 0.5, 1.0])
def test_one_flipped_byte_is_found_and_its_file_named(whole, tmp_path, name, place):
    folder = step_folder(stopped_after(whole, 2, tmp_path / "run"), 2)
    content = bytearray((folder / name).read_bytes())
    content[int(place * (len(content) - 1))] ^= 1
    (folder / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=name):
        verify_checkpoint(folder)
    assert newest_complete(tmp_path / "run")[0] == step_folder(tmp_path / "run", 1)


@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.every), 7])
def test_one_flipped_byte_of_the_manifest_is_found_or_harmless(whole, tmp_path, step):
    """One byte after the other; other errors than ours would end an automatic resume that has an older one to go to."""
    folder = step_folder(stopped_after(whole, 1, tmp_path / "run"), 1)
    state, manifest = verify_checkpoint(folder), (folder / MANIFEST).read_bytes()
    found = 0
    places = range(0, len(manifest), step)
    for place in places:
        flipped = bytearray(manifest)
        flipped[place] ^= 1
        (folder / MANIFEST).write_bytes(flipped)
        try:
            assert verify_checkpoint(folder) == state
        except CheckpointError:
            found += 1
    assert found > len(places) // 2


def test_a_manifest_that_lists_no_files_vouches_for_none(whole, tmp_path):
    folder = step_folder(stopped_after(whole, 1, tmp_path / "run"), 1)
    manifest = json.loads((folder / MANIFEST).read_text())
    for listed in ({}, {STATE: manifest["files"][STATE]}):
        (folder / MANIFEST).write_text(json.dumps(manifest | {"files": listed}))
        with pytest.raises(CheckpointError, match=str(folder)):
            verify_checkpoint(folder)


@pytest.mark.parametrize("missing", ["optimizer", "rng", "optimizer and rng of a final model"])
def test_without_optimizer_or_rng_only_the_weights_go_on(recipe, whole, tmp_path, monkeypatch, missing):
    folder, original, began = step_folder(stopped_after(whole, 4, tmp_path / "run"), 4), Trainer.train, {}
    if missing == "optimizer":
        (folder / OPTIMIZER).unlink()
    elif missing == "rng":
        reseal(folder, lambda state: state.pop("rng"))
    else:
        folder = whole / "final"
    with pytest.raises(CheckpointError, match=rf"{folder.name}.*--weights-only"):
        train(recipe, out=tmp_path / "other", resume=str(folder), quiet=True)

    def watched(self: Trainer) -> bool:
        began.update({name: value.clone() for name, value in self.model.state_dict().items()})
        assert self.step == 0
        return original(self)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "train", watched)
        assert train(recipe, out=tmp_path / "new", resume=str(folder), weights_only=True, quiet=True).step == STEPS
    assert [line["step"] for line in metrics(tmp_path / "new") if "loss" in line] == list(range(STEPS))
    assert_same_bits(began, AdaPonderForCausalLM.from_pretrained(folder).state_dict())


# --- 8: signals ----------------------------------------------------------------------------------------------------


def signals_at(step: int, *numbers: int) -> Callable[[Trainer], None]:
    """A step like any other, in the midst of which signals arrive."""
    original = Trainer._forward

    def hooked(self: Trainer, *arguments: Any) -> Any:
        output = original(self, *arguments)
        if self.step == step:
            for number in numbers:
                os.kill(os.getpid(), number)
        return output

    return hooked


@pytest.mark.one_of(2)
@pytest.mark.parametrize(
    ("number", "step"), [(signal.SIGTERM, 0), (signal.SIGINT, FROZEN - 1), (signal.SIGTERM, S0), (signal.SIGINT, S0)]
)
def test_a_signal_stops_at_the_step_boundary_with_a_checkpoint(
    shards, whole, tmp_path, monkeypatch, capsys, number, step
):
    rarely, out = recipe_of(shards, "train.save_every=0"), tmp_path / "run"
    handlers = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)]
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_forward", signals_at(step, number))
        done = train(rarely, out=out, quiet=True)
    assert done.final is None
    assert done.step == step + 1
    assert not (out / "final").exists()
    assert complete_steps(out)[-1] == step + 1
    assert "stopping after this step" in capsys.readouterr().err
    assert [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)] == handlers
    train(rarely, out=out, resume="auto", quiet=True)
    assert_as_if_nothing_had_been(out, whole)


def test_a_signal_in_the_last_step_lets_the_run_finish(recipe, whole, tmp_path, monkeypatch):
    out = stopped_after(whole, STEPS - 1, tmp_path / "run")
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_forward", signals_at(STEPS - 1, signal.SIGTERM))
        assert train(recipe, out=out, resume="auto", quiet=True).final == out / "final"
    assert_as_if_nothing_had_been(out, whole)


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_a_second_signal_exits_at_once(recipe, whole, tmp_path, second):
    out = tmp_path / "run"

    def act() -> None:
        Trainer._forward = signals_at(S0, signal.SIGTERM, second)
        train(recipe, out=out, quiet=True)

    status = in_child(act)
    assert os.WIFEXITED(status)
    assert os.WEXITSTATUS(status) == 130
    assert complete_steps(out)[-1] == S0, "the step was not finished"
    train(recipe, out=out, resume="auto", quiet=True)
    assert_as_if_nothing_had_been(out, whole)


# --- 9: not a number -----------------------------------------------------------------------------------------------


def bad_loss(value: float, step: int) -> Callable[..., Any]:
    original = Trainer._forward

    def hooked(self: Trainer, *arguments: Any) -> Any:
        output = original(self, *arguments)
        if self.step == step:
            output.loss = output.loss * value
        return output

    return hooked


def bad_weight(value: float, step: int) -> Callable[..., Any]:
    original = Trainer._forward

    def hooked(self: Trainer, *arguments: Any) -> Any:
        if self.step == step:
            with torch.no_grad():
                next(self.model.backbone.parameters())[:] = value
        return original(self, *arguments)

    return hooked


def assert_finite_checkpoints(run: Path, steps: list[int]) -> None:
    assert complete_steps(run) == steps
    for step in steps:
        for name in (WEIGHTS, OPTIMIZER):
            saved = load_file(step_folder(run, step) / name)
            assert [key for key, value in saved.items() if not value.isfinite().all()] == []
    assert not (run / "final").exists()


@pytest.mark.one_of(2)
@pytest.mark.parametrize(
    ("poison", "value", "step", "save_every"),
    [
        (bad_loss, math.nan, FROZEN - 1, 1),
        (bad_loss, math.nan, S0 + 1, 3),
        (bad_loss, math.inf, STEPS - 1, 1),
        (bad_weight, math.nan, FROZEN - 1, 3),
        (bad_weight, math.inf, S0 + 1, 1),
        (bad_weight, math.nan, STEPS - 1, 3),
    ],
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


# --- 10: gates that collapse ---------------------------------------------------------------------------------------


STILL = ("train.halt_before_ponder=true", "train.gate_lr=1e-6", "train.save_every=0")
SINKING = ("model.tau=0.45", "train.gate_lr=1e-2", "train.ponder_start=0")


@pytest.mark.parametrize(
    ("bias", "overrides", "warning", "depth"),
    [
        (-20, STILL, "every token halts after one", 1.0),
        (20, STILL, "no token halts early", 3.0),
        (20, (*STILL, "train.ponder_weight=0"), None, 3.0),  # nothing asks these gates to halt tokens
        (0, (*STILL, *SINKING), None, None),
    ],
)
def test_collapsed_gates_are_warned_of_once_and_shown(shards, tmp_path, capsys, bias, overrides, warning, depth):
    train(small(shards, f"model.gate_bias={bias}", *overrides), out=tmp_path / "run", quiet=True)
    printed, lines = capsys.readouterr().out, metrics(tmp_path / "run")
    depths = [line["mean_depth"] for line in lines if "loss" in line]
    assert printed.count("warning: ") == (warning is not None)
    assert warning is None or warning in printed
    assert depth is None or set(depths) == {depth}
    assert depth is not None or 1.1 < sum(depths) / len(depths) < 2.9
    assert depth != 1.0 or lines[-1]["validation_depth"] == 1.0


# --- 11: a resumed run that would differ ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "was", "now", "told"),
    [
        ("adaponder", None, None, []),
        ("ponder", None, "sqrt(d)", []),
        ("loop", None, None, []),
        ("ponder", "sqrt(d)", "4.0", []),
        ("loop", 4.0, None, ["model.embedding_scale: 4.0 → sqrt(2.5 d)"]),
        ("vanilla", None, "1.0", []),
        *((method, None, None, ["model.embedding_scale: 1.0 → sqrt(d)"]) for method in ("vanilla", "mor", "ouro")),
        ("vanilla", None, "sqrt(2.5 d)", ["model.embedding_scale: 1.0 → sqrt(2.5 d)"]),
    ],
)
def test_embedding_scales_are_compared_as_the_numbers_they_mean(shards, method, was, now, told):
    scale = [] if now is None else [f"model.embedding_scale={now}"]
    recipe = small(shards, *scale, method=method)
    before = json.loads(json.dumps(recipe.as_dict()))
    before["model"]["embedding_scale"] = was
    assert recipe_changes(before, recipe) == told


# bfloat16 is for GPUs: on a CPU the run computes in float32 and says so, hence float64 stands in for another precision.
EFFECTIVE = [f"{name}={now}" for name, (_, now) in CHANGES.items() if name != "train.dtype"] + ["train.dtype=float64"]


@pytest.mark.one_of(3)
@pytest.mark.parametrize("change", EFFECTIVE)
def test_a_change_that_is_allowed_takes_effect_or_is_refused_by_name(shards, whole, tmp_path, change):
    out, changed = stopped_after(whole, 4, tmp_path / "run"), recipe_of(shards, change, "train.save_every=0")

    def act() -> None:
        try:
            train(changed, out=out, resume="auto", allow_changes=True, quiet=True)
        except AdaPonderError as refusal:
            (tmp_path / "refusal").write_text(str(refusal))

    assert in_child(act) == 0
    if (tmp_path / "refusal").exists():
        assert change.startswith("model.iterations"), "only the number of gates is fixed by the weights"
        assert "model.iterations" in (tmp_path / "refusal").read_text()
        return
    assert (out / "final" / WEIGHTS).exists()
    assert len(losses(out)) == STEPS
    assert losses(out)[:4] == losses(whole)[:4]
    assert losses(out)[4:] != losses(whole)[4:], "the change was ignored"


# --- 12: resume at every boundary ----------------------------------------------------------------------------------


def test_a_resumed_run_draws_the_same_dropout(shards, whole, tmp_path):
    dropping = recipe_of(shards, "model.backbone.hidden_dropout=0.2", "train.eval_every=3")
    train(dropping, out=tmp_path / "whole", quiet=True)
    assert losses(tmp_path / "whole") != losses(whole), "dropout must act for this to mean anything"
    for step in (FROZEN, S0 + 1):
        out = stopped_after(tmp_path / "whole", step, tmp_path / f"from-{step}")
        torch.manual_seed(step)
        train(dropping, out=out, resume="auto", quiet=True)
        assert_as_if_nothing_had_been(out, tmp_path / "whole")


def test_each_process_goes_on_from_its_own_random_state(recipe, whole, tmp_path, capsys):
    folder = step_folder(stopped_after(whole, 4, tmp_path / "run"), 4)
    sampler = sampler_of(recipe, Shards.open(Path(recipe.data.source), "train"))
    states = [torch.Generator().manual_seed(seed).get_state() for seed in (1, 2)]
    saved = [{"cpu": state.numpy().tobytes().hex()} for state in states]

    def start(rank: int) -> Start:
        options = {"weights_only": False, "allow_changes": False}
        return find_start(recipe, folder, str(folder), sampler, World(rank, 2), **options)

    reseal(folder, lambda state: state.update(world=2, rng=saved))
    assert all(torch.equal(start(rank).random_state["cpu"], state) for rank, state in enumerate(states))
    reseal(folder, lambda state: state.update(rng=saved[0]))  # the format of older checkpoints
    capsys.readouterr()
    start(0)
    assert "random states of 1 of 2 processes" in capsys.readouterr().out


# --- 13: one owner -------------------------------------------------------------------------------------------------


def test_a_second_run_in_the_same_folder_names_the_first_and_does_not_disturb_it(recipe, whole, tmp_path, monkeypatch):
    out, refusals, original = tmp_path / "run", [], Trainer._one_step

    def hooked(self: Trainer) -> None:
        if self.step == 2:
            for resume in (None, "auto"):
                with pytest.raises(InputError) as caught:
                    train(recipe, out=out, resume=resume, quiet=True)
                refusals.append(str(caught.value))
        original(self)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_one_step", hooked)
        train(recipe, out=out, quiet=True)
    assert len(refusals) == 2
    assert all(str(out) in refusal and f"process {os.getpid()} on " in refusal for refusal in refusals)
    assert_as_if_nothing_had_been(out, whole)


def test_another_process_owns_its_folder_until_it_dies(recipe, tmp_path, no_training):
    out, (told, tell) = tmp_path / "run", os.pipe()
    out.mkdir()
    holder = os.fork()
    if holder == 0:
        with owned(out, World(), None):
            os.write(tell, b"held")
            signal.pause()
        os._exit(0)
    try:
        assert os.read(told, 4) == b"held"
        with pytest.raises(InputError, match=f"in use by process {holder} on "):
            train(recipe, out=out, quiet=True)
    finally:
        os.kill(holder, signal.SIGKILL)
        os.waitpid(holder, 0)
        os.close(told)
        os.close(tell)
    with (out / ".lock").open("a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


# --- 14: equal curves ----------------------------------------------------------------------------------------------
# In float64, where sums taken in another order differ in the last digits only: 1e-9 of each loss after eight steps.


@pytest.fixture(scope="module")
def exact(shards, tmp_path_factory) -> Callable[..., list[float]]:
    """The curve of a float64 run with the given changes; each is trained once."""
    known: dict[tuple[str, ...], list[float]] = {}

    def curve(*overrides: str, fresh: bool = False) -> list[float]:
        if fresh or overrides not in known:
            out = tmp_path_factory.mktemp("exact") / "run"
            train(recipe_of(shards, "train.dtype=float64", "train.save_every=0", *overrides), out=out, quiet=True)
            known[overrides] = losses(out)
        return known[overrides]

    return curve


def test_gradients_accumulated_in_parts_give_the_same_curve(exact):
    """Four rows at once or one by one. Cross-entropy only: bottom-K ranks the gates of each part by definition."""
    parts = exact("train.ponder_weight=0", "train.micro_batch=1")
    assert parts == pytest.approx(exact("train.ponder_weight=0"), rel=1e-9)
    assert exact("train.micro_batch=1") != pytest.approx(exact(), rel=1e-9), "ponder terms do differ"


def test_replayed_iterations_give_the_same_curve(exact):
    assert exact("train.gradient_checkpointing=true") == pytest.approx(exact(), rel=1e-9)


@pytest.mark.parametrize("elements", [1, 5000])
def test_any_chunk_of_the_vocabulary_gives_the_same_curve(exact, monkeypatch, elements):
    """One token at a time, and a few with an uneven rest: 384 entries, 128 tokens in a batch."""
    expected, seen = exact(), []
    original = vocabulary_op.CHUNK_ELEMENTS
    assert original > 384 * 128, "all tokens at once"
    with monkeypatch.context() as patch:
        patch.setattr(vocabulary_op, "CHUNK_ELEMENTS", elements)
        seen = exact(fresh=True)
    assert seen == pytest.approx(expected, rel=1e-9)
