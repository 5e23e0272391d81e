"""The next token of each row, chosen on the device: the same whatever else is in the batch.

A row's logits go through, in this order: logit bias, and a ban of stop ids until ``min_new_tokens``; repetition,
presence and frequency penalties; temperature; top-k; top-p of what top-k left; min-p. Tokens as likely as the least
likely one that stays all stay. A token is drawn by Gumbel noise that is a hash of (seed, sample, position, token id).
Greedy rows take the first of the likeliest tokens. Log-probabilities are of the model's own distribution, before all of
this.

Settings of all lanes lie in device tensors that never move, shapes depend on the number of rows and on
:class:`Features` alone, and the host never waits: a CUDA graph can hold :meth:`SamplerState.choose`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from adaponder.inference.penalties import LaneBiases, Occurrences
from adaponder.inference.request import Request
from adaponder.ops.next_token import least_kept, pick, stream_key
from adaponder.ops.precision import widened

# Rows of a prompt that are scored at a time.
_ROWS = 64
# How many likeliest tokens are computed where some are asked for: few sizes, so that few graphs are captured.
_TOP_SIZES = (0, 5, 20)


class Features(NamedTuple):
    """What any lane needs; the rest is not computed. Rows whose lane does not need it get the same token either way.

    ``log_probabilities`` is the number of likeliest tokens to return with them; ``None``: no log-probabilities at all.
    """

    sampled: bool = False
    truncated: bool = False
    penalised: bool = False
    biased: bool = False
    log_probabilities: int | None = None

    @classmethod
    def of(cls, request: Request) -> Features:
        top = request.log_probabilities
        return cls(
            sampled=not request.greedy,
            truncated=not request.greedy and bool(request.top_k or request.top_p < 1 or request.min_p > 0),
            penalised=request.repetition_penalty != 1
            or request.presence_penalty != 0
            or request.frequency_penalty != 0,
            biased=bool(request.logit_bias) or request.min_new_tokens > 0,
            log_probabilities=None if top is None else next(size for size in _TOP_SIZES if size >= top),
        )

    @classmethod
    def union(cls, features: Iterable[Features]) -> Features:
        """What is needed by any of these."""
        every = tuple(features)
        tops = [one.log_probabilities for one in every if one.log_probabilities is not None]
        return cls(
            sampled=any(one.sampled for one in every),
            truncated=any(one.truncated for one in every),
            penalised=any(one.penalised for one in every),
            biased=any(one.biased for one in every),
            log_probabilities=max(tops, default=None),
        )


class Scored(NamedTuple):
    """Log-probabilities of one token per row, ``[n]``, and the likeliest tokens with theirs, ``[n, top]``."""

    log_probability: Tensor
    top_ids: Tensor
    top_log_probabilities: Tensor


class Chosen(NamedTuple):
    """The chosen token of each row, int64 ``[n]``.

    ``bad`` marks rows without a choice, whose token has no meaning: logits that are NaN or infinite, or every token
    banned. ``scored`` is ``None`` where no lane asks for log-probabilities.
    """

    token: Tensor
    bad: Tensor
    scored: Scored | None = None


class SamplerState:
    """The sampling settings of every lane, and the choice by them.

    ``eos_ids`` are banned with a request's stop ids until its ``min_new_tokens``. Logits are computed in their own
    precision, and at least in float32.
    """

    def __init__(
        self,
        lanes: int,
        vocabulary: int,
        device: torch.device | str = "cpu",
        *,
        eos_ids: Collection[int] = (),
    ):
        self.lanes, self.vocabulary, self.device = lanes, vocabulary, torch.device(device)
        self.eos_ids = tuple(eos_ids)
        self._numbers = torch.ones(lanes, 6, dtype=torch.float64, device=self.device)
        self._integers = torch.ones(lanes, 2, dtype=torch.int64, device=self.device)
        self._biases: LaneBiases | None = None
        self._occurrences: Occurrences | None = None

    def set(
        self, lane: int, request: Request, sample: int, prompt_ids: Sequence[int], output_ids: Sequence[int] = ()
    ) -> None:
        """Gives a lane to one sample of a request; ``output_ids`` are what it has generated already."""
        features = Features.of(request)
        top_k = min(request.top_k, self.vocabulary) or self.vocabulary
        integers = [stream_key(request.seed, sample), top_k]
        numbers = [
            0.0 if request.greedy else float(request.temperature),
            float(request.top_p),
            math.log(request.min_p) if request.min_p > 0 else -math.inf,
            float(request.repetition_penalty),
            float(request.presence_penalty),
            float(request.frequency_penalty),
        ]
        for buffer, values in ((self._integers, integers), (self._numbers, numbers)):
            buffer[lane].copy_(torch.tensor(values, dtype=buffer.dtype), non_blocking=True)
        if features.biased and self._biases is None:
            self._biases = LaneBiases(self.lanes, self.device, len(self.eos_ids))
        if self._biases is not None:
            ends = {*request.stop_ids, *(() if request.ignore_eos else self.eos_ids)}
            # The row at the prompt's last position chooses the first token.
            until = len(prompt_ids) - 1 + request.min_new_tokens
            self._biases.set(lane, request.logit_bias, ends if request.min_new_tokens else (), until)
        if features.penalised and self._occurrences is None:
            self._occurrences = Occurrences(self.lanes, self.vocabulary, self.device)
        if self._occurrences is not None and features.penalised:
            self._occurrences.set(lane, prompt_ids, output_ids)

    def choose(self, logits: Tensor, lanes: Tensor, position: Tensor, features: Features) -> Chosen:
        """The next token of each row.

        Args:
            logits: ``[n, V]``, of any floating type.
            lanes: int64 ``[n]``, the lane of each row; padding rows may name any.
            position: int64 ``[n]``, the position of each row's token, from 0.
            features: at least what the rows' lanes need.
        """
        adjusted = logits
        if features.biased and self._biases is not None:
            adjusted = self._biases.add(widened(adjusted), lanes, position)
        if features.penalised and self._occurrences is not None:
            penalties = self._numbers[lanes, 3:].split(1, dim=1)
            adjusted = self._occurrences.penalise(widened(adjusted), lanes, *penalties)
        least = None
        if features.truncated:
            least = least_kept(adjusted, lanes, self._numbers[:, :3], self._integers[:, 1])
        temperature, key = self._numbers[:, 0], self._integers[:, 0]
        token, bad = pick(adjusted, lanes, position, temperature, key, sampled=features.sampled, least=least)
        scored = None if features.log_probabilities is None else score(logits, token, features.log_probabilities)
        return Chosen(token, bad, scored)

    def record(self, tokens: Tensor, lanes: Tensor, taken: Tensor) -> None:
        """Counts the tokens of rows where ``taken`` as output of their lanes, for the penalties; all are ``[n]``."""
        if self._occurrences is not None:
            self._occurrences.record(tokens, lanes, taken)


def score(logits: Tensor, tokens: Tensor, top: int) -> Scored:
    """Log-probabilities of ``tokens [n]`` and of the ``top`` likeliest, in the distribution of ``logits [n, V]``."""
    wide = widened(logits)
    normaliser = wide.logsumexp(-1, keepdim=True)
    ids = likeliest(wide, top)
    return Scored((wide.gather(1, tokens[:, None]) - normaliser).squeeze(1), ids, wide.gather(1, ids) - normaliser)


def prompt_log_probabilities(logits: Tensor, targets: Tensor, n: int) -> Scored:
    """What :func:`score` says of each prompt token ``targets [rows]`` by the row before it, a few rows at a time."""
    parts = [score(*part, n) for part in zip(logits.split(_ROWS), targets.split(_ROWS), strict=True)]
    return Scored(*(torch.cat(column) for column in zip(*parts, strict=True)))


def likeliest(logits: Tensor, n: int) -> Tensor:
    """Ids ``[rows, n]`` of the n largest of each row of float32 or float64 ``logits``; of equals, the smaller id first.

    There are at most V of them.
    """
    n = min(n, logits.shape[1])
    if logits.dtype == torch.float64:
        return logits.sort(dim=-1, descending=True, stable=True).indices[:, :n]
    # A float's bits order as whole numbers do once negative ones are flipped; + 0.0 makes one zero of two.
    bits = (logits + 0.0).view(torch.int32)
    order = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long() << 32
    last = (1 << 32) - 1
    keys = order + (last - torch.arange(logits.shape[1], device=logits.device))
    return last - (keys.topk(n, dim=-1).values & last)
