"""The laws as checks that a test, or a deliberate mistake, can be held against."""

import itertools
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from adaponder import AdaPonderForCausalLM, ForcedDepths, Iteration
from support import VOCABULARY

EXACT = 1e-12


def assert_close(ours: Tensor, theirs: Tensor, what: str, tolerance: float = EXACT) -> None:
    assert ours.shape == theirs.shape, f"{what}: shapes {tuple(ours.shape)} and {tuple(theirs.shape)}"
    if ours.numel():
        scale = max(1.0, float(theirs.detach().abs().max()))
        error = float((ours - theirs).detach().abs().max()) / scale
        assert error <= tolerance, f"{what}: differs by {error:.2e}"


@dataclass
class Case:
    """A batch with a prescribed halt pattern."""

    ids: Tensor
    mask: Tensor
    depths: Tensor

    @property
    def real(self) -> Tensor:
        return self.mask.bool()

    @property
    def policy(self) -> ForcedDepths:
        return ForcedDepths(self.depths)


def make_case(batch: int, time: int, iterations: int, pattern: str, padding: str, seed: int) -> Case:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCABULARY, (batch, time), generator=generator)
    mask = torch.ones(batch, time, dtype=torch.long)
    if padding != "none":
        for row in range(batch):
            count = int(torch.randint(0, time, (1,), generator=generator))
            if padding == "left" or (padding == "both" and row % 2):
                mask[row, :count] = 0
            else:
                mask[row, time - count :] = 0
    if pattern == "all":
        depths = torch.ones(batch, time, dtype=torch.long)
    elif pattern == "none":
        depths = torch.full((batch, time), iterations)
    elif pattern == "alternating":
        depths = 1 + (torch.arange(time) % 2).expand(batch, -1) * (iterations - 1)
    else:
        depths = torch.randint(1, iterations + 1, (batch, time), generator=generator)
    return Case(ids, mask, depths)


@torch.no_grad()
def run(model: AdaPonderForCausalLM, case: Case, execution: str, **kwargs) -> dict[str, Tensor]:
    """Returns logits, depths, gates and the hidden states of every iteration of one forward, at real tokens."""
    seen: list[Iteration] = []
    if model.method.halts:
        kwargs.setdefault("policy", case.policy)
    output = model(case.ids, attention_mask=case.mask, execution=execution, on_iteration=seen.append, seed=3, **kwargs)
    found = {"logits": output.logits[case.real], "depth": output.depth}
    found |= {f"hidden after iteration {it.index}": it.hidden[case.real] for it in seen}
    if output.gates is not None:
        found["gates"] = output.gates[case.real]
    return found


@torch.no_grad()
def decode(model: AdaPonderForCausalLM, case: Case, chunks: Sequence[int], **kwargs) -> dict[str, Tensor]:
    """Computes the same forward in chunks of a few tokens, through a ledger."""
    if model.method.halts:
        kwargs.setdefault("policy", case.policy)
    ledger, logits, start = None, [], 0
    for chunk in [*chunks, case.ids.shape[1]]:
        end = min(case.ids.shape[1], start + chunk)
        if end == start:
            break
        read = {"attention_mask": case.mask[:, :end], "past_key_values": ledger}
        output = model(case.ids[:, start:end], **read, use_cache=True, seed=3, **kwargs)
        ledger, start = output.past_key_values, end
        logits.append(output.logits)
    return {"logits": torch.cat(logits, 1)[case.real], "depth": ledger.depth, "rows": torch.tensor(ledger.rows)}


def assert_one_function(model: AdaPonderForCausalLM, case: Case, chunks: Sequence[int] = (3, 1), **kwargs) -> None:
    """Law 2: dense, compact and cached give the same hidden states, depths and logits."""
    dense = run(model, case, "dense", **kwargs)
    compact = run(model, case, "compact", **kwargs)
    cached = decode(model, case, chunks, **kwargs)
    assert dense.keys() == compact.keys()
    for name, expected in dense.items():
        assert_close(compact[name], expected, f"compact {name}")
    assert_close(cached["logits"], dense["logits"], "cached logits")
    assert torch.equal(cached["depth"], dense["depth"]), "cached depth"


@torch.no_grad()
def assert_causal(model: AdaPonderForCausalLM, ids: Tensor, where: int, **kwargs) -> None:
    """Law 1: perturbing token ``where`` moves nothing before it."""
    changed = ids.clone()
    changed[:, where] = (changed[:, where] + 1) % VOCABULARY
    before = model(ids, output_iteration_logits=True, **kwargs)
    after = model(changed, output_iteration_logits=True, **kwargs)
    assert torch.equal(before.depth[:, :where], after.depth[:, :where]), "depths before the change moved"
    assert_close(after.logits[:, :where], before.logits[:, :where], "logits before the change")
    assert_close(
        after.iteration_logits[:, :, :where], before.iteration_logits[:, :, :where], "hidden states before the change"
    )
    assert not torch.equal(before.logits[:, where:], after.logits[:, where:]), "the change had no effect at all"


@torch.no_grad()
def assert_static_after_halting(model: AdaPonderForCausalLM, case: Case, execution: str) -> None:
    """Law 3: a halted token stays halted, with the hidden state of its last iteration."""
    seen: list[Iteration] = []
    output = model(
        case.ids, attention_mask=case.mask, policy=case.policy, execution=execution, on_iteration=seen.append
    )
    assert torch.equal(output.depth, torch.where(case.real, case.depths.clamp_max(len(seen)), 0))
    for earlier, later in itertools.pairwise(seen):
        assert not (later.active & ~earlier.active).any(), "a halted token came back"
        static = case.real & ~later.active
        assert torch.equal(later.hidden[static], earlier.hidden[static]), "a halted token's hidden state moved"


@contextmanager
def counted_rows(model: AdaPonderForCausalLM):
    """Counts the rows that each layer of the backbone computes."""
    kinds = ("layers", "h")
    owners = (model.backbone.base_model, getattr(model.backbone.base_model, "decoder", None))
    layers = next(getattr(owner, kind) for owner in owners for kind in kinds if hasattr(owner, kind))
    rows = [0] * len(layers)

    def hook(index: int):
        def count(module, args, kwargs, output):
            hidden = args[0] if args else kwargs["hidden_states"]
            rows[index] += hidden.shape[0] * hidden.shape[1]

        return count

    handles = [layer.register_forward_hook(hook(i), with_kwargs=True) for i, layer in enumerate(layers)]
    try:
        yield rows
    finally:
        for handle in handles:
            handle.remove()
