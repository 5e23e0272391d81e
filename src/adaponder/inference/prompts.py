"""Chunks of prompts in a pass: their rows, what these begin with, and what the pass says of them.

Chunks come in the order of their iterations: those that begin first, and chunks at one iteration side by side.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from adaponder.inference.rows import TickInput
from adaponder.inference.sequence import Chunk
from adaponder.methods import State
from adaponder.ops.ledger_attention import Cohort

# Chunks of prompts, each with its pool rows.
Chunks = Many[tuple[Chunk, list[int]]]


class Read(NamedTuple):
    """What a tick says of the tokens of a chunk: ``goes_on [n]``, and their log-probabilities where they are wanted."""

    goes_on: Tensor
    predicted: Any


class ChunkRows(NamedTuple):
    """The rows of all chunks of a pass.

    Attributes:
        tick: where each token stands.
        ids: of the tokens of chunks that begin, which come first.
        cohorts: of each chunk.
    """

    tick: TickInput
    ids: Tensor
    cohorts: tuple[Cohort, ...]

    @classmethod
    def of(
        cls,
        chunks: Chunks,
        *,
        alone: int,
        passes: int,
        width: int,
        before: Tensor | None,
        to_device: Callable[[np.ndarray], Tensor],
    ) -> ChunkRows:
        """The rows after ``alone`` tokens that decode; ``before [1, 1, d]`` is given where a policy looks at those."""
        count, begins = sum(len(chunk.tokens) for chunk, _ in chunks), 0
        numbers = np.zeros((5 + width, count), dtype=np.int64)
        cohorts, start = [], 0
        for chunk, rows in chunks:
            sequence, stop = chunk.sequence, start + len(chunk.tokens)
            here = numbers[:, start:stop]
            here[0], here[1], here[2] = sequence.lane_number, chunk.tokens, chunk.iteration
            here[3] = min(passes, sequence.iterations) - 1
            if chunk.state is None:
                here[4] = [sequence.tokens[place] for place in chunk.tokens]
                begins = stop
            here[5:] = np.asarray(rows).reshape(-1, width).T
            first, last_slot = alone + start, (chunk.tokens[-1] + 1) * width - 1
            cohorts.append(
                Cohort(first * width, (alone + stop) * width, sequence.lane_number, chunk.iteration, last_slot),
            )
            start = stop
        lane, place, iteration, last, ids, *row = to_device(numbers).unbind()
        if before is not None:
            kept = [
                before.expand(len(chunk.tokens), -1, -1) if chunk.before is None else chunk.before
                for chunk, _ in chunks
            ]
            before = torch.cat(kept)
        return cls(TickInput(lane, place, iteration, last, torch.stack(row, 1), before), ids[:begins], tuple(cohorts))


def states_of(chunks: Chunks, ids: Tensor, start: Callable[[Tensor], State]) -> list[State]:
    """What the rows of chunks begin their pass with; ``start`` is the method's, of tokens that are read first."""
    first = [start(ids)] if len(ids) else []
    return first + [chunk.state for chunk, _ in chunks if chunk.state is not None]
