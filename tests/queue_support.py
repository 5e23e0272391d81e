"""A queue of two claims on a tiny recipe."""

from pathlib import Path

import yaml

TINY = """
base: cpu/demo
model:
  backbone: {model_type: gpt_neox, hidden_size: 16, num_hidden_layers: 1, num_attention_heads: 2, intermediate_size: 32}
data: {sequence: 16}
train: {steps: 2, global_batch: 2, ponder_start: 0, ponder_full: 0, eval_tokens: 64, log_every: 1}
"""


def written(folder: Path, **changes) -> Path:
    """Writes the queue and its recipe ``tiny.yaml``; returns the queue's path."""
    tiny = folder / "tiny.yaml"
    tiny.write_text(TINY)
    raw = {
        "data": {"folder": str(folder / "data"), "hash": "0" * 16, "prepare": "adaponder prepare TEXT --out data"},
        "seconds": {"hardware": "NVIDIA H200", "start": 10, "iteration": 30},
        "claims": {"lr": "rates", "table1": "methods"},
        "runs": [
            {"claim": "lr", "recipe": str(tiny), "each": {"train.lr": [0.001, 0.002]}},
            {"claim": "table1", "recipe": str(tiny), "seeds": [0, 1]},
        ],
    }
    path = folder / "queue.yaml"
    path.write_text(yaml.safe_dump(raw | changes))
    return path
