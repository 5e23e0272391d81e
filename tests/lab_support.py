"""A text of random tokens and a tiny model with gates of many opinions: enough to tune on in a second."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

import support
from adaponder import AdaPonderForCausalLM
from adaponder.evaluation.text import Text, Vocabulary

K = 4
_NO_WORDS = json.dumps({"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {}, "merges": []}})


def made_up(lengths: Sequence[int] = (30, 1, 89, 80), *, seed: int = 0) -> Text:
    """Returns random tokens in documents of these lengths, each ended by token 0."""
    stream = np.random.default_rng(seed).integers(1, support.VOCABULARY, sum(lengths) + 1)
    ends = np.cumsum(lengths)
    stream[[0, *ends]] = 0
    sources = tuple("ab"[i % 2] for i in range(len(lengths)))
    words = Vocabulary(Tokenizer.from_str(_NO_WORDS), 0)
    return Text(stream, ends - np.array(lengths), sources, np.array(lengths) * 3, words)


def opinionated(method: str = "adaponder", *, iterations: int = K, dtype: torch.dtype = torch.float32):
    """Returns a tiny model whose gates spread over (0, 1), few of them equal."""
    return support.calm(support.tiny(method, iterations=iterations, dtype=dtype)).requires_grad_(False)


def saved(folder: Path, model: AdaPonderForCausalLM) -> Path:
    """Saves the model and a tokenizer of as many words as a checkpoint."""
    model.save_pretrained(folder)
    words = {"<|endoftext|>": 0} | {f"w{number}": number for number in range(1, support.VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w1"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def written(path: Path, *, documents: int = 24, words: int = 31) -> Path:
    numbers = np.random.default_rng(0).integers(2, support.VOCABULARY, (documents, words))
    texts = (" ".join(f"w{number}" for number in line) for line in numbers)
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    return path
