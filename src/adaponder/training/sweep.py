"""Plans the runs of a recipe with several settings, trains them one after another, and summarizes each run.

Each run has its own folder and continues from its newest checkpoint; finished runs are not trained again.
"""

from __future__ import annotations

import gc
import itertools
import json
import math
import os
import re
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml

from adaponder.config import AdaPonderConfig
from adaponder.data import Shards
from adaponder.devices import as_device
from adaponder.errors import AdaPonderError, ConfigError, InputError, TrainingError
from adaponder.files import parse_yaml
from adaponder.methods import method_class
from adaponder.modeling import AdaPonderForCausalLM
from adaponder.recipes import Recipe, load_recipe
from adaponder.training.build import config_of, with_method
from adaponder.training.checkpoint import STATE, newest_complete, verify_checkpoint
from adaponder.training.data import sampler_of, shards_folder
from adaponder.training.distributed import World
from adaponder.training.loop import Trainer
from adaponder.training.resume import differences
from adaponder.training.run import train
from adaponder.training.schedule import objective_at

FINISHED, FAILED, STOPPED, PENDING = "finished", "failed", "stopped", "pending"
_LONGEST_NAME = 120

Axis = tuple[str, tuple[Any, ...]]  # a field of the recipe and the values to try


class PlannedRun(NamedTuple):
    """A run of a sweep: folder name, recipe, its value of each axis, and the overrides that produce the recipe."""

    name: str
    recipe: Recipe
    fields: Mapping[str, Any]
    overrides: tuple[str, ...]


def parse_axis(text: str) -> Axis:
    """Parses ``section.field=value,value,…``. A list in brackets is one value."""
    field, _, listed = text.partition("=")
    if "." not in field or not listed.strip() or listed.rstrip().endswith(","):
        raise InputError(f"--grid {text} must be section.field=value,value,…, e.g. train.k_max=0.1,0.15,0.2")
    if field == "train.seed":
        raise InputError(f"--grid {text}: use --seeds {listed}; results are averaged over seeds, which are no axis")
    try:
        values = parse_yaml(f"[{listed}]", "--grid", InputError)
    except InputError:
        raise InputError(f"--grid {text}: {listed!r} is not a list of values") from None
    return field, tuple(values)


def plan(
    name: str,
    grids: Sequence[str],
    *,
    overrides: Sequence[str] = (),
    one_at_a_time: bool = False,
    seeds: Sequence[int] = (),
    out: Path | None = None,
) -> list[PlannedRun]:
    """Returns the runs of the sweep: every combination of values, first with the first seed, then with the next.

    ``grids`` are axes as text, see :func:`parse_axis`. With ``one_at_a_time``, the runs are the recipe itself and, for
    each other value of each axis, the recipe with this one field changed. If the recipe leaves the method to its
    checkpoint, the method is that of the runs in ``out``, if there are any.
    """
    earlier = None if out is None else next((path.parent for path in sorted(out.glob("*/recipe.yaml"))), None)
    base, axes = with_method(load_recipe(name, overrides), earlier, "auto"), [parse_axis(text) for text in grids]
    _check_arguments(axes, seeds, {override.partition("=")[0] for override in overrides}, one_at_a_time=one_at_a_time)
    base_values = {field: value_of(base, field) for field, _ in axes}
    choices = [[(field, value) for value in values] for field, values in axes]
    points = [(), *((choice,) for axis in choices for choice in axis)] if one_at_a_time else itertools.product(*choices)
    runs = []
    for seed, point in itertools.product(seeds or (base.train.seed,), points):
        settings = point if seed == base.train.seed else (*point, ("train.seed", seed))
        changed = tuple(f"{field}={_as_override(value)}" for field, value in settings)
        try:
            recipe = with_method(load_recipe(name, [*overrides, *changed]), earlier, "auto")
            config_of(recipe)  # raises if no model can be built
            fields = {field: value_of(recipe, field) for field in base_values}
        except ConfigError as error:
            raise ConfigError(f"--grid {' '.join(changed)}: {str(error).removeprefix('--set ')}") from None
        if one_at_a_time and point and fields == base_values:
            continue  # the base run
        varied = {field: value_of(recipe, field) for field, _ in settings}
        runs.append(PlannedRun(_name_of(varied, recipe, fields), recipe, fields, (*overrides, *changed)))
    _refuse_twins(runs)
    return runs


def _check_arguments(axes: Sequence[Axis], seeds: Sequence[int], fixed: set[str], *, one_at_a_time: bool) -> None:
    """Raises if axes, seeds and ``fixed`` (the fields set by --set) contradict each other."""
    if not axes and not seeds:
        raise InputError("--grid is missing: name at least one axis, e.g. --grid train.k_max=0.1,0.15,0.2; or --seeds")
    if len(set(seeds)) < len(seeds):
        raise InputError(f"--seeds {','.join(map(str, seeds))}: each seed may be named once")
    if seeds and "train.seed" in fixed:
        raise InputError("train.seed is set by both --set and --seeds: drop one")
    fields = [field for field, _ in axes]
    for field in fields:
        if fields.count(field) > 1:
            raise InputError(f"--grid {field} is given twice: list all its values in one")
        if field in fixed and not one_at_a_time:
            raise InputError(f"{field} is set by both --set and --grid: drop one, or add --one-at-a-time")


def _refuse_twins(runs: Sequence[PlannedRun]) -> None:
    """Raises if two runs would train the same recipe."""
    first: dict[str, PlannedRun] = {}
    for run in runs:
        twin = first.setdefault(run.recipe.fingerprint, run)
        if twin is run:
            continue
        if same := [field for field in run.fields if run.fields[field] != twin.fields[field]]:
            raise InputError(f"--grid {same[0]}: this field does not change the training, so it cannot be an axis")
        raise InputError(f"--grid: {run.name} is listed twice; list each value once")


def value_of(recipe: Recipe, field: str) -> Any:
    """Returns a field's value in the recipe, or in the config if it is a model field that the recipe leaves unset."""
    value: Any = recipe.as_dict()
    for key in field.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    section, _, key = field.partition(".")
    unresolved = value is None or field == "model.embedding_scale"
    if unresolved and section == "model" and (config := config_of(recipe)) is not None:
        value = getattr(config, key, None)
    return list(value) if isinstance(value, tuple) else value


def _name_of(varied: Mapping[str, Any], recipe: Recipe, axes: Iterable[str]) -> str:
    """Returns a folder name such as ``k_max=0.1__ponder_weight=0.2__seed=1``, safe in every shell."""
    short_names = [field.rpartition(".")[2] for field in axes]
    assignments = []
    for field, value in varied.items():
        short = field.rpartition(".")[2]
        assignments.append(f"{field if short_names.count(short) > 1 else short}={_typed(value).strip('[]')}")
    full_name = "__".join(assignments) or "base"
    safe = re.sub(r"[^A-Za-z0-9._=+-]+", "-", full_name)[:_LONGEST_NAME]
    # Replaced characters may make two names equal: the fingerprint distinguishes them.
    return safe if safe == full_name else f"{safe}__{recipe.fingerprint}"


def _typed(value: Any) -> str:
    """Returns a value as a user would type it: 0.1, 4, true, none."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def _as_override(value: Any) -> str:
    """Returns text that ``--set`` parses as ``value``."""
    return yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=math.inf).splitlines()[0]


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """The summary of one run, a row of the sweep's table; unknown values are ``None``.

    Loss, mean depth and halted shares are from the last validation; the speed is the median over the log.
    """

    name: str
    fields: Mapping[str, Any]
    seed: int
    fingerprint: str
    status: str = PENDING
    step: int = 0
    steps: int
    method: str
    iterations: int | None
    embedding_scale: float | None
    requested_depth: float | None
    validation_loss: float | None = None
    validation_depth: float | None = None
    validation_halted: list[float] | None = None
    tokens_per_second: float | None = None
    error: str | None = None


def requested_depth(recipe: Recipe, config: AdaPonderConfig | None) -> float | None:
    """Returns the mean depth at which the objective of the recipe's last step aims, or ``None`` if it aims at none.

    With a ponder loss this is ``train.target_depth``, if set, else ``K - k (K - 1)``: the loss pushes the lowest share
    k of the K - 1 gates per token towards closed, and a closed gate saves one iteration. The measured
    ``validation_depth`` may be higher (these gates need not close) or lower (a token that halts skips its later gates).
    For other methods see their ``requested_depth``. ``config=None`` (not known yet) gives ``None``.
    """
    if config is None:
        return None
    method = method_class(config.method)
    if method.has_ponder_term and recipe.train.target_depth is not None:
        return recipe.train.target_depth
    objective = objective_at(recipe.train, recipe.train.steps - 1)
    return method.requested_depth(config, objective.ponder_fraction if objective.ponder_weight > 0 else 0.0)


def pending(run: PlannedRun, config: AdaPonderConfig | None) -> RunSummary:
    """Returns the summary of a run that was not started."""
    recipe = run.recipe
    return RunSummary(
        name=run.name,
        fields=dict(run.fields),
        seed=recipe.train.seed,
        fingerprint=recipe.fingerprint,
        steps=recipe.train.steps,
        method=recipe.model.method,
        iterations=None if config is None else config.iterations,
        embedding_scale=None if config is None else config.table_scale,
        requested_depth=requested_depth(recipe, config),
    )


def result_of(run: PlannedRun, folder: Path) -> RunSummary:
    """Reads the summary of a finished run from its folder."""
    summary = pending(run, AdaPonderConfig.from_pretrained(folder / "final"))
    path, last = folder / "metrics.jsonl", summary.steps - 1
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    scores = [line for line in lines if "validation_loss" in line and line["step"] == last]
    if not scores:
        raise TrainingError(f"{path} has no validation at step {last}: delete {folder} to run it again")
    loss = scores[-1]["validation_loss"]
    if not math.isfinite(loss):
        return replace(summary, status=FAILED, step=last + 1, error=f"validation loss is {loss}")
    speeds = [line["tokens_per_second"] for line in lines if "tokens_per_second" in line]
    return replace(
        summary,
        status=FINISHED,
        step=last + 1,
        tokens_per_second=statistics.median(speeds) if speeds else None,
        **{name: scores[-1][name] for name in ("validation_loss", "validation_depth", "validation_halted")},
    )


def examine(runs: Sequence[PlannedRun], *, out: Path, device: str = "cpu") -> list[RunSummary]:
    """Prepares the data and returns the current summary of each run; trains nothing.

    Raises if a run cannot be trained, or if its folder holds a run with other settings, which the error lists.
    """
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise InputError(
            "a sweep runs in one process: start the single runs with torchrun (--dry-run prints their commands); "
            "the sweep then finds them finished"
        )
    as_device(device)
    folders: dict[tuple[str, str, float], Path] = {}
    summaries = []
    for run in runs:
        source = run.recipe.data
        key = (source.source, source.tokenizer, source.validation)
        if key not in folders:
            folders[key] = shards_folder(run.recipe, Path("data"), World())  # as train does by default
        summaries.append(_examine(run, out / run.name, folders[key]))
    return summaries


def _examine(run: PlannedRun, folder: Path, prepared: Path) -> RunSummary:
    """Returns the current summary of one run. ``prepared`` is the folder of its data."""
    recipe = run.recipe
    # Each run verifies the checksums of its data when it starts.
    shards, validation = (Shards.open(prepared, split, verify=False) for split in ("train", "validation"))
    sampler = sampler_of(recipe, shards)
    if validation.tokens <= recipe.data.sequence:
        raise InputError(
            f"{prepared}: {validation.tokens} validation tokens, one window needs more than "
            f"data.sequence={recipe.data.sequence}: a sweep compares validation losses; raise data.validation"
        )
    config = config_of(recipe, shards.vocab_size)
    if config is not None:
        meta = torch.device("meta")
        with meta:
            model = AdaPonderForCausalLM(config)
        # Constructed for its checks only, on the meta device, where tensors take no memory.
        Trainer(recipe, folder, World(device=meta), model, sampler, validation)
    summary = pending(run, config)
    newest = folder / "final" if (folder / "final").is_dir() else newest_complete(folder)[0]
    if newest is None:
        return summary
    finished = newest.name == "final"
    state = verify_checkpoint(newest) if finished else json.loads((newest / STATE).read_text())
    # The number of processes matters only if the run is resumed.
    changes = differences(state, recipe, sampler, World(size=state["world"] if finished else 1))
    if finished and (eval_tokens := state["recipe"]["train"]["eval_tokens"]) != recipe.train.eval_tokens:
        changes.append(f"train.eval_tokens: {eval_tokens} → {recipe.train.eval_tokens}")
    if changes:
        raise InputError(
            f"{folder} holds a run with other settings ({'; '.join(changes)}): undo that, name another --out, or "
            "delete that folder"
        )
    return result_of(run, folder) if finished else replace(summary, step=int(state["step"]))


def rows_left(run: PlannedRun, summary: RunSummary) -> float:
    """Returns K times the tokens that a run must still compute; its remaining time is about proportional to this."""
    per_step = run.recipe.train.global_batch * run.recipe.data.sequence * (summary.iterations or 1)
    return float((summary.steps - summary.step) * per_step)


def carry_out(
    runs: Sequence[PlannedRun],
    summaries: Sequence[RunSummary],
    *,
    out: Path,
    device: str = "cpu",
    quiet: bool = False,
    starting: Callable[[int, RunSummary, float | None], None] = lambda index, summary, seconds: None,
) -> Iterator[tuple[int, RunSummary]]:
    """Trains or resumes every run that is not finished and yields ``(index, summary)`` after each.

    A failed run does not end the sweep, but a stopped run does. ``starting`` is called before each run with its index,
    its summary and the estimated seconds until the sweep ends, which are ``None`` before the first run.
    """
    rows, seconds = 0.0, 0.0  # rows computed by this sweep so far, and the time that they took
    waiting = [index for index, summary in enumerate(summaries) if summary.status == PENDING]
    for done, index in enumerate(waiting):
        run, summary = runs[index], summaries[index]
        left = sum(rows_left(runs[i], summaries[i]) for i in waiting[done:])
        starting(index, summary, seconds / rows * left if rows else None)
        began = time.perf_counter()
        ended, stop_requested = _train(run, summary, out / run.name, device=device, quiet=quiet)
        if ended.status != FAILED:
            rows += rows_left(run, summary) - rows_left(run, ended)
            seconds += time.perf_counter() - began
        # Frees memory, so that the next run has as much as the first.
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        yield index, ended
        if stop_requested:
            return


def _train(run: PlannedRun, summary: RunSummary, folder: Path, **options: Any) -> tuple[RunSummary, bool]:
    """Trains one run; returns (its summary, whether the sweep must stop)."""
    try:
        outcome = train(run.recipe, out=folder, resume="auto", **options)
        if outcome.final is None:
            return replace(summary, status=STOPPED, step=outcome.step), True
        # A signal during the run's last step must still stop the sweep.
        return result_of(run, folder), outcome.trainer is not None and outcome.trainer.stop_requested()
    except (AdaPonderError, torch.OutOfMemoryError) as error:
        return replace(summary, status=FAILED, error=str(error)), False
