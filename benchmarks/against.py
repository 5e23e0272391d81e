"""Times this tree against another one, step by step in turn, so that both meet the same state of the device.

    python benchmarks/against.py OTHER --device cuda --case train-70m --case decode-410m-64

OTHER is a checkout of another commit. Each tree runs in a process of its own with its own package; both build their
model, warm up and wait. Then they take turns, a few steps each. What counts is the median of the ratios of neighbouring
turns: a device that slows down meets both.
"""

from __future__ import annotations

import importlib
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

HERE = Path(__file__).resolve()
KEEP = (1, 0.5, 0.5, 0.5)  # share of tokens in each pass of a prefill

CASES: dict[str, dict[str, Any]] = {
    "train-70m": {"recipe": "paper/adaponder-70m", "batch": 32},
    "train-410m": {"recipe": "paper/adaponder-410m", "batch": 8},
    "prefill-410m": {"recipe": "paper/adaponder-410m", "batch": 16, "execution": "compact"},
    "prefill-410m-dense": {"recipe": "paper/adaponder-410m", "batch": 16, "execution": "dense"},
    "decode-410m-1": {"shape": "410m", "lanes": 1},
    "decode-410m-64": {"shape": "410m", "lanes": 64},
    "tiny": {"recipe": "cpu/demo", "batch": 2},
    "tiny-prefill": {"recipe": "cpu/demo", "batch": 2, "execution": "compact"},
    "tiny-decode": {"shape": "tiny", "lanes": 2},
}


# --- one tree ------------------------------------------------------------------------------------------------------


def work(case: str, device_name: str) -> None:
    """Builds a case with the tree's own package, then times steps as the parent process asks for them."""
    import torch

    settings, device = CASES[case], torch.device(device_name)
    if "shape" in settings:
        _decode(settings, device)
        return
    try:
        train, prefill = (importlib.import_module(f"benchmarks.{name}") for name in ("train", "prefill"))
        depths_of = importlib.import_module("benchmarks.models").depths_of
        variants: Any = (train.TrainVariant, prefill.PrefillVariant)
    except ImportError:  # before benchmarks left the package
        train, prefill = (importlib.import_module(f"adaponder.bench.{name}") for name in ("training", "prefill"))
        depths_of = importlib.import_module("adaponder.bench.depths").depths_of
        variants = (train.Variant, prefill.Variant)
    from adaponder.recipes import load_recipe

    recipe, compiles, measure = load_recipe(settings["recipe"]), device.type == "cuda", train.measure

    def take_turns(step: Any, on: torch.device, *, warmup: int, repeats: int) -> Any:
        timing = measure(step, on, warmup=warmup, repeats=1)
        print(json.dumps("ready"), flush=True)
        for line in sys.stdin:
            timing = measure(step, on, warmup=1, repeats=int(line))
            print(json.dumps(timing.seconds), flush=True)
        return timing

    train.measure = prefill.measure = take_turns
    how: dict[str, Any] = {"device": device, "warmup": 4, "repeats": 1}
    if "execution" in settings:
        depths = depths_of(KEEP, settings["batch"], recipe.data.sequence, seed=0)
        variant = variants[1](settings["execution"], "layer" if compiles else None)
        prefill.measure_prefill(recipe, variant, depths, **how)
    else:
        train.measure_training(recipe, variants[0]("adaponder", compile=compiles), batch=settings["batch"], **how)


def _decode(settings: dict[str, Any], device: Any) -> None:
    """Times eight tokens of every lane per step, at full depth; requests that end are replaced."""
    import torch

    from adaponder import AdaPonderConfig, AdaPonderForCausalLM
    from adaponder.inference import Engine, Request

    sizes = {"410m": (50304, 1024, 24, 16, 4096), "tiny": (61, 16, 2, 2, 24)}[settings["shape"]]
    names = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    shape = {"model_type": "gpt_neox", "max_position_embeddings": 4096, **dict(zip(names, sizes, strict=True))}
    torch.manual_seed(0)
    with device:
        model = AdaPonderForCausalLM(AdaPonderConfig(backbone_config=shape, method="adaponder", iterations=4))
    torch.nn.Module.to(model, torch.bfloat16 if device.type == "cuda" else torch.float32)
    model.eval()
    context, new, lanes = 128, 1024, settings["lanes"]
    engine = Engine(model, lanes=lanes, tokens=context + new + 64)
    request = Request(prompt=[1] * context, max_new_tokens=new, ignore_eos=True, depths=[4] * (context + new - 1))

    def step() -> float:
        began, tokens = time.perf_counter(), 0
        while tokens < 8 * lanes:
            while engine.statistics["waiting"] + engine.statistics["resident"] < lanes:
                engine.submit(request)
                engine.step()
                began, tokens = time.perf_counter(), 0
            tokens += sum(event.token is not None for event in engine.step())
        return (time.perf_counter() - began) / tokens * lanes

    for _ in range(10):
        step()
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        print(json.dumps([step() for _ in range(int(line))]), flush=True)


# --- both trees ----------------------------------------------------------------------------------------------------


def start(tree: Path, case: str, device: str) -> subprocess.Popen[str]:
    """Starts the worker of one tree."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tree / "src"), str(tree)])}
    command = [sys.executable, str(HERE), "--work", case, "--device", device]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment, cwd=tree)


def ask(worker: subprocess.Popen[str], request: str = "") -> Any:
    """Sends a request, if any, and returns the worker's next answer."""
    assert worker.stdin is not None
    assert worker.stdout is not None
    worker.stdin.write(request)
    worker.stdin.flush()
    line = worker.stdout.readline()
    if not line:
        raise SystemExit(f"a worker ended with {worker.wait()}: see its message above")
    return json.loads(line)


def compare(other: Path, case: str, *, device: str, rounds: int, steps: int) -> dict[str, Any]:
    """Returns median seconds of a step in both trees and the median ratio of turns (below 1: this tree is faster).

    The tree that goes first changes from round to round.
    """
    workers = [start(tree, case, device) for tree in (HERE.parents[1], other)]
    for worker in workers:
        ask(worker)  # until it is ready
    turns: list[list[float]] = [[], []]
    for index in range(rounds):
        for which in (0, 1) if index % 2 else (1, 0):
            turns[which].append(statistics.median(ask(workers[which], f"{steps}\n")))
    for worker in workers:
        worker.communicate()
    ratios = [here / there for here, there in zip(*turns, strict=True)]
    this, theirs = map(statistics.median, turns)
    return {"case": case, "this": this, "other": theirs, "ratio": statistics.median(ratios), "ratios": ratios}


def main(
    other: Annotated[Path | None, typer.Argument(help="A checkout of another commit.")] = None,
    case: Annotated[list[str] | None, typer.Option(help=f"One of {', '.join(CASES)}; may be repeated.")] = None,
    device: str = "cpu",
    rounds: int = 12,
    steps: Annotated[int, typer.Option(help="Steps of one turn, of which the median counts.")] = 3,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the result there.")] = None,
    work_case: Annotated[str | None, typer.Option("--work", hidden=True)] = None,
) -> None:
    """Time this tree against another one, in turns."""
    if work_case is not None:
        work(work_case, device)
        return
    if other is None:
        raise typer.BadParameter("name a checkout of another commit")
    results = []
    for name in case or ["tiny"]:
        result = compare(other.resolve(), name, device=device, rounds=rounds, steps=steps)
        results.append(result)
        spread = f"{min(result['ratios']):.3f} to {max(result['ratios']):.3f}"
        print(f"{name:20} this {1e3 * result['this']:9.2f} ms   other {1e3 * result['other']:9.2f} ms", end="   ")
        print(f"ratio {result['ratio']:.4f} ({spread})", flush=True)
    if json_path:
        json_path.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
