"""What a request may ask of the engine, and each refusal with the field, the value and the cure."""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from adaponder.errors import InputError, shown
from adaponder.modeling import AdaPonderForCausalLM, PolicyLike
from adaponder.modeling.arguments import check_room
from adaponder.policies import LearnedGate, Policy, as_policy

MOST_SAMPLES = 128
MOST_TOP = 20
MOST_BIASES = 1024
MOST_STOP_IDS = 256
LOWEST_TEMPERATURE, HIGHEST_TEMPERATURE = 1e-5, 100.0
LOWEST_REPETITION, HIGHEST_REPETITION = 1e-6, 1e6

_WHOLE_NUMBERS = (
    *("max_new_tokens", "min_new_tokens", "top_k", "seed", "samples"),
    *("log_probabilities", "prompt_log_probabilities", "max_iterations", "iteration_top"),
)


@dataclass(frozen=True)
class Request:
    """A prompt and how to go on from it.

    Attributes:
        prompt: token ids, at least one.
        max_new_tokens: most tokens to generate.
        min_new_tokens: so many tokens come before any end-of-text or stop id may.
        temperature: divides the logits; 0 is greedy, and so is anything below 1e-5.
        top_k: sample among the k likeliest tokens; 0: among all.
        top_p: sample among the fewest likeliest tokens whose probabilities sum to at least ``top_p``.
        min_p: sample among tokens at least ``min_p`` times as probable as the likeliest.
        repetition_penalty: divides positive and multiplies negative logits of tokens in the prompt or the output.
        presence_penalty: subtracted from the logits of tokens in the output.
        frequency_penalty: subtracted from a token's logit for each time it is in the output.
        logit_bias: added to the logits of these token ids.
        seed: of sampling and of policies that draw; any whole number.
        samples: so many completions of the one prompt.
        stop_ids: token ids that end the completion, beside the model's end-of-text ids.
        ignore_eos: whether the model's end-of-text ids do not end the completion.
        log_probabilities: ``None``: none; n: of each token and of the n likeliest.
        prompt_log_probabilities: the same for the prompt's tokens, from the second on.
        policy: who decides depth instead of the method's own rule.
        tau: threshold of the learned gate; instead of a policy.
        max_iterations: read each token at most this often.
        depths: forced depth of each slot, as a list from slot 0 or by slot; 0, or no entry: not forced. Forcing
            replaces the decision only: gates and expectations are computed.
        gates: return the gates of each token.
        iteration_top: return the n likeliest tokens after each iteration.
        salt: requests share the rows of equal prompts only within one salt.
    """

    prompt: Sequence[int]
    max_new_tokens: int = 128
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0
    samples: int = 1
    stop_ids: Sequence[int] = ()
    ignore_eos: bool = False
    log_probabilities: int | None = None
    prompt_log_probabilities: int | None = None
    policy: PolicyLike | None = None
    tau: float | None = None
    max_iterations: int | None = None
    depths: Mapping[int, int] | Sequence[int] | None = None
    gates: bool = False
    iteration_top: int = 0
    salt: str = ""

    def __post_init__(self) -> None:
        # numpy's whole numbers wrap around, and some are no index of torch's. What is no number is refused later.
        for name in _WHOLE_NUMBERS:
            if (number := _as_int(getattr(self, name))) is not None:
                object.__setattr__(self, name, number)

    @property
    def greedy(self) -> bool:
        """Whether each token is the likeliest one."""
        return self.temperature < LOWEST_TEMPERATURE or self.top_k == 1


def check_request(
    request: Request, model: AdaPonderForCausalLM, *, positions: int, iterations: int, eos_ids: Collection[int]
) -> None:
    """Raises :class:`InputError` on what cannot be honoured.

    Args:
        request: the request.
        model: asked for its vocabulary, and whether a policy can decide for it.
        positions: tokens of the longest sequence.
        iterations: the most times a token is read.
        eos_ids: the model's end-of-text ids.
    """
    vocabulary = model.config.vocab_size
    prompt = _ids(request, "prompt", vocabulary)
    if not prompt:
        raise InputError("prompt: it is empty; give at least one token id")
    _check_lengths(request, len(prompt), positions)
    _check_sampling(request)
    _check_bias(request, vocabulary)
    stops = _ids(request, "stop_ids", vocabulary)
    if len(stops) > MOST_STOP_IDS:
        raise InputError(f"stop_ids has {len(stops)} entries: give at most {MOST_STOP_IDS}")
    ends = set(stops) | (set() if request.ignore_eos else set(eos_ids))
    if request.min_new_tokens and len(ends) >= vocabulary:
        raise InputError(f"min_new_tokens={request.min_new_tokens}: every token id stops; leave some out of stop_ids")
    if not isinstance(request.salt, str):
        raise InputError(f"salt={shown(request.salt)}: a string is needed")
    for name in ("ignore_eos", "gates"):
        if not isinstance(getattr(request, name), bool):
            raise InputError(f"{name}={shown(getattr(request, name))}: True or False is needed")
    _check_depth(request, len(prompt), iterations, model)


def policy_of(request: Request, model: AdaPonderForCausalLM) -> Policy:
    """Who decides the depth of this request's tokens."""
    if request.policy is not None:
        return as_policy(request.policy)
    return model.method.default_policy(training=False) if request.tau is None else LearnedGate(float(request.tau))


def forced_depths(request: Request) -> dict[int, int]:
    """Depth by slot of the tokens whose depth is forced."""
    if request.depths is None:
        return {}
    pairs = request.depths.items() if isinstance(request.depths, Mapping) else enumerate(request.depths)
    return {operator.index(slot): operator.index(depth) for slot, depth in pairs if depth}


def _check_lengths(request: Request, prompt: int, positions: int) -> None:
    most = _whole(request, "max_new_tokens", 1, None)
    least = _whole(request, "min_new_tokens", 0, None)
    if least > most:
        raise InputError(f"min_new_tokens={least}: more than max_new_tokens={most}; lower it")
    _whole(request, "samples", 1, MOST_SAMPLES)
    if prompt > positions:
        raise InputError(
            f"prompt: it has {prompt} tokens, the backbone's positions end at {positions}; shorten it to {positions}"
        )
    check_room(prompt, most, positions)


def _check_sampling(request: Request) -> None:
    _number(request, "temperature", 0.0, HIGHEST_TEMPERATURE)
    _whole(request, "top_k", 0, None)
    if _number(request, "top_p", 0.0, 1.0) == 0.0:
        raise InputError("top_p=0: a number above 0 is needed; temperature=0 takes the likeliest token")
    _number(request, "min_p", 0.0, 1.0)
    _number(request, "repetition_penalty", LOWEST_REPETITION, HIGHEST_REPETITION)
    _number(request, "presence_penalty", -2.0, 2.0)
    _number(request, "frequency_penalty", -2.0, 2.0)
    if _as_int(request.seed) is None:
        raise InputError(f"seed={shown(request.seed)}: a whole number is needed")
    for name in ("log_probabilities", "prompt_log_probabilities"):
        if getattr(request, name) is not None:
            _whole(request, name, 0, MOST_TOP)
    _whole(request, "iteration_top", 0, MOST_TOP)


def _check_bias(request: Request, vocabulary: int) -> None:
    biases = request.logit_bias
    if not isinstance(biases, Mapping):
        raise InputError(f"logit_bias={shown(biases)}: a mapping of token ids to numbers is needed")
    if len(biases) > MOST_BIASES:
        raise InputError(f"logit_bias has {len(biases)} entries: give at most {MOST_BIASES}")
    for key, value in biases.items():
        _check_id("logit_bias", key, vocabulary)
        if not _is_number(value) or not -100.0 <= value <= 100.0:
            raise InputError(f"logit_bias[{key}]={shown(value)}: a number from -100 to 100 is needed")


def _check_depth(request: Request, prompt: int, iterations: int, model: AdaPonderForCausalLM) -> None:
    if request.max_iterations is not None:
        _whole(request, "max_iterations", 1, iterations)
    if request.tau is not None:
        if request.policy is not None:
            raise InputError(f"tau={shown(request.tau)}: a policy is given too; give one of them")
        if not isinstance(model.method.default_policy(training=False), LearnedGate):
            raise InputError(f"tau={shown(request.tau)}: {model.config.method} has no learned threshold; leave it out")
        if not _is_number(request.tau) or not (0.0 <= request.tau <= 1.0 or request.tau == math.inf):
            raise InputError(f"tau={shown(request.tau)}: a number from 0 to 1 is needed, or inf (nobody reads on)")
    slots = prompt + request.max_new_tokens - 1
    if request.policy is not None:
        model.check_policy(request.policy)
        policy = as_policy(request.policy)
        if not policy.causal or not policy.row_by_row:
            raise InputError(
                f"policy={policy.spelling} looks at other tokens of the sequence: it can be evaluated, not "
                "generated with; name one that decides for each token by itself"
            )
        policy.check_batch(1, slots)
    _check_forced(request, slots, iterations, model)


def _check_forced(request: Request, slots: int, iterations: int, model: AdaPonderForCausalLM) -> None:
    depths = request.depths
    if depths is None:
        return
    if not model.method.halts:
        raise InputError(
            f"depths: {model.config.method} reads every token equally often; use max_iterations to read less"
        )
    if isinstance(depths, (str, bytes)) or not hasattr(depths, "__len__"):
        raise InputError(f"depths={shown(depths)}: a list of depths from slot 0 on, or a mapping from slots, is needed")
    if len(depths) > slots:
        raise InputError(f"depths has {len(depths)} entries: prompt and new tokens take {slots} slots; give no more")
    for slot, depth in depths.items() if isinstance(depths, Mapping) else enumerate(depths):
        if _as_int(slot) is None or not 0 <= slot < slots:
            raise InputError(f"depths: {shown(slot)} is no slot; prompt and new tokens have slots 0 to {slots - 1}")
        if _as_int(depth) is None or not 0 <= depth <= iterations:
            raise InputError(f"depths[{slot}]={shown(depth)}: from 1 to {iterations}, or 0 (not forced)")


def _ids(request: Request, name: str, vocabulary: int) -> list[int]:
    """The token ids in a field, as Python integers."""
    values = getattr(request, name)
    if isinstance(values, (str, bytes, Mapping)) or not _is_list(values):
        cure = "; encode a text first: tokenizer(text).input_ids" if isinstance(values, str) else ""
        raise InputError(f"{name}={shown(values)}: a list of token ids is needed{cure}")
    return [_check_id(name, value, vocabulary) for value in values]


def _is_list(values: Any) -> bool:
    """Whether these can be gone through, and more than once: no iterator, and no tensor without an axis."""
    try:
        len(values)
    except TypeError:
        return False
    return hasattr(values, "__iter__")


def _check_id(name: str, value: Any, vocabulary: int) -> int:
    number = _as_int(value)
    if number is None or not 0 <= number < vocabulary:
        raise InputError(f"{name}: {shown(value)} is no token id; they are whole numbers from 0 to {vocabulary - 1}")
    return number


def _as_int(value: Any) -> int | None:
    """A whole number of any kind as Python's; ``None`` for everything else, bools too."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def _whole(request: Request, name: str, least: int, most: int | None) -> int:
    value = getattr(request, name)
    number = _as_int(value)
    if number is None or number < least or (most is not None and number > most):
        allowed = f"at least {least}" if most is None else f"from {least} to {most}"
        raise InputError(f"{name}={shown(value)}: a whole number {allowed} is needed")
    return number


def _number(request: Request, name: str, least: float, most: float) -> float:
    value = getattr(request, name)
    if not _is_number(value) or not least <= value <= most:
        raise InputError(f"{name}={shown(value)}: a number from {least:g} to {most:g} is needed")
    return float(value)


def _is_number(value: Any) -> bool:
    """Whether this is a real number, NaN not counted."""
    if isinstance(value, bool) or not hasattr(value, "__float__"):
        return False
    try:
        return not math.isnan(float(value))
    except (TypeError, ValueError, OverflowError):
        return False
