"""Trains recipes one after another and leaves one record each: hardware, versions, commit, date, recipe, seed, metrics.

    python experiments/mini.py mini/vanilla mini/ponder mini/adaponder --shards data/mini --device cuda --commit abc123

A record holds the resolved recipe, the validation history, and what the telemetry saw along the way.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import shutil
import statistics
from pathlib import Path

import torch
import transformers

import adaponder
from adaponder.recipe import load_recipe
from adaponder.training.run import train


def record_of(name: str, overrides: list[str], arguments: argparse.Namespace) -> dict:
    recipe = load_recipe(name, [f"data.source={arguments.shards}", *overrides])
    out = arguments.runs / name.replace("/", "-")
    shutil.rmtree(out, ignore_errors=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    done = train(recipe, out=out, device=arguments.device)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    cuda = torch.cuda.is_available()
    return {
        "experiment": name,
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
    parser.add_argument("--suffix", default="")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--commit", default="unknown")
    arguments = parser.parse_args()
    arguments.records.mkdir(parents=True, exist_ok=True)
    for name in arguments.recipes:
        record = record_of(name, arguments.overrides, arguments)
        path = arguments.records / f"{name.replace('/', '-')}{arguments.suffix}.json"
        path.write_text(json.dumps(record, indent=1) + "\n")
        last = record["validation"][-1]
        print(f"{name}: {last} {record['tokens_per_second']:,.0f} tok/s", flush=True)


if __name__ == "__main__":
    main()
