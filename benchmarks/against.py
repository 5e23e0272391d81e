"""Times two checkouts in turn, so that a device that slows down slows both.

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
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

HERE = Path(__file__).resolve()
_DECODER = {"model_type": "gpt_neox", "vocab_size": 50304, "max_position_embeddings": 4096}
_DECODER |= {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
_TINY = _DECODER | {"vocab_size": 61, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}

CASES: dict[str, dict[str, Any]] = {
    "train-70m": {"recipe": "paper/adaponder-70m", "batch": 32},
    "train-410m": {"recipe": "paper/adaponder-410m", "batch": 8},
    "prefill-410m": {"recipe": "paper/adaponder-410m", "batch": 16, "execution": "compact"},
    "prefill-410m-dense": {"recipe": "paper/adaponder-410m", "batch": 16, "execution": "dense"},
    "decode-410m-1": {"shape": _DECODER, "lanes": 1},
    "decode-410m-64": {"shape": _DECODER, "lanes": 64},
    "tiny": {"recipe": "cpu/demo", "batch": 2, "vocabulary": 2048},
    "tiny-prefill": {"recipe": "cpu/demo", "batch": 2, "vocabulary": 2048, "execution": "compact"},
    "tiny-decode": {"shape": _TINY, "lanes": 2},
}


def work(case: str, device_name: str) -> None:
    """Builds a case with the tree's package, then times as many steps as each line of standard input requests."""
    import torch

    device = torch.device(device_name)
    step = (_decode if "shape" in CASES[case] else _step)(device=device, **CASES[case])
    for _ in range(5):
        step()
    print(json.dumps("ready"), flush=True)
    for request in sys.stdin:
        step()  # the device may have rested
        print(json.dumps([step() for _ in range(int(request))]), flush=True)


def _step(
    recipe: str, batch: int, device: Any, vocabulary: int = 50304, execution: str | None = None
) -> Callable[[], float]:
    """Returns a function that times a training step; with ``execution``, a prefill in which half of the tokens halt."""
    import torch

    from adaponder.devices import autocast
    from adaponder.methods import Objective
    from adaponder.policies import ForcedDepths
    from adaponder.recipes import load_recipe
    from adaponder.training.build import build_model

    try:
        from adaponder.training.schedule import build_optimizer
    except ImportError:  # its place in version 0.1.0
        build_optimizer = importlib.import_module("adaponder.training.optim").build_optimizer
    settings = load_recipe(recipe)
    train, length = settings.train, settings.data.sequence
    with device:
        model: Any = build_model(settings, vocabulary)
    if device.type == "cuda":
        model.compile_passes(by="layer")
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocabulary, (batch, length + 1), generator=generator).to(device)
    optimizer, how = build_optimizer(model, train), {"output_logits": False, "execution": "dense"}
    how |= {"targets": ids[:, 1:], "objective": Objective(train.ponder_weight, train.k_max)}
    if execution is not None:
        depths = torch.where(torch.rand(batch, length, generator=generator) < 0.5, 1, model.config.iterations)
        how = {"execution": execution, "policy": ForcedDepths(depths.to(device))}
        how |= {"logits_to_keep": 1, "output_gates": False}

    def step() -> float:
        began = time.perf_counter()
        with autocast(train.dtype, device), torch.set_grad_enabled(execution is None):
            output = model(ids[:, :-1], **how)
        if execution is None:
            output.loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), train.clip or float("inf"))
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - began

    return step


def _decode(shape: dict[str, Any], lanes: int, device: Any) -> Callable[[], float]:
    """Returns a function that times eight decoded tokens per lane at full depth and replaces finished requests."""
    import torch

    from adaponder import AdaPonderConfig, AdaPonderForCausalLM
    from adaponder.inference import Engine, Request

    torch.manual_seed(0)
    with device:
        model = AdaPonderForCausalLM(AdaPonderConfig(backbone_config=shape, method="adaponder", iterations=4))
    torch.nn.Module.to(model, torch.bfloat16 if device.type == "cuda" else torch.float32)
    context, new = 128, 1024
    engine = Engine(model.eval(), lanes=lanes, tokens=context + new + 64)
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

    return step


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
    """Returns the median seconds of a step in both trees, and the median ratio of their turns.

    A ratio below 1 means that this tree is faster. The tree that goes first changes from round to round.
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
