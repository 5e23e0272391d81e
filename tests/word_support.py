"""A tokenizer of few tokens for the tiny models, whose vocabulary has 61."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

END = "<|endoftext|>"


def small_tokenizer() -> PreTrainedTokenizerFast:
    """Returns a tokenizer of the end token (0), the lower-case letters (1 to 26) and a space (27)."""
    letters = {chr(97 + number): number + 1 for number in range(26)}
    tokenizer = Tokenizer(models.BPE({END: 0, **letters, "Ġ": 27}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, bos_token=END)
