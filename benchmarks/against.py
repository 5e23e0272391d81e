"""Times two checkouts in turn, so that a device that slows down slows both.

    python benchmarks/against.py OTHER --device cuda --case train-70m --case decode-410m-64

OTHER is a checkout of another commit. Two processes build the same model, each from one checkout, and warm up. Then
they take turns of a few steps. The result is the median over rounds of this checkout's time / OTHER's.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

HERE = Path(__file__).resolve()
CASES: dict[str, dict[str, Any]] = {
    "train-70m": {"recipe": "paper/adaponder-70m", "batch": 32},
    "train-410m": {"recipe": "paper/adaponder-410m", "batch": 8},
    "prefill-410m": {"recipe": "paper/adaponder-410m", "batch": 16, "execution": "compact"},
    "decode-410m-1": {"shape": "410m", "lanes": 1},
    "decode-410m-64": {"shape": "410m", "lanes": 64},
    "tiny": {"recipe": "cpu/demo", "batch": 2},
    "tiny-prefill": {"recipe": "cpu/demo", "batch": 2, "execution": "compact"},
    "tiny-decode": {"shape": "tiny", "lanes": 2},
}


def work(case: str, device_name: str) -> None:
    """Builds a case; for each number on standard input, runs that many steps and prints the seconds of each."""
    import torch

    device = torch.device(device_name)
    step = (_decode if "shape" in CASES[case] else _step)(device=device, **CASES[case])
    for _ in range(5):
        step()
    print(json.dumps("ready"), flush=True)
    for request in sys.stdin:
        step()  # the device may have rested
        print(json.dumps([step() for _ in range(int(request))]), flush=True)


def _step(recipe: str, batch: int, device: Any, execution: str | None = None) -> Callable[[], float]:
    """Returns a function that times a training step; with ``execution``, a prefill in which half of the tokens halt."""
    from adaponder.recipes import load_recipe
    from benchmarks import harness, models, steps

    loaded = load_recipe(recipe)
    variant = steps.Variant(models.METHOD, "layer" if device.type == "cuda" else None, execution)
    if execution is None:
        compute: Callable[[], Any] = steps.training_step(loaded, variant, batch, device)
    else:
        halves = [1.0] + [0.5] * (models.config_of(loaded, models.METHOD).iterations - 1)
        compute = steps.prefill_step(loaded, variant, models.choose_depths(halves, loaded, batch), device)
    return lambda: harness.time_steps(compute, device, 1)[0]


def _decode(shape: str, lanes: int, device: Any) -> Callable[[], float]:
    """Returns a function that decodes eight tokens per lane at full depth and returns the seconds per token."""
    import torch

    from adaponder.inference import Engine, Request
    from benchmarks.models import ITERATIONS, build, shape_config

    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model, context = build(shape_config(shape), device=device, dtype=dtype, seed=0), 128
    new = model.config.max_position_embeddings // 4
    engine = Engine(model, lanes=lanes, tokens=context + new + 64)
    depths = [ITERATIONS] * (context + new - 1)
    request = Request(prompt=[1] * context, max_new_tokens=new, ignore_eos=True, depths=depths)

    def step() -> float:
        began, tokens = time.perf_counter(), 0
        while tokens < 8 * lanes:
            # Finished requests are replaced, and the step begins again.
            while engine.statistics["waiting"] + engine.statistics["resident"] < lanes:
                engine.submit(request)
                engine.step()
                began, tokens = time.perf_counter(), 0
            tokens += sum(event.token is not None for event in engine.step())
        return (time.perf_counter() - began) / tokens * lanes

    return step


def compare(other: Path, case: str, *, device: str, rounds: int, steps: int) -> dict[str, Any]:
    """Returns the median seconds of a step in each checkout, and the median of (this one's seconds) / (the other's).

    A ratio below 1 means that this checkout is faster. The checkout that goes first changes from round to round.
    """
    workers, turns = [], ([], [])
    for tree in (HERE.parents[1], other):
        root = tree if (tree / "benchmarks" / HERE.name).is_file() else HERE.parents[1]
        command = [sys.executable, str(root / "benchmarks" / HERE.name), "--work", case, "--device", device]
        environment = os.environ | {"PYTHONPATH": f"{tree / 'src'}{os.pathsep}{root}"}
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        workers.append(subprocess.Popen(command, cwd=tree, env=environment, **pipes))

    def answer_of(worker: Any, request: str = "") -> Any:
        worker.stdin.write(request)
        worker.stdin.flush()
        if not (line := worker.stdout.readline()):
            raise SystemExit(f"a worker ended with {worker.wait()}: see its message above")
        return json.loads(line)

    for worker in workers:
        answer_of(worker)  # until it is ready
    for index in range(rounds):
        for tree in (0, 1) if index % 2 else (1, 0):
            turns[tree].append(statistics.median(answer_of(workers[tree], f"{steps}\n")))
    for worker in workers:
        worker.communicate()
    ratios = [this / theirs for this, theirs in zip(*turns, strict=True)]
    medians = dict(zip(("this", "other"), map(statistics.median, turns), strict=True))
    return {"case": case} | medians | {"ratio": statistics.median(ratios), "ratios": ratios}


def main(
    other: Annotated[Path | None, typer.Argument(help="A checkout of another commit.")] = None,
    case: Annotated[list[str] | None, typer.Option(help=f"One of {', '.join(CASES)}; may be repeated.")] = None,
    device: str = "cpu",
    rounds: int = 12,
    steps: Annotated[int, typer.Option(help="Steps of one turn, of which the median counts.")] = 3,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the result there.")] = None,
    work_case: Annotated[str | None, typer.Option("--work", hidden=True)] = None,
) -> None:
    """Compare the speed of this checkout with that of another one; the two are timed in turns."""
    if work_case is not None:
        work(work_case, device)
        return
    if other is None:
        raise typer.BadParameter("name a checkout of another commit")
    results = []
    for name in case or ["tiny"]:
        results.append(result := compare(other.resolve(), name, device=device, rounds=rounds, steps=steps))
        spread = f"{min(result['ratios']):.3f} to {max(result['ratios']):.3f}"
        print(f"{name:20} this {1e3 * result['this']:9.2f} ms   other {1e3 * result['other']:9.2f} ms", end="   ")
        print(f"ratio {result['ratio']:.4f} ({spread})", flush=True)
    if json_path:
        json_path.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
