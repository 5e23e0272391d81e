"""Checks that a conversion and its source give the same logits on the same tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import PreTrainedModel

from adaponder.backbones.wrapper import relative_difference, rounding_bound
from adaponder.errors import CheckpointError, InputError
from adaponder.methods.adaponder import AdaPonder
from adaponder.modeling import AdaPonderForCausalLM
from adaponder.policies import ExitThreshold, FixedDepth


@dataclass(frozen=True)
class Check:
    """The result of a comparison: ``difference`` must be at most ``bound``; if that is ``None``, it is only reported.

    The difference of two tensors is relative to their largest magnitude.
    """

    what: str
    difference: float
    bound: float | None = None

    @property
    def holds(self) -> bool:
        return self.bound is None or self.difference <= self.bound


def require_checks(checks: Sequence[Check], out: Path) -> None:
    """Raises if a check does not hold; the error says that nothing was written to ``out``."""
    if failed := [check for check in checks if not check.holds]:
        raise CheckpointError(
            "; ".join(f"{c.what}: differs by {c.difference:.1e}, {c.bound:.1e} allowed" for c in failed)
            + f"; nothing was written to {out}"
        )


def probe_ids(vocabulary: int) -> Tensor:
    """Returns random token ids, ``int64[2, 24]``, the same in every call."""
    return torch.randint(vocabulary, (2, 24), generator=torch.Generator().manual_seed(0), device="cpu")


def compare(what: str, ours: Tensor, theirs: Tensor, *, bounded: bool = True) -> Check:
    """Checks that two tensors of logits agree to rounding; ``bounded=False`` only reports their difference."""
    return Check(what, relative_difference(ours, theirs), rounding_bound(theirs.dtype) if bounded else None)


def compare_with_ponderlm(
    model: AdaPonderForCausalLM, stock: PreTrainedModel, ids: Tensor, source: dict[str, Any]
) -> list[Check]:
    """Compares ``model`` with the released PonderLM, whose recurrence is ``source`` (fields of ``AdaPonderConfig``).

    Logits after one iteration must agree to rounding. If K is equal and the method is ponder or adaponder, logits at
    full depth with all gates set to 1 must agree too, and setting the gates closer to 1 than they are initially must
    bring the logits closer to PonderLM's. If ``embedding_scale`` or ``initial_multiplier`` differs, differences are
    only reported.
    """

    def released(steps: int) -> Tensor:
        scale, multiplier = source["embedding_scale"], source["initial_multiplier"]
        return plain_ponder(stock, ids, steps=steps, scale=scale, multiplier=multiplier)

    same = all(getattr(model.config, name) == source[name] for name in ("embedding_scale", "initial_multiplier"))
    first = compare("one iteration equals PonderLM's", model(ids, max_iterations=1).logits, released(0), bounded=same)
    if model.config.method not in ("ponder", "adaponder") or model.config.iterations != source["iterations"]:
        return [first]
    expected = released(source["iterations"] - 1)
    if not isinstance(model.method, AdaPonder):
        return [first, compare("full depth equals PonderLM", model(ids).logits, expected, bounded=same)]
    open_logits = _logits_at_gates(model, model.method, ids, 1e4)
    at_open_gates = compare("full depth with gates at 1", open_logits, expected, bounded=same)
    initial = compare("full depth with initial gates", model(ids).logits, expected, bounded=False)
    # Updates are weighted by s, so halving 1 - s about halves the difference.
    half_as_far = _logits_at_gates(model, model.method, ids, model.config.gate_bias + math.log(2))
    difference = relative_difference(half_as_far, expected)
    bound = 0.75 * initial.difference + rounding_bound(expected.dtype) if same else None
    return [first, at_open_gates, initial, Check("full depth with gates half as far from 1", difference, bound)]


def compare_with_loops(
    model: AdaPonderForCausalLM, stock: PreTrainedModel, ids: Tensor, source: dict[str, Any], gate: dict[str, Tensor]
) -> list[Check]:
    """Compares ``model`` with a published looped model: logits after every loop, then the gate's probabilities.

    ``source`` has the recurrence of the release, ``gate`` the tensors of its exit gate, if any. Only the logits after
    the first loop are compared if the method of either is not ouro, or if ``model`` has fewer loops.
    """
    same = model.config.method == source["method"] and model.config.iterations >= source["iterations"]
    decoder: Any = stock.base_model
    hidden, checks, probabilities = stock.get_input_embeddings()(ids), [], []
    for loop in range(1, 1 + (source["iterations"] if same and source["method"] == "ouro" else 1)):
        hidden = decoder(inputs_embeds=hidden, use_cache=False).last_hidden_state
        options: dict[str, Any] = {"policy": FixedDepth(loop)} if model.method.halts else {}
        ours, theirs = model(ids, max_iterations=loop, **options), model.wrapped.logits(hidden)
        bounded = model.config.input_scale == 1
        checks.append(compare(f"logits after loop {loop} equal the source's", ours.logits, theirs, bounded=bounded))
        if same and gate:
            logit = nn.functional.linear(hidden, gate["exit.weight"], gate["exit.bias"])
            probabilities.append((ours.gates[..., -1], torch.sigmoid(logit[..., 0])))
    if probabilities:
        ours, theirs = (torch.stack(gates, -1) for gates in zip(*probabilities, strict=True))
        checks.append(compare("exit probabilities equal the source's", ours, theirs))
    return checks


@torch.no_grad()
def compare_with_saved(model: AdaPonderForCausalLM, saved: dict[str, Tensor]) -> tuple[list[Check], dict[str, Any]]:
    """Compares ``model`` with saved outputs of published code; returns checks, and mean depths at each saved threshold.

    ``saved`` has ``ids [time]`` and ``logits [loops, time, vocabulary]``, or ``[1, time, vocabulary]`` of the last
    loop. For a model with an exit gate, ``saved`` may also have ``gates [time, loops]``, ``thresholds [n]`` and
    ``exits [n, time]``, the loop at which each token exits. Exits may differ if the cumulative probability is within
    rounding of a threshold. This package reuses keys and values after an exit; the resulting depths are only reported.
    """
    ids, loops = saved["ids"][None].to(model.device), model.config.iterations
    options: dict[str, Any] = {"policy": FixedDepth(loops)} if model.method.halts else {}
    output = model(ids, output_iteration_logits=True, **options)
    ours = output.iteration_logits[:, 0]
    theirs = saved["logits"].to(ours.device)
    if theirs.shape not in (ours.shape, ours[-1:].shape):
        raise InputError(
            f"saved logits have shape {list(theirs.shape)} (loops, time, vocabulary), the model has {list(ours.shape)}"
        )
    first = loops - len(theirs)
    checks = [
        compare(f"logits after loop {loop + 1}", ours[loop].to(theirs.dtype), theirs[loop - first])
        for loop in range(first, loops)
    ]
    depths: dict[str, Any] = {}
    if "gates" not in saved or output.gates is None:
        return checks, depths
    gates = saved["gates"].to(ours.device)
    checks.append(compare("exit probabilities", output.gates[0].to(gates.dtype), gates))
    reached = 1 - (1 - output.gates[0].double()).cumprod(-1)
    bound = rounding_bound(theirs.dtype)
    for threshold, exits in zip(saved["thresholds"].tolist(), saved["exits"].to(ours.device), strict=True):
        past = reached >= threshold
        past[:, -1] = True
        differs = past.int().argmax(-1) + 1 != exits
        near = ((reached[:, :-1] - threshold).abs() <= bound).any(-1)
        share = float((differs & ~near).double().mean())
        checks.append(Check(f"exits at {threshold:g}: share of tokens that differ", share, 0.0))
        reusing = model(ids, policy=ExitThreshold(threshold)).depth
        depths[f"{threshold:g}"] = {
            "published": float(exits.double().mean()),
            "reusing keys and values": float(reusing.double().mean()),
            "near ties": int((differs & near).sum()),
        }
    return checks, depths


@torch.no_grad()
def plain_ponder(stock: PreTrainedModel, ids: Tensor, *, steps: int, scale: float, multiplier: float) -> Tensor:
    """Returns the logits of the released PonderLM, computed by the stock decoder without this package's wrapper."""
    table = stock.get_input_embeddings()(torch.arange(stock.config.vocab_size, device=ids.device)) * scale
    embedding = table[ids] * multiplier
    for _ in range(steps):
        logits = stock(inputs_embeds=embedding, use_cache=False).logits
        embedding = embedding + torch.softmax(logits.float(), -1).to(table.dtype) @ table
    return stock(inputs_embeds=embedding, use_cache=False).logits


def _logits_at_gates(model: AdaPonderForCausalLM, method: AdaPonder, ids: Tensor, logit: float) -> Tensor:
    """Returns the model's logits with every gate replaced by the constant ``sigmoid(logit)``."""
    outputs: dict[str, Any] = {f"method.gates.{number}.out": gate.out for number, gate in enumerate(method.gates)}
    weights = {f"{name}.weight": torch.zeros_like(linear.weight) for name, linear in outputs.items()}
    biases = {f"{name}.bias": torch.full_like(linear.bias, logit) for name, linear in outputs.items()}
    return functional_call(model, weights | biases, ids).logits
