"""adaponder demo: the whole path on a tiny model, from a stock decoder to tokens that halt, nothing downloaded."""

from __future__ import annotations

import inspect
import json
import shutil
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, GPTNeoXConfig, PreTrainedTokenizerFast

from adaponder.commands import convert as convert_command
from adaponder.commands.generate import generate, load_tokenizer, show
from adaponder.errors import InputError
from adaponder.modeling import AdaPonderForCausalLM
from adaponder.policies import LearnedGate
from adaponder.terminal import console, table

PROMPT = "def read(token):"
_MARK = "adaponder-demo.txt"


def run(*, out: Path, seed: int = 0) -> None:
    _make_room(out)
    console.rule("1  a stock decoder")
    stock = make_stock(out / "stock", seed=seed)
    console.print(f"GPT-NeoX, random weights, {sum(p.numel() for p in stock.parameters()):,} parameters → {out}/stock")

    console.rule("2  adaponder convert")
    text = " ".join((inspect.getdoc(json) or "").split())
    convert_command.run(str(out / "stock"), out=out / "adaponder", method="adaponder", iterations=4, text=text)

    console.rule("3  tokens halt")
    model = AdaPonderForCausalLM.from_pretrained(out / "adaponder").eval()
    tokenizer = load_tokenizer(str(out / "adaponder"))
    stir_gates(model, seed=seed)
    console.print(
        "Nothing is trained yet, so the gates get random weights: depth shows the mechanism, not difficulty.\n"
    )
    policy = LearnedGate(0.5)
    settings = {"max_new_tokens": 48, "do_sample": True, "temperature": 0.8}
    done = generate(model, tokenizer, PROMPT, policy=policy, max_iterations=None, seed=seed, settings=settings)
    show(done, colours=True)

    console.rule("4  one function, however it is run")
    show_agreement(model, tokenizer, "".join(done.pieces), policy)
    console.print(f"\nGo on: adaponder inspect {out}/adaponder, or adaponder convert a checkpoint of yours.")


def _make_room(out: Path) -> None:
    """Replaces an earlier demo; refuses anything else."""
    if out.is_dir() and any(out.iterdir()):
        if not (out / _MARK).is_file():
            raise InputError(f"--out {out} is not empty and not an earlier demo: name another folder")
        shutil.rmtree(out)
    out.mkdir(parents=True, exist_ok=True)
    (out / _MARK).write_text("Made by adaponder demo, which replaces this folder when run again.\n")


def make_stock(folder: Path, *, seed: int) -> torch.nn.Module:
    """A tiny GPT-NeoX and a byte-level tokenizer, saved as any checkpoint is."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=1024, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([inspect.getsource(module) for module in (json, inspect, shutil)], trainer)
    words = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>", bos_token="<|endoftext|>")
    torch.manual_seed(seed)
    config = GPTNeoXConfig(
        vocab_size=len(words),
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=512,
        max_position_embeddings=512,
        bos_token_id=0,  # <|endoftext|>, the first special token
        eos_token_id=0,
        initializer_range=0.1,
    )
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    return model


@torch.no_grad()
def stir_gates(model: AdaPonderForCausalLM, *, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.method.parameters():
        parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))


@torch.no_grad()
def show_agreement(model: AdaPonderForCausalLM, tokenizer, text: str, policy: LearnedGate) -> None:
    """Dense, compact and token-by-token on the same text: the same logits for less work."""
    ids = tokenizer(text, return_tensors="pt").input_ids
    dense = model(ids, policy=policy, execution="dense")
    compact = model(ids, policy=policy, execution="compact", use_cache=True)
    ledger = model.new_ledger()
    steps = [model(token[:, None], policy=policy, past_key_values=ledger).logits for token in ids.unbind(1)]

    def difference(logits: torch.Tensor) -> str:
        return f"{float((logits - dense.logits).abs().max()):.1e}"

    rows = [
        ("dense, masked", ids.numel() * model.config.iterations, "—"),
        ("compact", compact.past_key_values.rows, difference(compact.logits)),
        ("one token at a time", ledger.rows, difference(torch.cat(steps, 1))),
    ]
    console.print(table("Three executions (float32)", ("execution", "rows computed", "largest difference"), rows))
