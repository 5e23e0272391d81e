"""Attention over the vocabulary: which embedding does the model expect next?"""

from adaponder.ops.vocab_expectation.torch import plain_vocab_expectation, vocab_expectation

__all__ = ["plain_vocab_expectation", "vocab_expectation"]
