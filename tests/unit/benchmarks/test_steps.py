"""benchmarks train and prefill: the plain version computes what ours does, and rows are compared within one run."""

import json
from functools import partial, partialmethod

import pytest
import torch

from adaponder.errors import EvaluationError, InputError
from adaponder.recipes import load_recipe
from bench_support import QUICK, SET, TINY, invoke, measured, tiny_recipe
from benchmarks import models, steps
from benchmarks.harness import spread
from benchmarks.steps import StepOptions, Variant

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """One run of benchmarks train."""
    arguments = ("train", *QUICK, "--no-compile", "--batch", "2", "--commit", "abc", *SET)
    return measured(*arguments, folder=tmp_path_factory.mktemp("bench"))


@pytest.mark.parametrize(("iterations", "multiplier"), [(1, 1.0), (2, 1.0), (4, 3.0)])
def test_plain_is_our_ponder_with_the_same_weights(iterations, multiplier):
    sets = (f"model.iterations={iterations}", f"model.initial_multiplier={multiplier}")
    chosen = tiny_recipe("train.dtype=float64", *sets)
    plain, ours = models.build_plain(chosen), models.build_ours(chosen, "ponder")
    ids, targets = next(models.batches(chosen, 3, CPU))
    expected = ours(input_ids=ids, targets=targets)
    torch.testing.assert_close(plain(ids, targets), expected.loss, rtol=1e-12, atol=1e-12)
    logits = plain.stock.get_output_embeddings()(plain.hidden(ids))
    torch.testing.assert_close(logits, expected.logits, rtol=1e-12, atol=1e-12)


def test_the_vocabulary_is_stated_or_the_tokenizers():
    assert models.vocabulary_of(tiny_recipe()) == 61
    assert models.vocabulary_of(load_recipe("cpu/demo")) == 2048
    with pytest.raises(InputError, match="vocab_size"):
        models.vocabulary_of(load_recipe("cpu/demo", ["data.tokenizer=EleutherAI/gpt-neox-20b"]))
    with pytest.raises(InputError, match="--recipe"):
        models.vocabulary_of(load_recipe("cpu/demo", ["model.backbone=EleutherAI/pythia-70m"]))


def test_the_seed_determines_weights_and_tokens():
    first, same, other = (StepOptions("cpu", overrides=TINY, seed=seed).recipe for seed in (1, 1, 2))
    draws = [next(models.batches(chosen, 2, CPU))[0] for chosen in (first, same, other)]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])
    assert first.fingerprint == same.fingerprint != other.fingerprint
    assert StepOptions(overrides=["train.seed=7"]).recipe.train.seed == 7


def test_train_writes_what_the_contract_asks_for(trained):
    expected = {"command": "bench train", "commit": "abc", "tested": False, "seed": 0, "complete": True}
    expected["recipe"] = {"name": "cpu/demo", "hash": tiny_recipe().fingerprint, "set": TINY}
    expected["settings"] = {"batch": 2, "sequence": 12, "dtype": "float32", "warmup": 0, "repeats": 2}
    assert {name: trained[name] for name in expected} == expected
    assert trained["date"].count("-") == 2
    assert trained["hardware"]["matmul_flops"] == 1e9
    assert {"adaponder", "python", "torch", "transformers", "triton"} <= set(trained["versions"])


def test_ratios_of_train_are_of_one_run(trained):
    rows = {row["variant"]: row for row in trained["metrics"]["rows"]}
    ours = ["ponder, eager", "adaponder, eager", "adaponder, eager, logits kept", "adaponder, eager, checkpointed"]
    assert list(rows) == ["plain", *ours]
    for row in rows.values():
        assert row["tokens_per_second"] == pytest.approx(24 / (sum(row["seconds"]) / 2))
        assert row["times_plain"] == pytest.approx(row["tokens_per_second"] / rows["plain"]["tokens_per_second"])
        assert row["peak_bytes"] is row["memory_of_plain"] is None, "a CPU does not count"
        assert f"measuring {row['variant']} …" in trained["shown"]
    speeds = [rows[name]["tokens_per_second"] for name in ("adaponder, eager", "ponder, eager")]
    assert trained["metrics"]["adaponder_over_ponder"] == pytest.approx(speeds[0] / speeds[1])
    # The same weights, tokens and optimizer: after the same steps plain and ours have the same loss.
    assert rows["plain"]["loss"] == pytest.approx(rows["ponder, eager"]["loss"], rel=1e-5)
    for name in ours[2:]:
        assert rows["adaponder, eager"]["loss"] == pytest.approx(rows[name]["loss"], rel=1e-5)


def test_rows_of_another_recipe_or_batch_are_not_resumed(trained, tmp_path):
    earlier = tmp_path / "earlier.json"
    earlier.write_text(json.dumps(trained))
    resumed = ("train", *QUICK, "--no-compile", "--commit", "abc", *SET, "--resume", str(earlier))
    rows = measured(*resumed, "--batch=2", folder=tmp_path)["metrics"]["rows"]
    assert [row["seconds"] for row in rows] == [row["seconds"] for row in trained["metrics"]["rows"]]
    for others, name in (("--batch=3",), "batch"), (("--batch=2", "--set=train.clip=2"), "recipe"):
        result = invoke(*resumed, *others)
        assert isinstance(result.exception, InputError)
        assert f"{name} was" in str(result.exception)


def test_a_share_of_matmul_counts_every_product_three_times():
    depths = models.depths_of((1, 0.5, 0.25), 2, 12, seed=0)
    body, mixture, gate, head = 2 * 2 * (4 * 16 * 16 + 2 * 16 * 24), 2 * 2 * 61 * 16, 2 * (16 * 64 + 64), 2 * 61 * 16
    # Two layers' attention to one key. A row sees the keys up to its slot (6.5 on average) in every pass that reads it.
    key = 2 * 2 * 2 * 16
    seen = sum(key * (slot + 1) * int(depth) for row in depths for slot, depth in enumerate(row)) / depths.numel()
    ponder = 3 * (body + key * 6.5) + 2 * mixture + head
    compact = 1.75 * body + seen + 0.75 * mixture + 2 * gate + head
    expected = {("plain", None): ponder, ("ponder", None): ponder, ("adaponder", "dense"): ponder + 2 * gate}
    for (method, execution), forward in (expected | {("adaponder", "compact"): compact}).items():
        flops = steps.flops_per_token(tiny_recipe(), Variant(method, execution=execution), depths)
        assert flops == pytest.approx(3 * forward, rel=1e-12), (method, execution)


def test_ratios_are_to_both_plain_versions():
    rows = [
        {"variant": name, "tokens_per_second": speed, "peak_bytes": peak}
        for name, speed, peak in (("plain", 10.0, 400), ("plain, compiled", 20.0, 200), ("adaponder, eager", 30.0, 100))
    ]
    steps.compare_with_plain(rows)
    assert (rows[2]["times_plain"], rows[2]["memory_of_plain"]) == (3.0, 0.25)
    assert (rows[2]["times_compiled_plain"], rows[2]["memory_of_compiled_plain"]) == (1.5, 0.5)
    assert spread([1.0, 2.0, 4.0]) == 1.5


def test_variants_have_names_of_their_own(monkeypatch):
    on_gpu = steps.train_variants("layer", torch.device("cuda"))
    names = [variant.name for variant in on_gpu]
    assert len(set(names)) == len(names)
    assert names[:3] == ["plain", "plain, compiled", "adaponder, eager"]
    assert [variant.memory_budget for variant in on_gpu if variant.memory_budget != 1] == [0.5]
    assert names.count("adaponder, compiled, CUDA graphs") == names.count("adaponder, compiled, left padding") == 1
    halting = [variant.name for variant in steps.train_variants("layer", torch.device("cuda"), halting=True)]
    assert {"adaponder, compiled, compact, CUDA graphs", "adaponder, compiled, compact, packed documents"} < {*halting}
    assert len(set(halting)) == len(halting)
    assert all(variant.memory_budget == 1 for variant in steps.train_variants("layer", CPU))
    by_pass = {variant.name for variant in steps.train_variants("pass", CPU)}
    assert StepOptions(overrides=["train.compile_by=pass"]).by == "pass"
    assert {"ponder, compiled by pass", "adaponder, compiled by pass"} <= by_pass
    options = []
    monkeypatch.setattr(models.AdaPonderForCausalLM, "compile_passes", lambda self, **how: options.append(how))
    Variant("adaponder", memory_budget=0.5).build(tiny_recipe(), CPU)
    assert options[0]["memory_budget"] == 0.5


def test_masked_steps_read_what_their_masks_leave():
    recipe = tiny_recipe()
    starts = models.mask_inputs(models.DOCUMENTS, recipe, 64, CPU)["document_ids"]
    assert (starts.diff(dim=1) >= 0).all()
    assert starts.max() > 0
    mask = models.mask_inputs(models.PADDING, recipe, 64, CPU)["attention_mask"]
    assert (mask.diff(dim=1) >= 0).all()
    assert 0 < (1 - mask).sum(1).max() <= recipe.data.sequence // 4
    causal, padded = (Variant("adaponder", None, masked=kind) for kind in ("", models.PADDING))
    losses = [float(steps.training_step(recipe, variant, 8, CPU)()) for variant in (causal, padded)]
    assert losses[0] != losses[1]


def test_training_that_skips_halted_tokens_is_compared_with_dense_training(monkeypatch, tmp_path):
    forward, read = models.AdaPonderForCausalLM.forward, []

    def watch(self, *args, **how):
        output = forward(self, *args, **how)
        read.extend([output.depth] * ("targets" in how))
        return output

    monkeypatch.setattr(models.AdaPonderForCausalLM, "forward", watch)
    found = measured("train", *QUICK, "--no-compile", "--batch=2", "--keep=1,.5,.25", *SET, folder=tmp_path)
    rows = {row["variant"]: row for row in found["metrics"]["rows"]}
    assert list(rows) == ["plain", "ponder, eager", "adaponder, eager, dense", "adaponder, eager, compact"]
    dense, compact = (rows[f"adaponder, eager, {execution}"] for execution in ("dense", "compact"))
    assert compact["loss"] == pytest.approx(dense["loss"], rel=1e-5)
    speeds = compact["tokens_per_second"] / dense["tokens_per_second"]
    assert found["metrics"]["compact_over_dense"] == pytest.approx(speeds)
    over_ponder = dense["tokens_per_second"] / rows["ponder, eager"]["tokens_per_second"]
    assert found["metrics"]["adaponder_over_ponder"] == pytest.approx(over_ponder)
    assert found["settings"]["mean_depth"] == 1.75
    depths = models.depths_of((1, 0.5, 0.25), 2, 12, seed=0)
    assert all((depth == 3).all() for depth in read[:2]), "PonderLM reads every token in every iteration"
    assert len(read) == 6
    assert all(torch.equal(depth, depths) for depth in read[2:])
    variants = [Variant("adaponder", execution=execution) for execution in ("dense", "compact")]
    flops = [steps.flops_per_token(tiny_recipe(), variant, depths) for variant in variants]
    assert found["metrics"]["compact_over_dense_by_flops"] == flops[0] / flops[1]


@pytest.mark.compiler
def test_compiled_training_that_skips_tokens_stays_compiled(monkeypatch, tmp_path):
    compile_passes = models.AdaPonderForCausalLM.compile_passes
    monkeypatch.setattr(models.AdaPonderForCausalLM, "compile_passes", partialmethod(compile_passes, backend="eager"))
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    asked = ("--warmup=1", "--repeats=2", "--trust", "--no-record", "--batch=2", "--keep=1,.5,.25")
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        found = measured("train", *asked, *SET, folder=tmp_path)
    losses = {row["variant"]: row["loss"] for row in found["metrics"]["rows"]}
    assert losses["plain, compiled"] == pytest.approx(losses["plain"], rel=1e-5)
    compiled = [losses[f"adaponder, compiled, {execution}"] for execution in ("dense", "compact")]
    assert compiled[0] == pytest.approx(compiled[1], rel=1e-5)


def test_prefill_compares_dense_and_compact(tmp_path):
    found = measured("prefill", *QUICK, "--no-compile", "--batch=2", "--keep=1,.5,.25", *SET, folder=tmp_path)
    rows = {row["variant"]: row for row in found["metrics"]["rows"]}
    assert list(rows) == ["plain", "adaponder, eager, dense", "adaponder, eager, compact"]
    dense = rows["adaponder, eager, dense"]
    for row in rows.values():
        assert row["times_dense"] == pytest.approx(dense["median_seconds"] / row["median_seconds"])
        assert row["times_promised"] == dense["flops"] / row["flops"]
    # The body is read 1.75 instead of 3 times, a mixture is made 0.75 instead of 2 times.
    assert 3 / 1.75 < rows["adaponder, eager, compact"]["times_promised"] < 2 / 0.75
    assert found["settings"]["keep"] == [1, 0.5, 0.25]
    assert found["metrics"]["dense_and_compact_differ_by"] < 1e-5


@pytest.mark.parametrize(("keep", "sequence"), [((1, 0.5, 0.5, 0.5), 64), ((1, 0.75, 0.25, 0), 20), ((1, 1, 1), 7)])
def test_forced_depths_have_exactly_these_shares(keep, sequence):
    depths = models.depths_of(keep, 5, sequence, seed=3)
    for iteration, share in enumerate(keep):
        assert ((depths > iteration).sum(1) == share * sequence).all()
    assert torch.equal(depths, models.depths_of(keep, 5, sequence, seed=3))
    if keep[1] < 1:
        assert not torch.equal(depths, models.depths_of(keep, 5, sequence, seed=4))
        assert len({tuple(row) for row in depths.tolist()}) == 5, "each sequence draws its own"


def test_prefill_refuses_to_time_what_disagrees(monkeypatch):
    real = models.AdaPonderForCausalLM.forward

    def forward(self, *args, on_iteration=None, execution=None, **kwargs):
        def off(iteration):
            hidden = iteration.hidden.clone()
            hidden[1, 5] *= 1 + 0.01 * (execution == "compact")  # one token, a little
            on_iteration(iteration._replace(hidden=hidden))

        return real(self, *args, execution=execution, on_iteration=off if on_iteration else None, **kwargs)

    monkeypatch.setattr(models.AdaPonderForCausalLM, "forward", forward)
    result = invoke("prefill", *QUICK, "--no-compile", *SET)
    assert isinstance(result.exception, EvaluationError)
    assert "differ" in str(result.exception)
    assert "measuring plain" not in result.output
