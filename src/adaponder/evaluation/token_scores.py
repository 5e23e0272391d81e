"""Scores each token of a text after each iteration, and reuses the longest prefix shared with an earlier text.

Depth, gates, and the loss and likeliest tokens after each iteration equal those of one uncached forward over the text.
"""

from __future__ import annotations

import copy
from collections.abc import Generator, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

from adaponder.errors import EvaluationError, InputError
from adaponder.execution.ledger import Ledger
from adaponder.inference.policies import prefix_key
from adaponder.methods import Iteration
from adaponder.modeling import AdaPonderForCausalLM
from adaponder.ops.precision import widened
from adaponder.policies import Custom, FixedDepth, Policy, PolicyInput

# Maximum number of logits that are copied to float32 at a time: about 40 MB.
_CHUNK = 10_000_000
# If truncation would leave less than this share of a cached text, the text is copied first, since its client may
# continue it. A common prefix of fewer than _WORTH_COPYING tokens is not copied but scored anew.
_SHARE_LEFT = 0.5
_WORTH_COPYING = 32


@dataclass(frozen=True)
class ScoreSettings:
    """Settings for scoring a text; ``None`` means the model's default.

    Attributes:
        depths: depths by slot, which replace the policy's; slots beyond the text are ignored.
        top: number of likeliest tokens to return after each iteration.
        seed: seed of random policies.
        salt: cache namespace: a text reuses only texts that were scored with the same salt.
    """

    policy: Policy | None = None
    max_iterations: int | None = None
    depths: Mapping[int, int] | None = None
    top: int = 0
    seed: int = 0
    salt: str = ""

    def at_full_depth(self, model: AdaPonderForCausalLM) -> ScoreSettings:
        """Returns settings with every token at the maximum depth, without ``depths`` and ``top``."""
        deepest = self.max_iterations or model.config.iterations
        policy = FixedDepth(deepest) if model.method.halts else None
        return ScoreSettings(policy, self.max_iterations, seed=self.seed, salt=self.salt)


@dataclass
class TokenScore:
    """The scores of one token of a text; lists have an entry for each iteration in which the token was active.

    Attributes:
        gates: the ``gate`` value that the policy receives after each iteration but the last.
        nll: loss of the next token after each iteration, in nats.
        top: the likeliest next tokens after each iteration, with their log-probabilities.
        hidden: final-normed hidden state after each iteration, stored so that another next token can be scored later.
        notes: values that callers derive from the score, by name; cached with it and dropped when the score changes.
    """

    gates: list[float] = field(default_factory=list)
    nll: list[float] = field(default_factory=list)
    top: list[list[tuple[int, float]]] = field(default_factory=list)
    hidden: list[Tensor] = field(default_factory=list, repr=False)
    depth: int = 0
    notes: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False, compare=False)


@dataclass(frozen=True)
class TokenScores:
    """The score of each token; the first ``cached`` scores were reused from an earlier text.

    The last token has no target, so the ``nll`` of its score is meaningless.
    """

    tokens: list[TokenScore]
    cached: int

    @property
    def depths(self) -> list[int]:
        return [score.depth for score in self.tokens]

    @property
    def nll(self) -> list[float]:
        """Returns the loss of each token but the first, at the depth of the token before it."""
        return [score.nll[-1] for score in self.tokens[:-1]]


@dataclass(eq=False)
class _CachedText:
    """A scored text: its settings (``key``; ``None``: never cached), tokens, scores, and KV cache (``ledger``)."""

    key: Hashable
    ids: list[int]
    scores: list[TokenScore]
    ledger: Ledger


class TokenScorer:
    """Scores texts with one model and caches the KV rows of the latest texts; not thread-safe.

    The model must be in evaluation mode and have ``reuse="state"``. ``max_bytes`` limits cached keys and values.
    """

    def __init__(self, model: AdaPonderForCausalLM, *, max_texts: int = 16, max_bytes: int = 1 << 28):
        self.model = model
        self._max_texts, self._max_bytes = max_texts, max_bytes
        self._cache: list[_CachedText] = []  # in order of use, the latest last

    @property
    def nbytes(self) -> int:
        """Returns the number of bytes of cached keys and values."""
        return sum(entry.ledger.nbytes for entry in self._cache)

    def score(self, ids: Sequence[int], how: ScoreSettings) -> TokenScores:
        """Scores a text of at least one token; raises :class:`InputError` for invalid ids or settings."""
        parts = self.in_parts(ids, how, len(ids))
        while True:
            try:
                next(parts)
            except StopIteration as end:
                return end.value

    def in_parts(self, ids: Sequence[int], how: ScoreSettings, size: int) -> Generator[None, None, TokenScores]:
        """Equals :meth:`score`, as a generator that yields after every ``size`` tokens.

        Other texts may be scored in between. Tokens scored so far are cached even if the generator is closed early.
        """
        ids = [int(token) for token in ids]
        self._check(ids, how)
        rule = how.policy or self.model.method.default_policy(training=False)
        policy_key = prefix_key(rule, how.seed)
        key = (how.salt, policy_key, how.max_iterations, tuple(sorted((how.depths or {}).items())))
        entry, past = self._longest_prefix(None if policy_key is None else key, ids, how.max_iterations)
        try:
            if 0 < past < len(ids):
                last = replace(entry.scores[past - 1], nll=[])
                self._measure([last], [ids[past]], 0)
                entry.scores[past - 1] = last
            for start in range(past, len(ids), size):
                end = min(start + size, len(ids))
                entry.scores += self._read(ids, start, end, entry.ledger, how, rule)
                entry.ids = ids[:end]
                if end < len(ids):
                    yield
        finally:
            if entry.key is not None and entry.ids:
                self._cache.append(entry)
            while len(self._cache) > self._max_texts or (self._cache and self.nbytes > self._max_bytes):
                del self._cache[0]
        scores = entry.scores[: len(ids)]
        self._measure(scores, [*ids[1:], 0], how.top)
        return TokenScores(scores, past)

    def _check(self, ids: list[int], how: ScoreSettings) -> None:
        config = self.model.config
        if not ids:
            raise InputError("prompt is empty; pass at least one token")
        limit = config.max_position_embeddings
        if limit is not None and len(ids) > limit:
            raise InputError(f"prompt has {len(ids)} tokens, the backbone has {limit} positions; shorten it")
        last = config.vocab_size - 1
        if wrong := [token for token in ids if not 0 <= token <= last]:
            raise InputError(f"prompt: token id {wrong[0]} must be from 0 to {last}")
        for slot, depth in (how.depths or {}).items():
            if slot < 0 or not 1 <= depth <= config.iterations:
                raise InputError(f"depths[{slot}]={depth} must be from 1 to {config.iterations}")
        if how.depths and not self.model.method.halts:
            raise InputError("depths: this model gives every token the same depth; use max_iterations to reduce it")

    def _longest_prefix(self, key: Hashable, ids: list[int], max_iterations: int | None) -> tuple[_CachedText, int]:
        """Returns the cached text that shares the longest prefix with ``ids``, and the prefix's length.

        The text is removed from the cache (or copied, if most of it differs) and truncated to the prefix, unless the
        prefix is all of ``ids``. If nothing is worth reusing, returns an empty text and 0.
        """
        best, common = None, 0
        for entry in self._cache:
            length = _common(ids, entry.ids) if entry.key == key else 0
            if length > common:
                best, common = entry, length
        if best is not None and common == len(ids):
            self._cache.remove(best)
            return best, common
        copied = best is not None and common < _SHARE_LEFT * len(best.ids)
        if best is None or (copied and common < _WORTH_COPYING):
            return _CachedText(key, [], [], self.model.new_ledger(max_iterations)), 0
        if not copied:
            self._cache.remove(best)
        ledger = copy.deepcopy(best.ledger) if copied else best.ledger
        ledger.crop(common - ledger.get_seq_length())
        return _CachedText(key, best.ids[:common], best.scores[:common], ledger), common

    @torch.inference_mode()
    def _read(
        self, ids: list[int], past: int, end: int, ledger: Ledger, how: ScoreSettings, rule: Policy
    ) -> list[TokenScore]:
        """Scores ``ids[past:end]`` and adds their rows to the ledger, which has those of all earlier tokens."""
        scores = [TokenScore() for _ in ids[past:end]]
        policy = how.policy
        if how.depths:
            self.model.check_policy(rule)
            rule.check_batch(1, len(ids))
            policy = Custom(_forced(rule, how.depths, len(ids), self.model.device))

        def record(iteration: Iteration) -> None:
            active = iteration.active[0].nonzero().squeeze(1)
            tokens = active.tolist()
            for token, state in zip(tokens, iteration.hidden[0, active], strict=True):
                scores[token].hidden.append(state)
            if iteration.gate is not None:
                for token, gate in zip(tokens, iteration.gate[0, active].tolist(), strict=True):
                    scores[token].gates.append(gate)

        output = self.model(
            torch.tensor([ids[past:end]], device=self.model.device),
            past_key_values=ledger,
            use_cache=True,
            policy=policy,
            max_iterations=how.max_iterations,
            seed=how.seed,
            on_iteration=record,
            output_logits=False,
            output_gates=False,
        )
        for score, depth in zip(scores, output.depth[0].tolist(), strict=True):
            score.depth = depth
        self._measure(scores, [*ids, 0][past + 1 : end + 1], how.top)
        return scores

    @torch.inference_mode()
    def _measure(self, scores: list[TokenScore], targets: list[int], top: int) -> None:
        """Adds each iteration's loss and ``top`` likeliest tokens to the ``scores`` that lack them."""
        vocabulary = self.model.config.vocab_size
        top = min(top, vocabulary)
        states: list[tuple[TokenScore, Tensor, int]] = []
        for score, target in zip(scores, targets, strict=True):
            lacks_top = top > 0 and (not score.top or len(score.top[0]) != top)
            if not score.nll or lacks_top:
                score.top = [] if top else score.top
                states += [(score, state, target) for state in score.hidden]
        size = max(1, _CHUNK // vocabulary)
        for start in range(0, len(states), size):
            chunk = states[start : start + size]
            logits = self.model.wrapped.logits(torch.stack([state for _, state, _ in chunk]))
            log_p = torch.log_softmax(widened(logits), -1)
            ids = torch.tensor([target for _, _, target in chunk], device=log_p.device)
            losses = -log_p.gather(-1, ids[:, None])[:, 0]
            if not bool(losses.isfinite().all()):
                raise EvaluationError("prompt: the loss is not finite; the weights overflow in this precision")
            values, likeliest = (tensor.tolist() for tensor in log_p.topk(top, -1))
            for index, ((score, _, _), loss) in enumerate(zip(chunk, losses.tolist(), strict=True)):
                if len(score.nll) < len(score.hidden):
                    score.nll.append(loss)
                if top:
                    score.top.append(list(zip(likeliest[index], values[index], strict=True)))


def _common(left: list[int], right: list[int]) -> int:
    """Returns the length of the common prefix of two lists."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False)))


def _forced(rule: Policy, depths: Mapping[int, int], slots: int, device: torch.device) -> Any:
    """Returns a callable policy that gives the slots in ``depths`` these depths and applies ``rule`` to all others."""
    forced = torch.tensor([depths.get(slot, 0) for slot in range(slots)], device=device)

    def decide(rows: PolicyInput) -> Tensor:
        depth = forced[rows.slot]
        return torch.where(depth > 0, rows.iteration + 1 < depth, rule(rows))

    return decide
