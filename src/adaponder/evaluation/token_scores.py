"""Scores a text token by token and iteration by iteration, reusing the longest common beginning of earlier texts.

Equals one uncached forward over the whole text: depth, gates, and the loss and the likeliest tokens after each
iteration of each token.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Generator, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from adaponder.errors import EvaluationError, InputError
from adaponder.execution.ledger import Ledger
from adaponder.inference.policies import prefix_key
from adaponder.methods import Iteration
from adaponder.modeling import AdaPonderForCausalLM
from adaponder.ops.precision import widened
from adaponder.policies import FixedDepth, Policy, PolicyInput

# Bounds the float32 copy of logits: about 40 MB.
_CHUNK = 10_000_000
# A cached text that would lose more than this share is copied, not cut: its client may continue with it.
_SHARE_LEFT = 0.5
_WORTH_COPYING = 32


@dataclass(frozen=True)
class Reading:
    """How a text is scored.

    Attributes:
        policy: decides depth; ``None``: the method's own rule.
        max_iterations: cap on the depth of every token.
        depths: forced depth by slot; slots beyond the text are ignored.
        top: number of likeliest tokens to return after each iteration.
        seed: of random policies.
        salt: cache namespace; texts are reused only within one salt.
    """

    policy: Policy | None = None
    max_iterations: int | None = None
    depths: Mapping[int, int] | None = None
    top: int = 0
    seed: int = 0
    salt: str = ""

    def at_full_depth(self, model: AdaPonderForCausalLM) -> Reading:
        """Returns the same settings with every token at the maximum depth."""
        deepest = self.max_iterations or model.config.iterations
        policy = FixedDepth(deepest) if model.method.halts else None
        return Reading(policy, self.max_iterations, seed=self.seed, salt=self.salt)


@dataclass
class TokenScore:
    """The scores of one token.

    Attributes:
        gates: the policy's ``gate`` input after each iteration.
        nll: loss of the next token after each iteration, in nats.
        top: the likeliest next tokens after each iteration, with their log-probabilities.
        hidden: final-normed hidden state after each iteration, to score another next token later.
        notes: values that callers derive from the score and cache with it, by name; a changed score has none.
    """

    gates: list[float] = field(default_factory=list)
    nll: list[float] = field(default_factory=list)
    top: list[list[tuple[int, float]]] = field(default_factory=list)
    hidden: list[Tensor] = field(default_factory=list, repr=False)
    depth: int = 0
    notes: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False, compare=False)


@dataclass(frozen=True)
class TokenScores:
    """The score of each token of a text; ``cached`` of them come from an earlier text.

    The ``nll`` of the last one has no meaning: no token follows.
    """

    tokens: list[TokenScore]
    cached: int

    @property
    def depths(self) -> list[int]:
        return [score.depth for score in self.tokens]

    @property
    def nll(self) -> list[float]:
        """Returns the loss of each token from the second on."""
        return [score.nll[-1] for score in self.tokens[:-1]]


@dataclass(eq=False)
class _CachedText:
    """A scored text: its tokens, their scores, and their KV cache."""

    ids: list[int]
    scores: list[TokenScore]
    ledger: Ledger


@dataclass(frozen=True)
class _Forced(Policy):
    """Forces the depths of some slots and leaves the others to ``rule``."""

    rule: Policy
    depths: Tensor
    word: ClassVar[str] = ""

    def __call__(self, rows: PolicyInput) -> Tensor:
        forced = self.depths.to(rows.slot.device)[rows.slot]
        return torch.where(forced > 0, rows.iteration + 1 < forced, self.rule(rows))

    def check(self, method: str, iterations: int) -> None:
        self.rule.check(method, iterations)

    def check_signal(self, signal: str, method: str, iterations: int) -> None:
        self.rule.check_signal(signal, method, iterations)

    def check_batch(self, sequences: int, slots: int) -> None:
        self.rule.check_batch(sequences, slots)


class TokenScorer:
    """Scores texts with one model and caches the KV rows of the latest ones; not thread-safe.

    Args:
        model: in evaluation mode, with ``reuse="state"``.
        kept: maximum number of cached texts.
        kept_bytes: maximum bytes of their keys and values.
    """

    def __init__(self, model: AdaPonderForCausalLM, *, kept: int = 16, kept_bytes: int = 1 << 28):
        self.model = model
        self._most, self._most_bytes = kept, kept_bytes
        self._cache: OrderedDict[int, tuple[Hashable, _CachedText]] = OrderedDict()
        self._numbers = 0

    def forget(self) -> None:
        """Clears the cache."""
        self._cache.clear()

    @property
    def nbytes(self) -> int:
        """Returns the bytes of cached keys and values."""
        return sum(entry.ledger.nbytes for _, entry in self._cache.values())

    def score(self, ids: Sequence[int], how: Reading) -> TokenScores:
        """Scores a text of at least one token; raises :class:`InputError` for invalid ids or settings."""
        parts = self.in_parts(ids, how, len(ids))
        while True:
            try:
                next(parts)
            except StopIteration as end:
                return end.value

    def in_parts(self, ids: Sequence[int], how: Reading, size: int) -> Generator[None, None, TokenScores]:
        """Returns what :meth:`score` does, and yields after each ``size`` tokens.

        Other texts may be scored in between. Scored tokens are cached even if the generator is abandoned.
        """
        ids = [int(token) for token in ids]
        self._check(ids, how)
        rule = how.policy or self.model.method.default_policy(training=False)
        decides = prefix_key(rule, how.seed)
        depths = tuple(sorted((how.depths or {}).items()))
        key = None if decides is None else (how.salt, decides, how.max_iterations, depths)
        number, entry, common = self._find(key, ids)
        if entry is not None and common == len(ids):
            self._cache.move_to_end(number)
            scores = entry.scores[: len(ids)]
            self._name_likeliest(scores, how.top)
            return TokenScores(scores, len(ids))
        entry = self._cut(number, entry, common, how.max_iterations)
        past = len(entry.scores)
        try:
            if past:
                entry.scores[-1] = self._followed_by(entry.scores[-1], ids[past])
            for start in range(past, len(ids), size):
                end = min(start + size, len(ids))
                entry.scores += self._read(ids, start, end, entry.ledger, how, rule)
                entry.ids = ids[:end]
                if end < len(ids):
                    yield
        finally:
            if key is not None and entry.ids:
                self._numbers += 1
                self._cache[self._numbers] = (key, entry)
                self._make_room()
        scores = list(entry.scores)
        self._name_likeliest(scores, how.top)
        return TokenScores(scores, past)

    def _check(self, ids: list[int], how: Reading) -> None:
        config = self.model.config
        if not ids:
            raise InputError("prompt is empty; pass at least one token")
        limit = config.max_position_embeddings
        if limit is not None and len(ids) > limit:
            raise InputError(f"prompt has {len(ids)} tokens, the backbone has {limit} positions; shorten it")
        last = config.vocab_size - 1
        if min(ids) < 0 or max(ids) > last:
            wrong = next(token for token in ids if not 0 <= token <= last)
            raise InputError(f"prompt: token id {wrong} must be from 0 to {last}")
        most = config.iterations
        for slot, depth in (how.depths or {}).items():
            if slot < 0 or not 1 <= depth <= most:
                raise InputError(f"depths[{slot}]={depth} must be from 1 to {most}")
        if how.depths and not self.model.method.halts:
            raise InputError("depths: this model gives every token the same depth; use max_iterations to reduce it")

    # --- kept texts ---------------------------------------------------------------------------------------------

    def _find(self, key: Hashable | None, ids: list[int]) -> tuple[int, _CachedText | None, int]:
        """Returns the cached text with the longest common beginning, and its length."""
        best: tuple[int, _CachedText | None, int] = (0, None, 0)
        for number, (other, entry) in self._cache.items():
            if other != key:
                continue
            common = _common(ids, entry.ids)
            if common > best[2]:
                best = number, entry, common
        return best

    def _cut(self, number: int, entry: _CachedText | None, common: int, max_iterations: int | None) -> _CachedText:
        """Returns the first ``common`` tokens of a cached text to continue from."""
        cut = common < _SHARE_LEFT * len(entry.ids) if entry is not None else True
        if entry is None or (cut and common < _WORTH_COPYING):
            return _CachedText([], [], self.model.new_ledger(max_iterations))
        if cut:
            entry = _CachedText(list(entry.ids), list(entry.scores), copy.deepcopy(entry.ledger))
        else:
            del self._cache[number]
        entry.ledger.crop(common - entry.ledger.get_seq_length())
        return _CachedText(entry.ids[:common], entry.scores[:common], entry.ledger)

    def _make_room(self) -> None:
        while len(self._cache) > self._most or (self._cache and self.nbytes > self._most_bytes):
            self._cache.popitem(last=False)

    # --- reading ------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def _followed_by(self, score: TokenScore, token: int) -> TokenScore:
        """Returns the score with another next token."""
        log_p = self._log_probabilities(torch.stack(score.hidden))
        return replace(score, nll=(-log_p[:, token]).tolist())

    def _log_probabilities(self, hidden: Tensor) -> Tensor:
        return torch.log_softmax(widened(self.model.wrapped.logits(hidden)), -1)

    @torch.inference_mode()
    def _name_likeliest(self, scores: list[TokenScore], top: int) -> None:
        """Adds the ``top`` likeliest tokens after each iteration to scores that lack them."""
        top = min(top, self.model.config.vocab_size)
        lacking = [score for score in scores if top and not (score.top and len(score.top[0]) == top)]
        states = [(score, state) for score in lacking for state in score.hidden]
        for score in lacking:
            score.top = []
        size = self._states_at_once
        for start in range(0, len(states), size):
            some = states[start : start + size]
            log_p = self._log_probabilities(torch.stack([state for _, state in some]))
            for (score, _), likeliest in zip(some, _likeliest(log_p, top), strict=True):
                score.top.append(likeliest)

    @property
    def _states_at_once(self) -> int:
        return max(1, _CHUNK // self.model.config.vocab_size)

    @torch.inference_mode()
    def _read(
        self, ids: list[int], past: int, end: int, ledger: Ledger, how: Reading, rule: Policy
    ) -> list[TokenScore]:
        """Scores the tokens from ``past`` to ``end``; earlier ones have rows in the ledger."""
        model, device = self.model, self.model.device
        scores = [TokenScore() for _ in ids[past:end]]
        targets = torch.tensor([*ids, 0][past + 1 : end + 1], device=device)
        policy = how.policy
        if how.depths:
            forced = torch.zeros(len(ids), dtype=torch.long)
            for slot, depth in how.depths.items():
                if slot < len(ids):
                    forced[slot] = depth
            policy = _Forced(rule, forced)

        def watch(iteration: Iteration) -> None:
            active = iteration.active[0].nonzero().squeeze(1)
            self._note(iteration, active, targets, scores, how.top)

        output = model(
            torch.tensor([ids[past:end]], device=device),
            past_key_values=ledger,
            use_cache=True,
            policy=policy,
            max_iterations=how.max_iterations,
            seed=how.seed,
            on_iteration=watch,
            output_logits=False,
            output_gates=False,
        )
        for score, depth in zip(scores, output.depth[0].tolist(), strict=True):
            score.depth = depth
        return scores

    def _note(self, iteration: Iteration, active: Tensor, targets: Tensor, scores: list[TokenScore], top: int) -> None:
        """Records gates, losses and likeliest tokens of the active tokens of an iteration."""
        size = self._states_at_once
        numbers = active.tolist()
        if iteration.gate is not None:
            for number, gate in zip(numbers, iteration.gate[0, active].tolist(), strict=True):
                scores[number].gates.append(gate)
        for start in range(0, len(numbers), size):
            some = active[start : start + size]
            hidden = iteration.hidden[0, some]
            log_p = self._log_probabilities(hidden)
            losses = -log_p.gather(-1, targets[some, None])[:, 0]
            if not bool(losses.isfinite().all()):
                raise EvaluationError("prompt: the loss is not finite; the weights overflow in this precision")
            for number, loss, state in zip(numbers[start : start + size], losses.tolist(), hidden, strict=True):
                scores[number].nll.append(loss)
                scores[number].hidden.append(state)
            if top:
                for number, likeliest in zip(numbers[start : start + size], _likeliest(log_p, top), strict=True):
                    scores[number].top.append(likeliest)


def _likeliest(log_p: Tensor, top: int) -> list[list[tuple[int, float]]]:
    """Returns the ``top`` likeliest tokens of each distribution and their log-probabilities."""
    values, ids = log_p.topk(min(top, log_p.shape[-1]), -1)
    return [list(zip(*one, strict=True)) for one in zip(ids.tolist(), values.tolist(), strict=True)]


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    """Returns the length of the common beginning."""
    length = min(len(left), len(right))
    if left[:length] == right[:length]:
        return length
    low, high = 0, length  # the beginnings of length ``low`` are equal, those of ``high`` are not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if left[:middle] == right[:middle] else (low, middle)
    return low
