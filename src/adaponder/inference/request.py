"""Defines requests to the engine and checks them."""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from adaponder.errors import InputError, shown
from adaponder.fields import REQUEST_FIELDS, Sampling, as_plain_number, check
from adaponder.modeling import AdaPonderForCausalLM, PolicyLike
from adaponder.modeling.arguments import check_room
from adaponder.policies import LearnedGate, Policy, as_policy

MOST_SAMPLES, MOST_TOP = (int(REQUEST_FIELDS[name].range.bounds["le"]) for name in ("samples", "log_probabilities"))
MOST_BIASES = 1024
MOST_STOP_IDS = 256
# Below this temperature sampling is greedy.
LOWEST_TEMPERATURE = 1e-5


@dataclass(frozen=True)
class Request(Sampling):
    """A prompt and how to continue it: the fields of :class:`adaponder.fields.Sampling`, and those below.

    Attributes:
        prompt: token ids, at least one.
        logit_bias: values added to the logits of these token ids.
        stop_ids: token ids that end the completion, beside the model's end-of-text ids.
        policy: the halting policy; ``None`` takes the method's default policy, with the threshold ``tau`` if set.
        depths: forced depths, as a list from slot 0 or as a mapping from slots; 0 or no entry leaves the slot to the
            policy. Only the policy's decision is replaced: gates and expected embeddings are still computed.
        salt: only requests with equal salts share the rows of a common prefix.
        client: requests of different clients share the engine fairly (see :class:`Scheduler
            <adaponder.inference.scheduler.Scheduler>`); results do not depend on it.
    """

    prompt: Sequence[int]
    _: KW_ONLY
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    stop_ids: Sequence[int] = ()
    policy: PolicyLike | None = None
    depths: Mapping[int, int] | Sequence[int] | None = None
    salt: str = ""
    client: str = ""

    def __post_init__(self) -> None:
        # NumPy integers can overflow, and torch cannot index with all of them. Non-numbers are left to check_request.
        for name, setting in REQUEST_FIELDS.items():
            object.__setattr__(self, name, as_plain_number(getattr(self, name), setting.type))

    @property
    def greedy(self) -> bool:
        """Whether every token is the likeliest one: temperature (almost) 0, or ``top_k`` 1."""
        return self.temperature < LOWEST_TEMPERATURE or self.top_k == 1


def check_request(
    request: Request, model: AdaPonderForCausalLM, *, positions: int, iterations: int, eos_ids: Collection[int]
) -> None:
    """Raises :class:`InputError` if a request is invalid.

    ``positions`` is the maximum length of a sequence, ``iterations`` the maximum depth of a token.
    """
    if not isinstance(request, Request):
        raise InputError(f"request={shown(request)} must be a Request, as in Request(prompt=ids)")
    vocabulary = model.config.vocab_size
    prompt = _check_ids("prompt", request.prompt, vocabulary)
    if not prompt:
        raise InputError("prompt is empty; give at least one token id")
    for name in REQUEST_FIELDS:
        if name != "tau" or request.tau != math.inf:  # tau=inf halts every token after one iteration
            check(name, getattr(request, name))
    new_tokens, minimum = request.max_new_tokens, request.min_new_tokens
    if minimum > new_tokens:
        raise InputError(f"min_new_tokens={minimum} must be at most max_new_tokens={new_tokens}")
    if len(prompt) > positions:
        raise InputError(f"prompt has {len(prompt)} tokens, and the backbone {positions} positions; shorten it")
    check_room(len(prompt), new_tokens, positions)
    if not isinstance(request.logit_bias, Mapping):
        raise InputError(f"logit_bias={shown(request.logit_bias)} must be a mapping from token ids to numbers")
    _check_length("logit_bias", request.logit_bias, MOST_BIASES)
    _check_pairs("logit_bias", request.logit_bias, vocabulary - 1, float, -100, 100)
    stop_ids = _check_ids("stop_ids", request.stop_ids, vocabulary)
    _check_length("stop_ids", stop_ids, MOST_STOP_IDS)
    stops = set(stop_ids) | (set() if request.ignore_eos else set(eos_ids))
    if minimum and len(stops) >= vocabulary:
        raise InputError(f"min_new_tokens={minimum} cannot be reached: every token id stops; remove some from stop_ids")
    for name, value in (("salt", request.salt), ("client", request.client)):
        if not isinstance(value, str):
            raise InputError(f"{name}={shown(value)} must be a string")
    slots = len(prompt) + new_tokens - 1
    _check_policy(request, model, slots, iterations)
    if request.depths is not None:
        _check_depths(request.depths, model, slots, iterations)


def policy_of(request: Request, model: AdaPonderForCausalLM) -> Policy:
    """Returns the halting policy of a request."""
    if request.policy is not None:
        return as_policy(request.policy)
    return model.method.default_policy(training=False) if request.tau is None else LearnedGate(float(request.tau))


def forced_depths(request: Request) -> dict[int, int]:
    """Returns ``request.depths`` as ``{slot: depth}``, without depths of 0."""
    if request.depths is None:
        return {}
    pairs = request.depths.items() if isinstance(request.depths, Mapping) else enumerate(request.depths)
    return {operator.index(slot): operator.index(depth) for slot, depth in pairs if depth}


def _check_policy(request: Request, model: AdaPonderForCausalLM, slots: int, iterations: int) -> None:
    """Raises unless ``max_iterations``, ``tau`` and ``policy`` fit the model, the engine and each other."""
    if request.max_iterations is not None and request.max_iterations > iterations:
        raise InputError(f"max_iterations={request.max_iterations} must be at most {iterations}")
    if request.tau is not None:
        if request.policy is not None:
            raise InputError(f"tau={shown(request.tau)} cannot be combined with policy; give one of them")
        if not isinstance(model.method.default_policy(training=False), LearnedGate):
            raise InputError(f"tau={shown(request.tau)}: {model.config.method} has no learned threshold; leave it out")
    if request.policy is not None:
        model.check_policy(request.policy)
        policy = as_policy(request.policy)
        if not policy.causal or not policy.row_by_row:
            raise InputError(
                f"policy={policy.spelling} reads other tokens of the sequence: it can be evaluated, but it cannot "
                "generate; use a policy that decides for each token separately"
            )
        policy.check_batch(1, slots)


def _check_depths(depths: Any, model: AdaPonderForCausalLM, slots: int, iterations: int) -> None:
    if not model.method.halts:
        raise InputError(f"depths: {model.config.method} never halts early; use max_iterations for fewer iterations")
    if isinstance(depths, (str, bytes)) or not hasattr(depths, "__len__"):
        raise InputError(f"depths={shown(depths)} must be a list of depths from slot 0, or a mapping from slots")
    _check_length("depths", depths, slots)
    _check_pairs("depths", depths, slots - 1, int, 0, iterations)


def _check_length(name: str, values: Collection[Any], limit: int) -> None:
    if len(values) > limit:
        raise InputError(f"{name} has {len(values)} entries and must have at most {limit}")


def _check_pairs(name: str, values: Any, last_key: int, kind: type, minimum: float, maximum: float) -> None:
    """Raises unless the keys of a mapping (or indices of a list) are 0 to ``last_key`` and its values are in range."""
    for key, value in values.items() if isinstance(values, Mapping) else enumerate(values):
        _check_number(f"{name}: key", key, int, 0, last_key)
        _check_number(f"{name}[{key}]", value, kind, minimum, maximum)


def _check_ids(name: str, values: Any, vocabulary: int) -> list[int]:
    """Returns token ids as Python integers; raises unless ``values`` is a list of token ids."""
    try:
        len(values)  # raises for iterators, and for tensors without an axis
        if isinstance(values, (str, bytes, Mapping)):
            raise TypeError
    except TypeError:
        cure = "tokenizer(text).input_ids encodes a text"
        raise InputError(f"{name}={shown(values)} must be a list of token ids; {cure}") from None
    return [_check_number(f"{name}: token id", value, int, 0, vocabulary - 1) for value in values]


def _check_number(name: str, value: Any, kind: type, minimum: float, maximum: float) -> Any:
    """Converts a number, e.g. of NumPy or torch, to ``kind``; raises unless it is from ``minimum`` to ``maximum``."""
    number = as_plain_number(value, kind)
    if isinstance(number, bool) or not isinstance(number, kind) or not minimum <= number <= maximum:
        words = "a whole number" if kind is int else "a number"
        raise InputError(f"{name} {shown(value)} must be {words} between {minimum} and {maximum}")
    return number
