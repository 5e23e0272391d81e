"""lm-eval's ``local-completions`` against a running server gives the scores of ``adaponder eval --tasks``.

``python tests/serving/harness_check.py`` runs it; ``--record`` writes down in ``harness_check.json`` beside this file
what was run.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

from adaponder.commands import tasks as eval_tasks
from harness_support import POSITIONS, WIKITEXT, reader, words, write_records
from soak_support import NAME, run_parts, serving, write_checkpoint

RECORD = Path(__file__).with_suffix(".json")
TASKS = ("arc_easy", "lambada_openai", "wikitext")


WORDS = ["the", "mill", "ran", "past", "a", "river", "and", "she", "saw", "fire", "light", "rain", "then", "he"]
ITEMS = 12


def records() -> dict[str, list[dict[str, Any]]]:
    """Items of which a model of chance gets some right: an accuracy of 0 on both sides would compare nothing.

    All fit into the model's positions: lm-eval's client cuts longer ones elsewhere.
    """
    rng = random.Random(0)
    questions = [
        {
            "id": str(number),
            "question": " ".join(rng.sample(WORDS, 6)) + "?",
            "choices": {"text": rng.sample(WORDS, 4), "label": list("ABCD")},
            "answerKey": rng.choice("ABCD"),
        }
        for number in range(ITEMS)
    ]
    pages = [row for row in WIKITEXT if len(row["page"]) < POSITIONS]
    return {"arc_easy": questions, "lambada_openai": last_words(rng), "wikitext": pages}


def last_words(rng: random.Random) -> list[dict[str, Any]]:
    """Texts whose last word is, in every second one, the word that the model expects most."""
    model, tokenizer = reader(), words()
    rows: list[dict[str, Any]] = []
    while len(rows) < ITEMS:
        text = " ".join(rng.sample(WORDS, 5))
        with torch.no_grad():
            expected = tokenizer.decode(model(torch.tensor([tokenizer.encode(text)])).logits[0, -1].argmax())
        if len(rows) % 2:
            rows.append({"text": f"{text} {rng.choice(WORDS)}"})
        elif expected.startswith(" ") and expected.strip().isalpha():
            rows.append({"text": text + expected})
    return rows


def allow_without_retries() -> None:
    """lm-eval's clients of servers want tenacity, for retries, which nothing here needs: where it is missing, none."""
    if find_spec("tenacity") is not None:
        return
    stand_in = ModuleType("tenacity")
    stand_in.__spec__ = ModuleSpec("tenacity", None)
    vars(stand_in).update(
        RetryError=type("RetryError", (Exception,), {}),
        retry=lambda **_: lambda function: function,
        stop_after_attempt=lambda *_: None,
        wait_exponential=lambda **_: None,
    )
    sys.modules["tenacity"] = stand_in


def scores_through_server(url: str, folder: Path, data: Path, tasks: tuple[str, ...]) -> dict[str, Any]:
    """Metrics of each task, answered by the server."""
    allow_without_retries()
    from lm_eval.evaluator import evaluate
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    from adaponder.evaluation.tasks.lm_tasks import find_tasks, open_task, quiet
    from adaponder.evaluation.tasks.task_data import TaskData

    os.environ.setdefault("OPENAI_API_KEY", "none")
    found: dict[str, Any] = {}
    with quiet():
        model = LocalCompletionsAPI(
            base_url=f"{url}/v1/completions",
            tokenizer_backend="huggingface",
            model=NAME,
            tokenizer=str(folder),
            max_length=POSITIONS,
        )
        manager = find_tasks(tasks)
        for name in tasks:
            opened = open_task(manager, name, 0, TaskData(data))
            results: Any = evaluate(model, {"tasks": {name: opened.task}, "groups": {}}, bootstrap_iters=0)
            found[name] = {
                key.partition(",")[0]: value
                for key, value in results["results"][name].items()
                if isinstance(value, float) and "stderr" not in key
            }
    return found


def compare(url: str, folder: Path, data: Path, tasks: tuple[str, ...]) -> dict[str, Any]:
    """Both ways' metrics; fails where they differ by more than rounding."""
    through = scores_through_server(url, folder, data, tasks)
    own = eval_tasks.run_tasks(checkpoint=str(folder), tasks=list(tasks), task_data=data, fewshot=[0])
    compared: dict[str, Any] = {}
    for score in own["tasks"]:
        for metric, value in score["metrics"].items():
            if metric.partition(" ")[0] not in through[score["task"]]:
                continue
            here, there = value["value"], through[score["task"]][metric.partition(" ")[0]]
            assert abs(here - there) <= 1e-9 * max(1.0, abs(here)), (score["task"], metric, here, there)
            assert not metric.startswith("acc") or 0 < here < 1, (score["task"], metric, here, "says nothing")
            compared[f"{score['task']} {metric}"] = {"eval": here, "server": there}
    assert {name.partition(" ")[0] for name in compared} == set(tasks), compared
    return compared


def scores(options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as place:
        folder = write_checkpoint(Path(place) / "model")
        data = write_records(Path(place) / "records", records())
        with serving(folder) as server:
            return {"compared": compare(server.url, folder, data, TASKS)}


if __name__ == "__main__":
    packages = ("lm_eval", "fastapi", "uvicorn")
    sys.exit(run_parts({"scores": scores}, RECORD, lambda parser: None, __doc__ or "", packages))
