"""Pretrain an adaptive model in a page of plain PyTorch: both stages of the paper, on text that every machine has.

    python examples/train.py [--steps 200] [--out runs/example]

You learn what the paper's training is: in stage 1 every token is read K times; in stage 2 the lowest gates are pressed
down, and tokens whose gate closes halt. `adaponder train` does the same with shards, resuming, GPUs and records.
"""

import argparse
from pathlib import Path

import torch
from transformers import GPTNeoXConfig

from adaponder import AdaPonderConfig, AdaPonderForCausalLM, FixedDepth, Objective

SEQUENCE, BATCH, ITERATIONS = 128, 8, 3


def standard_library_bytes() -> torch.Tensor:
    files = sorted(Path(argparse.__file__).parent.glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8).long()


def small_model() -> AdaPonderForCausalLM:
    shape = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    backbone = GPTNeoXConfig(vocab_size=256, max_position_embeddings=SEQUENCE, tie_word_embeddings=True, **shape)
    recurrence = {"method": "adaponder", "iterations": ITERATIONS, "tau": 0.01, "embedding_scale": 64**0.5}
    return AdaPonderForCausalLM(AdaPonderConfig(backbone_config=backbone, **recurrence))


def main(steps: int, out: str) -> None:
    torch.manual_seed(0)
    text, model = standard_library_bytes(), small_model()
    groups = [{"params": model.backbone.parameters()}, {"params": model.method.parameters(), "lr": 1e-3}]
    optimizer = torch.optim.AdamW(groups, lr=3e-3, weight_decay=0.1)
    for step in range(steps):
        starts = torch.randint(len(text) - SEQUENCE - 1, (BATCH, 1))
        windows = text[starts + torch.arange(SEQUENCE + 1)]
        second = step >= 0.4 * steps
        fraction = 0.3 * min(1.0, max(0.0, 5 * step / steps - 2))  # of gates: grows from 40 to 60 % of the steps
        model.method.requires_grad_(second)  # gates that learn from the first step may close for good
        objective = Objective(ponder_weight=0.1, ponder_fraction=fraction)
        policy = None if second else FixedDepth(ITERATIONS)  # None: the gates decide
        output = model(windows[:, :-1], targets=windows[:, 1:], objective=objective, policy=policy)
        output.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % max(1, steps // 10) == 0 or step == steps - 1:
            loss, depth = output.terms["cross_entropy"], output.depth.float().mean()
            print(f"step {step:4d}  stage {1 + second}  loss {loss:.3f}  mean depth {depth:.2f}")
    model.save_pretrained(out)  # AutoModelForCausalLM opens it, once adaponder has been imported


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", default="runs/example", help="the model folder to write")
    main(**vars(parser.parse_args()))
