"""benchmarks train and prefill: the plain version computes what ours does, and rows are compared within one run."""

from functools import partialmethod

import pytest
import torch
from torch._dynamo.utils import counters

from adaponder.errors import EvaluationError, InputError
from adaponder.recipes import load_recipe
from bench_support import QUICK, SET, TINY, invoke, measured, tiny_recipe
from benchmarks import models, train
from benchmarks.harness import Common, Timing
from benchmarks.train import TrainVariant

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
    first, same, other = (models.choose_recipe("cpu/demo", TINY, Common(seed=seed)) for seed in (1, 1, 2))
    draws = [next(models.batches(chosen, 2, CPU))[0] for chosen in (first, same, other)]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])
    assert first.fingerprint == same.fingerprint != other.fingerprint
    assert models.choose_recipe("cpu/demo", ["train.seed=7"], Common()).train.seed == 7


# --- train ---------------------------------------------------------------------------------------------------------


def test_train_writes_what_the_contract_asks_for(trained):
    expected = {"command": "bench train", "commit": "abc", "tested": False, "seed": 0, "complete": True}
    assert {name: trained[name] for name in expected} == expected
    assert trained["date"].count("-") == 2
    assert trained["hardware"]["matmul_flops"] == 1e9
    assert {"adaponder", "python", "torch", "transformers", "triton"} <= set(trained["versions"])
    assert trained["recipe"] == {"name": "cpu/demo", "hash": tiny_recipe().fingerprint, "set": TINY}
    assert trained["settings"] == {"batch": 2, "sequence": 12, "dtype": "float32", "warmup": 0, "repeats": 2}


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


def test_a_share_of_matmul_counts_every_product_three_times():
    flops = train.flops_per_token(tiny_recipe(), TrainVariant("plain"))
    assert flops == train.flops_per_token(tiny_recipe(), TrainVariant("ponder"))
    # Per token and pass: attention's four and the MLP's two matrices in two layers, then on average 6.5 keys of 12;
    # a mixture after all passes but the last, logits after the last.
    body, attention = 2 * 2 * (4 * 16 * 16 + 2 * 16 * 24), 2 * 2 * 2 * 16 * 6.5
    assert flops == 3 * (3 * (body + attention) + 2 * (2 * 2 * 61 * 16) + 2 * 61 * 16)
    rows = []
    for name, peak in (("plain", 400), ("adaponder", 100)):
        done = (Timing([1.0, 2.0, 4.0], peak), 1.0)
        rows.append(train.as_row(tiny_recipe(), TrainVariant(name), 2, done, flops=10.0, matmul_rate=960.0))
    train.compare_with_plain(rows)
    assert (rows[1]["memory_of_plain"], rows[1]["spread"], rows[1]["tokens_per_second"]) == (0.25, 1.5, 12)
    assert rows[1]["matmul_share"] == pytest.approx(12 * 10 / 960)


def test_variants_are_told_apart_by_name(monkeypatch):
    on_gpu = train.variants(torch.device("cuda"))
    names = [variant.name for variant in on_gpu]
    assert len(set(names)) == len(names)
    assert names[:4] == ["plain", "adaponder, eager", "ponder, compiled", "adaponder, compiled"]
    assert [variant.memory_budget for variant in on_gpu if variant.memory_budget != 1] == [0.5]
    assert all(variant.memory_budget == 1 for variant in train.variants(CPU))
    by_pass = {variant.name for variant in train.variants(CPU, by="pass")}
    assert {"ponder, compiled by pass", "adaponder, compiled by pass"} <= by_pass
    asked = []
    monkeypatch.setattr(models.AdaPonderForCausalLM, "compile_passes", lambda self, **options: asked.append(options))
    train.build_variant(tiny_recipe(), TrainVariant("adaponder", memory_budget=0.5), CPU)
    assert asked[0]["memory_budget"] == 0.5


def test_out_of_memory_is_a_row(monkeypatch, tmp_path):
    real = train.build_variant

    def build(recipe, variant, device):
        if variant.method == "plain":
            raise torch.OutOfMemoryError("no")
        return real(recipe, variant, device)

    monkeypatch.setattr(train, "build_variant", build)
    found = measured("train", *QUICK, "--no-compile", "--batch", "2", *SET, folder=tmp_path)
    plain, *others = found["metrics"]["rows"]
    assert not plain["fits"]
    assert plain["tokens_per_second"] is None
    assert all(row["fits"] and row["times_plain"] is None for row in others)
    assert "out of memory" in found["shown"]
    assert found["metrics"]["adaponder_over_ponder"] is not None


@pytest.mark.parametrize("most", [0, 1, 2, 3, 5, 13, 40])
def test_the_largest_batch_is_found_in_few_trials(monkeypatch, most):
    tried = []

    def measure(recipe, variant, *, batch, **rest):
        tried.append((batch, batch <= most * 3 + 2))
        if batch > most * 3 + 2:
            raise torch.OutOfMemoryError("no")
        return Timing([1.0], 10 * batch), 1.0

    monkeypatch.setattr(train, "measure_training", measure)
    batch, timing = train.search(tiny_recipe(), TrainVariant("plain"), start=3, device=CPU)
    assert (batch, timing) == (most * 3, Timing([1.0], 10 * batch) if most else None)
    assert (most * 3, True) in tried or most == 0
    assert (most * 3 + 3, False) in tried
    assert len(tried) == len(set(tried)) <= 12


@pytest.mark.compiler
def test_searching_the_largest_batch_compiles_twice_however_far(monkeypatch):
    """Once for the first batch, once for one that varies: a layer without and with rows to reuse, three small ones."""
    compile_passes, measure_training = models.AdaPonderForCausalLM.compile_passes, train.measure_training
    graphs = []

    def measure(recipe, variant, *, batch, **rest):
        done = measure_training(recipe, variant, batch=batch, **rest)
        graphs.append(counters["stats"]["unique_graphs"])
        if batch > 10:
            raise torch.OutOfMemoryError("no")
        return done

    monkeypatch.setattr(models.AdaPonderForCausalLM, "compile_passes", partialmethod(compile_passes, backend="eager"))
    monkeypatch.setattr(train, "measure_training", measure)
    counters.clear()
    variant = TrainVariant("adaponder", checkpointing=True)
    assert train.search(tiny_recipe(), variant, start=2, device=CPU)[0] == 10
    assert graphs == [5, *[10] * (len(graphs) - 1)]


def test_training_that_skips_halted_tokens_is_compared_with_dense_training(tmp_path):
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
    assert found["metrics"]["compact_over_dense_by_flops"] == train.promised_over_dense(tiny_recipe(), depths)
    body, mixture, gate = 2 * 2 * (4 * 16 * 16 + 2 * 16 * 24), 2 * 2 * 61 * 16, 2 * (16 * 64 + 64)
    keys = 2 * 2 * 2 * 16
    # A row sees the keys up to its own slot in every iteration that reads it; gates are for all, and so is the loss.
    seen = sum(keys * (slot + 1) * int(depth) for row in depths for slot, depth in enumerate(row)) / depths.numel()
    rest = 2 * gate + 2 * 61 * 16
    expected = [3 * (body + keys * 6.5) + 2 * mixture + rest] * 2 + [1.75 * body + seen + 0.75 * mixture + rest]
    ways = [TrainVariant("adaponder", execution=execution) for execution in (None, "dense", "compact")]
    flops = [train.flops_per_token(tiny_recipe(), variant, depths) for variant in ways]
    assert flops == pytest.approx([3 * each for each in expected], rel=1e-12)


@pytest.mark.compiler
def test_compiled_training_that_skips_tokens_stays_compiled(monkeypatch, tmp_path):
    compile_passes = models.AdaPonderForCausalLM.compile_passes
    monkeypatch.setattr(models.AdaPonderForCausalLM, "compile_passes", partialmethod(compile_passes, backend="eager"))
    asked = ("--warmup=1", "--repeats=2", "--trust", "--no-record", "--batch=2", "--keep=1,.5,.25")
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        found = measured("train", *asked, *SET, folder=tmp_path)
    losses = {row["variant"]: row["loss"] for row in found["metrics"]["rows"]}
    compiled = [losses[f"adaponder, compiled, {execution}"] for execution in ("dense", "compact")]
    assert compiled[0] == pytest.approx(compiled[1], rel=1e-5)


def test_forced_depths_hold_for_adaponder_alone_and_are_what_is_read(monkeypatch):
    depths, seen = models.depths_of((1, 0.5, 0.25), 2, 12, seed=0), []
    forward = models.AdaPonderForCausalLM.forward

    def watch(self, *args, **how):
        output = forward(self, *args, **how)
        seen.append((how["execution"], output.depth))
        return output

    monkeypatch.setattr(models.AdaPonderForCausalLM, "forward", watch)
    settings = {"batch": 2, "depths": depths, "device": CPU, "warmup": 0, "repeats": 1}
    for variant in train.variants(CPU, compiles=False, halting=True)[1:]:
        train.measure_training(tiny_recipe(), variant, **settings)
    assert [execution for execution, _ in seen] == ["dense", "dense", "compact"]
    assert (seen[0][1] == 3).all()
    assert all(torch.equal(depth, depths) for _, depth in seen[1:])


# --- prefill -------------------------------------------------------------------------------------------------------


def test_prefill_compares_dense_and_compact(tmp_path):
    found = measured("prefill", *QUICK, "--no-compile", "--batch=2", "--keep=1,.5,.25", *SET, folder=tmp_path)
    rows = {row["variant"]: row for row in found["metrics"]["rows"]}
    assert list(rows) == ["plain", "dense, eager", "compact, eager"]
    for row in rows.values():
        assert row["times_dense"] == pytest.approx(rows["dense, eager"]["median_seconds"] / row["median_seconds"])
        assert row["times_promised"] == rows["dense, eager"]["flops"] / row["flops"]
    # The body is read 1.75 instead of 3 times, a mixture is made 0.75 instead of 2 times.
    assert 3 / 1.75 < rows["compact, eager"]["times_promised"] < 2 / 0.75
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
