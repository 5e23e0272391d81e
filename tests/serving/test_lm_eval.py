"""lm-eval's ``local-completions`` against a running server gives the scores of ``adaponder eval --tasks``."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from adaponder.commands import tasks as eval_tasks
from adaponder.serving.served import Served
from harness_support import POSITIONS, WIKITEXT, reader, words, write_records
from serving_support import serving
from soak_support import NAME, write_checkpoint

TASKS = ("arc_easy", "lambada_openai", "wikitext")
WORDS = ["the", "mill", "ran", "past", "a", "river", "and", "she", "saw", "fire", "light", "rain", "then", "he"]
ITEMS = 12


def records() -> dict[str, list[dict[str, Any]]]:
    """Returns items of which a model of chance gets some right, all within its positions: lm-eval cuts longer ones."""
    draw, model, tokenizer = random.Random(0), reader(), words()
    questions = [
        {
            "id": str(number),
            "question": " ".join(draw.sample(WORDS, 6)) + "?",
            "choices": {"text": draw.sample(WORDS, 4), "label": list("ABCD")},
            "answerKey": draw.choice("ABCD"),
        }
        for number in range(ITEMS)
    ]
    last_words: list[dict[str, Any]] = []
    while len(last_words) < ITEMS:  # in every second text the last word is the likeliest
        text = " ".join(draw.sample(WORDS, 5))
        with torch.no_grad():
            likeliest = tokenizer.decode(model(torch.tensor([tokenizer.encode(text)])).logits[0, -1].argmax())
        if len(last_words) % 2:
            last_words.append({"text": f"{text} {draw.choice(WORDS)}"})
        elif likeliest.startswith(" ") and likeliest.strip().isalpha():
            last_words.append({"text": text + likeliest})
    pages = [row for row in WIKITEXT if len(row["page"]) < POSITIONS]
    return {"arc_easy": questions, "lambada_openai": last_words, "wikitext": pages}


@pytest.mark.every
def test_lm_eval_gets_the_same_scores_through_the_server(tmp_path, monkeypatch):
    from lm_eval.evaluator import evaluate
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    from adaponder.evaluation.tasks.lm_tasks import find_tasks, open_task, quiet
    from adaponder.evaluation.tasks.task_data import TaskData

    monkeypatch.setenv("OPENAI_API_KEY", "none")
    folder = write_checkpoint(tmp_path / "model")
    data = write_records(tmp_path / "records", records())
    through: dict[str, dict[str, Any]] = {}
    with serving(Served(reader(), words(), name=NAME)) as server, quiet():
        url = f"{server.address}/v1/completions"
        options = {"tokenizer_backend": "huggingface", "tokenizer": str(folder), "max_length": POSITIONS}
        model = LocalCompletionsAPI(base_url=url, model=NAME, **options)
        manager = find_tasks(TASKS)
        for name in TASKS:
            task = open_task(manager, name, 0, TaskData(data)).task
            results: Any = evaluate(model, {"tasks": {name: task}, "groups": {}}, bootstrap_iters=0)
            through[name] = {key.partition(",")[0]: value for key, value in results["results"][name].items()}
    compared = set()
    for score in eval_tasks.run_tasks(checkpoint=str(folder), tasks=list(TASKS), task_data=data, fewshot=[0])["tasks"]:
        for metric, value in score["metrics"].items():
            there = through[score["task"]].get(metric.partition(" ")[0])
            if there is not None:
                assert value["value"] == pytest.approx(there, rel=1e-9), (score["task"], metric)
                assert not metric.startswith("acc") or 0 < value["value"] < 1, "an accuracy of 0 or 1 compares nothing"
                compared.add(score["task"])
    assert compared == set(TASKS)
