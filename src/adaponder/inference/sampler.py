"""Samples the next token of each row on the device; the result does not depend on the rest of the batch.

Logits are modified in this order: logit bias, and a ban of stop ids until ``min_new_tokens``; repetition, presence and
frequency penalties; temperature; top-k; top-p among the tokens that top-k left; min-p. Tokens that tie with the least
likely remaining token remain too. A token is drawn by Gumbel noise, a counter-based hash of (seed, sample, position,
token id). Greedy rows take the smallest id among the likeliest tokens. Log-probabilities are of unmodified logits.

The settings of all lanes are device tensors that never move, shapes depend only on the number of rows and on
:class:`Features`, and the host never waits: a CUDA graph can capture :meth:`SamplerState.choose`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from adaponder.inference.lanes import write_lane
from adaponder.inference.request import MOST_BIASES, MOST_STOP_IDS, Request
from adaponder.ops.next_token import least_kept, pick, stream_key
from adaponder.ops.precision import widened

# Number of prompt rows whose log-probabilities are computed at a time.
_ROWS = 64
# The number of top tokens is rounded up to one of these sizes, so that few graphs are captured.
_TOP_SIZES = (0, 5, 20)
_NO_PENALTIES = (1.0, 0.0, 0.0)
_FOREVER = torch.iinfo(torch.int64).max


class Features(NamedTuple):
    """The optional parts of sampling that at least one lane of a batch needs; the others are skipped.

    ``log_probabilities`` is the number of top tokens to return; ``None``: no log-probabilities at all.
    """

    sampled: bool = False
    truncated: bool = False
    penalised: bool = False
    biased: bool = False
    gates: bool = False
    log_probabilities: int | None = None

    @classmethod
    def of(cls, request: Request) -> Features:
        """Returns the features that a request needs."""
        top, truncates = request.log_probabilities, request.top_k or request.top_p < 1 or request.min_p > 0
        if request.iteration_top:
            top = max(request.iteration_top, top or 0)
        return cls(
            sampled=not request.greedy,
            truncated=not request.greedy and bool(truncates),
            penalised=_penalties(request) != _NO_PENALTIES,
            biased=bool(request.logit_bias) or request.min_new_tokens > 0,
            gates=request.gates,
            log_probabilities=None if top is None else next(size for size in _TOP_SIZES if size >= top),
        )

    @classmethod
    def union(cls, features: Iterable[Features]) -> Features:
        """Returns the features that at least one of these includes, with the largest number of top tokens."""
        *flags, tops = zip(cls(), *features, strict=True)
        return cls(*map(any, flags), max((top for top in tops if top is not None), default=None))


class Scores(NamedTuple):
    """Log-probabilities of a given token per row, ``[n]``, and of the likeliest tokens, ``[n, top]``, with ids."""

    log_probability: Tensor
    top_ids: Tensor
    top_log_probabilities: Tensor


class Sampled(NamedTuple):
    """The sampled token of each row, int64 ``[n]``.

    ``bad`` marks rows without a valid token: NaN or infinite logits, or all tokens banned. ``scores`` is ``None`` if no
    lane requests log-probabilities.
    """

    token: Tensor
    bad: Tensor
    scores: Scores | None = None


class SamplerState:
    """The sampling settings of every lane.

    ``eos_ids`` are banned, like a request's stop ids, until ``min_new_tokens`` tokens are generated. Biases and
    penalties are applied in the precision of the logits, at least float32.
    """

    def __init__(
        self, lanes: int, vocabulary: int, device: torch.device | str = "cpu", *, eos_ids: Collection[int] = ()
    ):
        self.lanes, self.vocabulary, self.device, self.eos_ids = lanes, vocabulary, torch.device(device), tuple(eos_ids)
        # Columns: temperature, top_p, log_min_p; repetition, presence, frequency; noise key, top_k.
        self._truncation = torch.ones(lanes, 3, dtype=torch.float64, device=self.device)
        self._penalties = torch.ones(lanes, 3, dtype=torch.float64, device=self.device)
        self._integers = torch.ones(lanes, 2, dtype=torch.int64, device=self.device)
        self._temperature = self._truncation[:, 0]
        self._key, self._top_k = self._integers.unbind(1)
        self._biases = LaneBiases(lanes, self.device, len(self.eos_ids))
        self._occurrences: Occurrences | None = None

    def set(
        self, lane: int, request: Request, sample: int, prompt_ids: Sequence[int], output_ids: Sequence[int] = ()
    ) -> None:
        """Assigns a lane to one sample of a request that has already generated ``output_ids``."""
        temperature = 0.0 if request.greedy else request.temperature
        log_min_p = math.log(request.min_p) if request.min_p > 0 else -math.inf
        top_k = min(request.top_k, self.vocabulary) or self.vocabulary
        write_lane(self._truncation, lane, (temperature, request.top_p, log_min_p))
        write_lane(self._penalties, lane, _penalties(request))
        write_lane(self._integers, lane, (stream_key(request.seed, sample), top_k))
        banned = {*request.stop_ids, *(() if request.ignore_eos else self.eos_ids)} if request.min_new_tokens else ()
        # The row at the prompt's last position samples the first token.
        self._biases.set(lane, request.logit_bias, banned, until=len(prompt_ids) - 1 + request.min_new_tokens)
        if _penalties(request) != _NO_PENALTIES:
            self._occurrences = self._occurrences or Occurrences(self.lanes, self.vocabulary, self.device)
            self._occurrences.set(lane, prompt_ids, output_ids)

    def choose(self, logits: Tensor, lanes: Tensor, position: Tensor, features: Features) -> Sampled:
        """Samples the next token of each row of ``logits [n, V]``; ``lanes`` and ``position`` are int64 ``[n]``.

        ``features`` must include every optional part of sampling that one of these lanes needs. Padding rows may have
        any lane.
        """
        adjusted = logits
        if features.biased:
            adjusted = self._biases.add(widened(adjusted), lanes, position)
        if features.penalised and self._occurrences is not None:
            penalties = self._penalties[lanes].split(1, dim=1)
            adjusted = self._occurrences.penalise(widened(adjusted), lanes, *penalties)
        least = least_kept(adjusted, lanes, self._truncation, self._top_k) if features.truncated else None
        rows = (adjusted, lanes, position)
        token, bad = pick(*rows, self._temperature, self._key, sampled=features.sampled, least=least)
        scores = None if features.log_probabilities is None else score(logits, token, features.log_probabilities)
        return Sampled(token, bad, scores)

    def record(self, tokens: Tensor, lanes: Tensor, final: Tensor) -> None:
        """Adds tokens ``[n]`` to the outputs of their lanes, for penalties; skips rows where ``final [n]`` is false."""
        if self._occurrences is not None:
            self._occurrences.record(tokens, lanes, final)


def _penalties(request: Request) -> tuple[float, float, float]:
    return request.repetition_penalty, request.presence_penalty, request.frequency_penalty


class LaneBiases:
    """Holds the values to add to a few logits of each lane: logit biases, and bans up to a position.

    The buffers ``[lanes, entries]`` keep their addresses; unused entries add 0 to token 0.
    """

    def __init__(self, lanes: int, device: torch.device, eos: int):
        entries = MOST_BIASES + MOST_STOP_IDS + eos
        self._token = torch.zeros(lanes, entries, dtype=torch.int64, device=device)
        self._value = torch.zeros(lanes, entries, dtype=torch.float64, device=device)
        self._until = torch.zeros(lanes, entries, dtype=torch.int64, device=device)
        self._written: set[int] = set()

    def set(self, lane: int, biases: Mapping[int, float], banned: Collection[int], until: int) -> None:
        """Sets a lane's biases, and the tokens that are banned before position ``until``."""
        entries = [(int(token), float(value), _FOREVER) for token, value in biases.items()]
        entries += [(int(token), -math.inf, until) for token in banned]
        if not entries and lane not in self._written:
            return
        self._written.add(lane)
        entries += [(0, 0.0, 0)] * (self._token.shape[1] - len(entries))
        tokens, values, limits = zip(*entries, strict=True)
        for buffer, column in ((self._token, tokens), (self._value, values), (self._until, limits)):
            write_lane(buffer, lane, column)

    def add(self, logits: Tensor, lanes: Tensor, position: Tensor) -> Tensor:
        """Returns ``logits [n, V]`` plus the biases and bans of each row's lane that apply at the row's position."""
        value = torch.where(position[:, None] < self._until[lanes], self._value[lanes], 0.0)
        return logits.scatter_add(1, self._token[lanes], value.to(logits.dtype))


class Occurrences:
    """Counts the tokens of each lane's output, and marks those of its prompt, in fixed buffers ``[lanes, V]``."""

    def __init__(self, lanes: int, vocabulary: int, device: torch.device):
        self._prompt = torch.zeros(lanes, vocabulary, dtype=torch.bool, device=device)
        self._output = torch.zeros(lanes, vocabulary, dtype=torch.int32, device=device)

    def set(self, lane: int, prompt: Sequence[int], output: Sequence[int]) -> None:
        """Sets the tokens of a lane's prompt, and those of its output so far."""
        for buffer, tokens in ((self._prompt, prompt), (self._output, output)):
            count = torch.bincount(torch.tensor(tokens, dtype=torch.int64), minlength=buffer.shape[1])
            buffer[lane].copy_(count.to(buffer.dtype), non_blocking=True)

    def record(self, tokens: Tensor, lanes: Tensor, final: Tensor) -> None:
        """Adds tokens ``[n]`` to the output counts of their lanes; skips rows where ``final [n]`` is false."""
        index = lanes * self._output.shape[1] + tokens
        self._output.view(-1).scatter_add_(0, index, final.to(torch.int32))

    def penalise(
        self, logits: Tensor, lanes: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor
    ) -> Tensor:
        """Returns ``logits [n, V]`` after the penalties, ``[n, 1]`` each.

        ``repetition`` divides positive logits of tokens in prompt or output and multiplies negative ones; ``presence``
        is subtracted from logits of tokens in the output, ``frequency`` once per occurrence in the output.
        """
        repetition, presence, frequency = (penalty.to(logits.dtype) for penalty in (repetition, presence, frequency))
        output = self._output[lanes]
        occurred = self._prompt[lanes] | (output > 0)
        repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
        logits = torch.where(occurred, repeated, logits)
        return logits - presence * (output > 0) - frequency * output


def score(logits: Tensor, tokens: Tensor, top: int) -> Scores:
    """Returns log-probabilities of ``tokens [n]`` and of each row's ``top`` likeliest ids, from ``logits [n, V]``."""
    wide = widened(logits)
    normaliser = wide.logsumexp(-1, keepdim=True)
    ids = likeliest(wide, top)
    return Scores((wide.gather(1, tokens[:, None]) - normaliser).squeeze(1), ids, wide.gather(1, ids) - normaliser)


def prompt_log_probabilities(logits: Tensor, targets: Tensor, n: int) -> Scores:
    """Returns ``score(logits, targets, n)``, computed for a few rows at a time to save memory."""
    chunks = [score(*chunk, n) for chunk in zip(logits.split(_ROWS), targets.split(_ROWS), strict=True)]
    return Scores(*(torch.cat(column) for column in zip(*chunks, strict=True)))


def likeliest(logits: Tensor, n: int) -> Tensor:
    """Returns the ids of each row's n largest logits, ``[rows, min(n, V)]``; ties: lower id first.

    Logits are float32 or float64.
    """
    n = min(n, logits.shape[1])
    if logits.dtype == torch.float64:
        return logits.sort(dim=-1, descending=True, stable=True).indices[:, :n]
    # Sorts by logit, then by id, in one topk: as integers, the bits of floats have the same order once those of
    # negative floats are flipped; + 0.0 merges the two zeros.
    bits = (logits + 0.0).view(torch.int32)
    order = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long() << 32
    last = (1 << 32) - 1
    keys = order + (last - torch.arange(logits.shape[1], device=logits.device))
    return last - (keys.topk(n, dim=-1).values & last)
