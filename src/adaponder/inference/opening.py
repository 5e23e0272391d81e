"""Old names of :mod:`adaponder.inference.config`, until serving imports that."""

from adaponder.inference.config import PAGE, eos_ids
from adaponder.inference.config import max_tokens as longest

__all__ = ["PAGE", "eos_ids", "longest"]
