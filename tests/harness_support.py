"""What the tests of lm-eval share: tiny task records, a tokenizer trained on them, and tiny models that can read it."""

import json
from functools import cache
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

import support
from adaponder import AdaPonderForCausalLM
from adaponder.data.tokenizers import END, train_bpe

POSITIONS = 96
VOCABULARY = 300

_LONG = "The river ran past the mill and the mill ran past the river while the miller slept. " * 6


def arc(number: int, question: str, answer: str, *choices: str, labels: str = "ABCD") -> dict:
    """Returns a record of ARC as on the hub."""
    texts = {"text": list(choices), "label": list(labels[: len(choices)])}
    return {"id": str(number), "question": question, "choices": texts, "answerKey": answer}


ARC = [
    arc(1, "Which of these is hot?", "B", "ice", "fire", "rain", "fog"),
    arc(2, "What do plants need?", "1", "light", "night", "noise", labels="123"),
    arc(3, _LONG + "What ran?", "A", "the river", "the road"),
    arc(4, "Pick a letter.", "D", "a", "b", "c", "d"),
]
LAMBADA = [
    {"text": "She opened the door and saw the door"},
    {"text": "He said yes, and then he said no"},
    {"text": _LONG + "and so did the river"},
]
WIKITEXT = [{"page": "A short page ."}, {"page": _LONG}, {"page": "Another page , with more words in it ."}]
TRIVIA = [
    {"question": "Who ran past the mill", "answer": {"aliases": ["the river", "river"]}},
    {"question": "What is hot", "answer": {"aliases": ["fire"]}},
    {"question": _LONG, "answer": {"aliases": ["the miller"]}},
    {"question": "Why", "answer": {"aliases": ["because"]}},
]
RECORDS = {"arc_easy": ARC, "lambada_openai": LAMBADA, "wikitext": WIKITEXT, "triviaqa": TRIVIA}
SPLIT = {"triviaqa": "validation"}


def write_records(folder: Path, records: dict[str, list[dict]] | None = None) -> Path:
    """Writes ``folder/<task>/<split>.jsonl`` for each task."""
    for task, rows in (records or RECORDS).items():
        path = folder / task / f"{SPLIT.get(task, 'test')}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@cache
def words() -> PreTrainedTokenizerFast:
    tokenizer = train_bpe(VOCABULARY, [json.dumps(RECORDS)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END)


def stock(*, seed: int = 0, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    settings = {"vocab_size": VOCABULARY, "max_position_embeddings": POSITIONS, "eos_token_id": 0}
    return support.stock(seed=seed, dtype=dtype, **settings)


def reader(method: str = "adaponder") -> AdaPonderForCausalLM:
    """Returns a model whose gates disagree about tokens."""
    return support.wrap(stock(), method)
