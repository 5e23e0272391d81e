"""The laws on a GPU: run with ``pytest -m gpu`` where there is one; the CPU suite leaves these out."""

import copy

import pytest
import torch
from test_near_ties import compare

from adaponder import AdaPonderForCausalLM, Objective
from adaponder.policies import ForcedDepths
from kernel_support import calm
from laws import assert_one_function, counted_rows, make_case
from support import METHODS, ids, tiny

pytestmark = pytest.mark.gpu


def on_gpu(case):
    return type(case)(case.ids.cuda(), case.mask.cuda(), case.depths.cuda())


@pytest.mark.one_of(2)
@pytest.mark.parametrize("family", ["gpt_neox", "llama", "mistral", "gemma3", "gpt2"])
@pytest.mark.parametrize("method", METHODS)
def test_every_method_is_one_function_on_the_gpu(method, family):
    model = tiny(method, family, iterations=4).cuda()
    for seed, padding in enumerate(("none", "left", "right", "both")):
        assert_one_function(model, on_gpu(make_case(3, 17, 4, "ragged", padding, seed)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", ["gpt_neox", "llama"])
def test_lower_precision_flips_only_near_ties_on_the_gpu(family, dtype):
    tokens, flips = compare(family, dtype, "cuda", batches=3)
    print(f"{family} {dtype}: {flips} of {tokens} tokens flipped")
    assert flips <= tokens // 50


@pytest.mark.parametrize("method", METHODS)
def test_generation_on_the_gpu_is_cached_uncached_and_counted(method):
    model = tiny(method, iterations=3).cuda()
    prompt = ids(2, 7).cuda()
    ask = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 8, "pad_token_id": 0, "do_sample": False}
    with counted_rows(model) as rows:
        result = model.generate(prompt, **ask, return_dict_in_generate=True)
    assert rows == [int(result.past_key_values.depth.sum())] * 2
    assert torch.equal(result.sequences, model.generate(prompt, **ask, use_cache=False))


@pytest.mark.one_of(11)
@pytest.mark.parametrize("execution", ["dense", "compact"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("method", METHODS)
def test_training_reads_no_memory_that_nobody_has_written(method, compiled, execution):
    """A step has the same loss and gradients when the allocator returns blocks full of NaN."""
    torch.compiler.reset()
    model = tiny(method, iterations=1 if method == "vanilla" else 3, dtype=torch.float32).cuda().train()
    if compiled:
        model.compile_passes()
    windows, found = ids(4, 40).cuda(), []
    objective = Objective(ponder_weight=0.1, ponder_fraction=0.3)
    for dirty in (False, False, True):  # twice clean: what compiling and choosing kernels leaves behind does not count
        if dirty:
            poison_the_allocator()
        with torch.autocast("cuda", torch.bfloat16):
            output = model(
                windows[:, :-1], targets=windows[:, 1:], objective=objective, execution=execution, output_logits=False
            )
        model.zero_grad(set_to_none=True)
        output.loss.backward()
        gradients = [parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None]
        found.append((output.loss.detach(), torch.cat(gradients)))
    (loss, gradient), (other_loss, other_gradient) = found[1:]
    assert torch.isfinite(other_loss)
    assert torch.isfinite(other_gradient).all()
    torch.testing.assert_close(other_loss, loss, rtol=1e-3, atol=0)  # sums by atomic additions change in the last bits
    torch.testing.assert_close(other_gradient, gradient, rtol=1e-2, atol=1e-3 * float(gradient.abs().max()))


def poison_the_allocator():
    """Leaves freed blocks full of NaN, small and large ones, where the next allocations are taken from."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    small = [torch.full((size,), float("nan"), device="cuda") for size in (128, 4096, 65536, 200000) for _ in range(64)]
    large = [torch.full((size << 18,), float("nan"), device="cuda") for size in (2, 8, 32, 512) for _ in range(8)]
    del small, large


def test_models_can_be_made_on_the_gpu():
    config = tiny("adaponder").config
    with torch.device("cuda"):
        model = AdaPonderForCausalLM(config)
        model.compile_passes(backend="eager")
    assert {parameter.device.type for parameter in model.parameters()} == {"cuda"}
    assert model(ids().cuda()).logits.isfinite().all()


def test_dense_training_does_not_wait_for_the_gpu():
    """A dense training step has no host synchronisation, so that the device can run ahead."""
    model = tiny("adaponder", dtype=torch.float32).cuda().train()
    batch = ids(2, 9).cuda()
    model(batch, labels=batch).loss.backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        model(batch, labels=batch).loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.one_of(4)
@pytest.mark.parametrize("padded", [True, False], ids=["padded", "whole"])
@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_compiled_dense_and_packed_passes_are_no_worse_than_eager_ones_in_half_precision(family, padded):
    """Training takes this path: inductor, kernels behind opaque operations, forward and backward."""
    model = calm(tiny("adaponder", family, iterations=4, dtype=torch.float32)).cuda().train()
    case = on_gpu(make_case(3, 40, 4, "ragged", "left" if padded else "none", 0))

    def gradients(model, execution, *, low=True):
        model.zero_grad()
        policy = ForcedDepths(case.depths)
        with torch.autocast("cuda", torch.bfloat16, enabled=low):
            asked = {"attention_mask": case.mask, "targets": case.ids, "policy": policy, "execution": execution}
            loss = model(case.ids, **asked, output_logits=False).loss
        loss.backward()
        # Each part by itself: gates are few numbers, and would not count beside the backbone's.
        parts = {"backbone": model.backbone, "gates": model.method}
        grads = {part: [weight.grad for weight in module.parameters()] for part, module in parts.items()}
        return float(loss), {part: torch.cat([g.flatten() for g in found]).double() for part, found in grads.items()}

    true_loss, truth = gradients(copy.deepcopy(model).double(), "dense", low=False)

    def off(slopes, part):
        return float(1 - torch.nn.functional.cosine_similarity(slopes[part], truth[part], dim=0))

    eager = {execution: gradients(model, execution)[1] for execution in ("dense", "compact")}
    torch.compiler.reset()
    model.compile_passes()
    for execution, slopes in eager.items():
        loss, compiled = gradients(model, execution)
        assert loss == pytest.approx(true_loss, rel=5e-3)
        for part in truth:
            assert off(compiled, part) <= 2 * off(slopes, part) + 1e-4, part
