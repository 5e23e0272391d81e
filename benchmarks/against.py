"""Times this tree against another one, step by step in turn, so that both meet the same state of the device.

    python benchmarks/against.py OTHER --device cuda --case train-70m --case train-410m --case prefill-410m

OTHER is a checkout of another commit. Each tree runs in a process of its own with its own package; both build their
model, warm up and wait. Then they take turns, a few steps each, until the rounds are over. What counts is the median of
the ratios of neighbouring turns: a device that slows down meets both.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()

CASES: dict[str, dict[str, Any]] = {
    "train-70m": {"recipe": "paper/adaponder-70m", "batch": 32},
    "train-410m": {"recipe": "paper/adaponder-410m", "batch": 8},
    "prefill-410m": {"recipe": "paper/adaponder-410m", "batch": 16, "execution": "compact"},
    "prefill-410m-dense": {"recipe": "paper/adaponder-410m", "batch": 16, "execution": "dense"},
    "tiny": {"recipe": "cpu/demo", "batch": 2},
    "tiny-prefill": {"recipe": "cpu/demo", "batch": 2, "execution": "compact"},
}
KEEP = (1, 0.5, 0.5, 0.5)  # share of tokens in each pass of a prefill


# --- one tree ------------------------------------------------------------------------------------------------------


def work(case: str, device_name: str) -> None:
    """Builds a case with the package that is imported, then times steps as the other end of the pipe asks for."""
    import torch

    from adaponder.bench import prefill, training
    from adaponder.bench.depths import depths_of

    try:
        from adaponder.recipes import load_recipe
    except ImportError:  # before recipes had a folder
        from adaponder.recipe import load_recipe

    settings, device = CASES[case], torch.device(device_name)
    recipe, compiles = load_recipe(settings["recipe"]), device.type == "cuda"
    measure = training.measure

    def take_turns(step: Any, on: torch.device, *, warmup: int, repeats: int) -> Any:
        timing = measure(step, on, warmup=warmup, repeats=1)
        print(json.dumps("ready"), flush=True)
        for line in sys.stdin:
            timing = measure(step, on, warmup=1, repeats=int(line))
            print(json.dumps(timing.seconds), flush=True)
        return timing

    training.measure = prefill.measure = take_turns
    how: dict[str, Any] = {"device": device, "warmup": 4, "repeats": 1}
    if "execution" in settings:
        depths = depths_of(KEEP, settings["batch"], recipe.data.sequence, seed=0)
        variant = prefill.Variant(settings["execution"], "layer" if compiles else None)
        prefill.measure_prefill(recipe, variant, depths, **how)
    else:
        variant = training.Variant("adaponder", compile=compiles)
        training.measure_training(recipe, variant, batch=settings["batch"], **how)


# --- both trees ----------------------------------------------------------------------------------------------------


class Worker:
    """One tree's process."""

    def __init__(self, tree: Path, case: str, device: str):
        environment = os.environ | {"PYTHONPATH": str(tree / "src")}
        command = [sys.executable, str(HERE), "--work", case, "--device", device]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment, cwd=tree)

    def answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"a worker ended with {self.process.wait()}: see its message above")
        return json.loads(line)

    def steps(self, count: int) -> list[float]:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{count}\n")
        self.process.stdin.flush()
        return self.answer()

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def compare(other: Path, case: str, *, device: str, rounds: int, steps: int) -> dict[str, Any]:
    """Median seconds of a step in both trees, and the median ratio of neighbouring turns (below 1: this one is faster).

    Who goes first changes from round to round.
    """
    here, there = Worker(HERE.parents[1], case, device), Worker(other, case, device)
    for worker in (here, there):
        worker.answer()
    ours: list[float] = []
    theirs: list[float] = []
    for number in range(rounds):
        turns = [(here, ours), (there, theirs)]
        for worker, seconds in turns if number % 2 else reversed(turns):
            seconds.append(statistics.median(worker.steps(steps)))
    for worker in (here, there):
        worker.end()
    ratios = [mine / his for mine, his in zip(ours, theirs, strict=True)]
    return {
        "case": case,
        "this": statistics.median(ours),
        "other": statistics.median(theirs),
        "ratio": statistics.median(ratios),
        "ratios": ratios,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", nargs="?", type=Path, help="checkout of another commit")
    parser.add_argument("--case", action="append", choices=list(CASES), help="may be given several times")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=3, help="steps of one turn, of which the median counts")
    parser.add_argument("--json", type=Path, help="write the result there")
    parser.add_argument("--work", choices=list(CASES), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(options.work, options.device)
        return
    if options.other is None:
        parser.error("name a checkout of another commit")
    results = []
    for case in options.case or ["tiny"]:
        result = compare(
            options.other.resolve(), case, device=options.device, rounds=options.rounds, steps=options.steps
        )
        results.append(result)
        spread = f"{min(result['ratios']):.3f} to {max(result['ratios']):.3f}"
        print(f"{case:20} this {1e3 * result['this']:9.2f} ms   other {1e3 * result['other']:9.2f} ms", end="   ")
        print(f"ratio {result['ratio']:.4f} ({spread})", flush=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
