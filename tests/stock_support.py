"""A tiny stock checkpoint with a tokenizer, as any on the hub."""

import inspect
import json
import shutil
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GPTNeoXConfig, PreTrainedModel, PreTrainedTokenizerFast

from adaponder.data.tokenizers import train_bpe


def make_stock(folder: Path, *, seed: int = 0) -> PreTrainedModel:
    """Saves a GPT-NeoX of a million random weights and a byte-level tokenizer."""
    tokenizer = train_bpe(1024, [inspect.getsource(module) for module in (json, inspect, shutil)])
    words = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>", bos_token="<|endoftext|>")
    torch.manual_seed(seed)
    config = GPTNeoXConfig(
        vocab_size=len(words),
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=512,
        max_position_embeddings=512,
        bos_token_id=0,
        eos_token_id=0,
        initializer_range=0.1,
    )
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    return model
