"""Trains recipes, several at once if wished, and leaves one record each: hardware, versions, commit, recipe, metrics.

    python experiments/mini.py mini/vanilla mini/ponder mini/adaponder --shards data/mini --device cuda --commit abc123
    python experiments/mini.py mini/ponder@model.init=stock mini/ponder@train.lr=2e-3,train.seed=1 --jobs 2 …

What follows an @ is overridden, and names the record. ``--jobs`` processes share the device: small models leave most of
it idle. Tokens per second of runs that shared it are marked as such. A record holds the resolved recipe, the validation
history, and what the telemetry saw along the way.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import transformers

import adaponder
from adaponder.recipe import load_recipe
from adaponder.training.run import train


def label_of(spec: str) -> str:
    """A file name for a recipe and what was overridden."""
    return spec.replace("/", "-").replace("@", "-").replace(",", "-").replace("=", "-")


def record_of(spec: str, arguments: argparse.Namespace) -> dict:
    name, _, changes = spec.partition("@")
    overrides = [*arguments.overrides, *(change for change in changes.split(",") if change)]
    recipe = load_recipe(name, [f"data.source={arguments.shards}", *overrides])
    out = arguments.runs / label_of(spec)
    shutil.rmtree(out, ignore_errors=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    done = train(recipe, out=out, device=arguments.device)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    cuda = torch.cuda.is_available()
    return {
        "experiment": spec,
        "date": datetime.date.today().isoformat(),
        "commit": arguments.commit,
        "hardware": torch.cuda.get_device_name() if cuda else platform.machine(),
        "versions": {
            "adaponder": adaponder.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        "recipe": recipe.as_dict(),
        "recipe_hash": recipe.fingerprint,
        "seed": recipe.train.seed,
        "data": done.trainer.sampler.fingerprint(),
        "parameters": done.trainer.model.num_parameters(),
        "shared_device_with": arguments.beside,
        "tokens_per_second": statistics.median(line["tokens_per_second"] for line in steps),
        "peak_memory_gib": torch.cuda.max_memory_allocated() / 2**30 if cuda else None,
        "validation": [line for line in lines if "validation_loss" in line],
        "along_the_way": steps[:: max(1, len(steps) // 60)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipes", nargs="+")
    parser.add_argument("--set", dest="overrides", action="append", default=[])
    parser.add_argument("--shards", type=Path, required=True)
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--records", type=Path, default=Path("experiments/records"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--beside", type=int, default=0, help="how many runs share the device with this one")
    arguments = parser.parse_args()
    arguments.records.mkdir(parents=True, exist_ok=True)
    if arguments.jobs > 1:
        sys.exit(several(arguments))
    for spec in arguments.recipes:
        record = record_of(spec, arguments)
        (arguments.records / f"{label_of(spec)}.json").write_text(json.dumps(record, indent=1) + "\n")
        last = record["validation"][-1]
        print(f"{spec}: {last} {record['tokens_per_second']:,.0f} tok/s", flush=True)


def several(arguments: argparse.Namespace) -> int:
    """Runs each recipe in a process of its own, ``--jobs`` at a time; the worst exit code."""
    waiting, running, worst = list(arguments.recipes), [], 0
    common = [f"--set={change}" for change in arguments.overrides]
    common += [f"--{name}={getattr(arguments, name)}" for name in ("shards", "runs", "records", "device", "commit")]
    common.append(f"--beside={min(arguments.jobs, len(waiting)) - 1}")
    while waiting or running:
        while waiting and len(running) < arguments.jobs:
            running.append(subprocess.Popen([sys.executable, __file__, waiting.pop(0), *common]))
        # Whoever ends first makes room.
        ended = next((one for one in running if one.poll() is not None), None)
        if ended is None:
            time.sleep(0.5)
            continue
        running.remove(ended)
        worst = max(worst, abs(ended.returncode))
    return worst


if __name__ == "__main__":
    main()
