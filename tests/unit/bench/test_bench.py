"""Benchmarks: the plain version computes what ours does, records say what they must, and what fails is no figure."""

import json
import os
import sys
from dataclasses import replace
from functools import partialmethod

import pytest
import torch
from torch._dynamo.utils import counters
from typer.testing import CliRunner

from adaponder import cli
from adaponder.bench import checks, largest, models, ops, prefill, record, tables, timing, training
from adaponder.bench.depths import depths_of
from adaponder.commands import bench as command
from adaponder.commands import bench_record
from adaponder.commands.options import TrainBenchOptions
from adaponder.errors import EvaluationError, InputError
from adaponder.recipes import load_recipe

CPU = torch.device("cpu")
TINY = [
    "model.backbone.hidden_size=16",
    "model.backbone.intermediate_size=24",
    "model.backbone.num_hidden_layers=2",
    "model.backbone.num_attention_heads=2",
    "model.backbone.vocab_size=61",
    "model.iterations=3",
    "data.sequence=12",
]
SET = [part for override in TINY for part in ("--set", override)]
QUICK = ["--trust", "--no-record", "--warmup", "0", "--repeats", "2"]


@pytest.fixture(autouse=True, scope="module")
def _ceilings():
    """Matrices and copies of real sizes would take longer than all the rest."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(record, "matmul_rate", lambda device: 1e9)
        patch.setattr(record, "copy_rate", lambda device: 1e8)
        yield


@pytest.fixture(scope="module")
def trained(tmp_path_factory, _ceilings):
    """One run of bench train."""
    arguments = ("train", *QUICK, "--no-compile", "--batch", "2", "--commit", "abc", *SET)
    return measured(*arguments, tmp_path=tmp_path_factory.mktemp("bench"))


def recipe(*overrides: str):
    return load_recipe("cpu/demo", [*TINY, *overrides])


def invoke(*arguments: str):
    return CliRunner().invoke(cli.app, ["bench", *arguments], env={"COLUMNS": "160"})


def measured(*arguments: str, tmp_path) -> dict:
    """The record of a command, and that the command went well."""
    result = invoke(*arguments, "--json", str(tmp_path / "out.json"))
    assert result.exit_code == 0, f"{result.output} {result.exception!r}"
    return json.loads((tmp_path / "out.json").read_text()) | {"shown": result.output}


# --- the plain version ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("iterations", "multiplier"), [(1, 1.0), (2, 1.0), (4, 1.0), (4, 3.0)])
def test_plain_is_our_ponder_with_the_same_weights(iterations, multiplier):
    sets = (f"model.iterations={iterations}", f"model.initial_multiplier={multiplier}")
    chosen = recipe("train.dtype=float64", *sets)
    plain, ours = models.build_plain(chosen), models.build_ours(chosen, "ponder")
    ids, targets = next(models.batches(chosen, 3, CPU))
    expected = ours(input_ids=ids, targets=targets)
    torch.testing.assert_close(plain(ids, targets), expected.loss, rtol=1e-12, atol=1e-12)
    logits = plain.stock.get_output_embeddings()(plain.hidden(ids))
    torch.testing.assert_close(logits, expected.logits, rtol=1e-12, atol=1e-12)


def test_plain_is_of_a_checkout(monkeypatch, tmp_path):
    monkeypatch.setattr(models, "checkout", lambda: tmp_path)
    with pytest.raises(InputError, match="checkout"):
        models.build_plain(recipe())


def test_the_vocabulary_is_stated_or_the_tokenizers():
    assert models.vocabulary_of(recipe()) == 61
    assert models.vocabulary_of(load_recipe("cpu/demo")) == 2048
    with pytest.raises(InputError, match=r"--set model.backbone.vocab_size"):
        models.vocabulary_of(load_recipe("cpu/demo", ["data.tokenizer=EleutherAI/gpt-neox-20b"]))
    with pytest.raises(InputError, match="--recipe"):
        models.vocabulary_of(load_recipe("cpu/demo", ["model.backbone=EleutherAI/pythia-70m"]))


# --- train ---------------------------------------------------------------------------------------------------------


def test_train_writes_what_the_contract_asks_for(trained):
    assert trained["command"] == "bench train"
    assert trained["commit"] == "abc"
    assert trained["tested"] is False
    assert trained["date"].count("-") == 2
    assert trained["hardware"]["matmul_flops"] == 1e9
    assert {"adaponder", "python", "torch", "transformers", "triton"} <= set(trained["versions"])
    assert trained["recipe"] == {"name": "cpu/demo", "hash": recipe().fingerprint, "set": TINY}
    assert trained["seed"] == 0
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
    flops = training.flops_per_token(recipe(), training.Variant("plain"))
    assert flops == training.flops_per_token(recipe(), training.Variant("ponder"))
    # Per token and pass: attention's four and the MLP's two matrices in two layers, then on average 6.5 keys of 12;
    # a mixture after all passes but the last, logits after the last.
    body, attention = 2 * 2 * (4 * 16 * 16 + 2 * 16 * 24), 2 * 2 * 2 * 16 * 6.5
    assert flops == 3 * (3 * (body + attention) + 2 * (2 * 2 * 61 * 16) + 2 * 61 * 16)
    result = training.Result(training.Variant("plain"), 2, 12, timing.Timing([0.5, 0.5], None), 1.0)
    row = training.as_row(result, result, flops=10.0, matmul_rate=960.0)
    assert row["matmul_share"] == pytest.approx(24 / 0.5 * 10 / 960)


def test_memory_is_compared_where_it_is_counted():
    plain, ours = (
        training.Result(training.Variant(name), 2, 12, timing.Timing([1.0, 2.0, 4.0], peak), 1.0)
        for name, peak in (("plain", 400), ("adaponder", 100))
    )
    row = training.as_row(ours, plain, flops=1.0, matmul_rate=1.0)
    assert row["memory_of_plain"] == 0.25
    assert row["spread"] == 1.5
    assert row["tokens_per_second"] == 12


def test_variants_are_told_apart_by_name():
    on_gpu = training.variants(torch.device("cuda"))
    names = [variant.name for variant in on_gpu]
    assert len(set(names)) == len(names)
    assert names[:4] == ["plain", "adaponder, eager", "ponder, compiled", "adaponder, compiled"]
    assert [variant.memory_budget for variant in on_gpu if variant.memory_budget != 1] == [0.5]
    assert all(variant.memory_budget == 1 for variant in training.variants(CPU))
    by_pass = {variant.name for variant in training.variants(CPU, by="pass")}
    assert {"ponder, compiled by pass", "adaponder, compiled by pass"} <= by_pass


def test_a_memory_budget_is_passed_on(monkeypatch):
    asked = []
    monkeypatch.setattr(models.AdaPonderForCausalLM, "compile_passes", lambda self, **options: asked.append(options))
    for budget in (1.0, 0.5):
        training.build(recipe(), training.Variant("adaponder", memory_budget=budget), CPU)
    assert [options["memory_budget"] for options in asked] == [1.0, 0.5]


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("no"), RuntimeError("CUDA error: out of memory"), MemoryError()], ids=repr
)
def test_a_lack_of_memory_is_known_by_its_error(error):
    assert timing.out_of_memory(error)


def test_out_of_memory_is_a_row(monkeypatch, tmp_path):
    real = training.build

    def build(recipe, variant, device):
        if variant.method == "plain":
            raise torch.OutOfMemoryError("no")
        return real(recipe, variant, device)

    monkeypatch.setattr(training, "build", build)
    found = measured("train", *QUICK, "--no-compile", "--batch", "2", *SET, tmp_path=tmp_path)
    plain, *others = found["metrics"]["rows"]
    assert not plain["fits"]
    assert plain["tokens_per_second"] is None
    assert all(row["fits"] and row["times_plain"] is None for row in others)
    assert "out of memory" in found["shown"]
    assert found["metrics"]["adaponder_over_ponder"] is not None


def test_another_error_is_not_taken_for_a_lack_of_memory(monkeypatch):
    def broken(*args):
        raise RuntimeError("something else")

    monkeypatch.setattr(training, "build", broken)
    result = invoke("train", *QUICK, "--no-compile", *SET)
    assert "something else" in str(result.exception)


@pytest.mark.parametrize("counted", [False, True], ids=["doubling", "expecting"])
@pytest.mark.parametrize("most", [0, 1, 2, 3, 5, 8, 13, 40])
def test_the_largest_batch_is_found_in_few_trials(monkeypatch, most, counted):
    """Memory grows by 10 with each multiple of 3; the last of the room is lost to what nobody counts."""

    def measure(recipe, variant, *, batch, **rest):
        if batch > most * 3 + 2:
            raise torch.OutOfMemoryError("no")
        return training.Result(variant, batch, 12, timing.Timing([1.0], 7 + 10 * batch // 3 if counted else None), 1.0)

    monkeypatch.setattr(training, "measure_training", measure)
    tried = []
    for room in (10 * most + 8, 10 * most + 25) if counted else (None,):
        monkeypatch.setattr(largest, "capacity", lambda device, room=room: room)
        tried.clear()
        found = largest.search(
            recipe(),
            training.Variant("plain"),
            start=3,
            device=CPU,
            tried=lambda batch, fits: tried.append((batch, fits)),
        )
        assert (found and found.batch) == (most * 3 or None)
        assert (most * 3, True) in tried or most == 0
        assert (most * 3 + 3, False) in tried
        assert len(tried) == len(set(tried)) <= (4 if counted else 12)


@pytest.mark.compiler
@pytest.mark.parametrize(("guess", "room"), [(10, 4), (4, 8)], ids=["down", "up"])
def test_looking_around_compiles_twice_however_far(monkeypatch, guess, room):
    """Once for the first batch, once for one that varies: a layer without and with rows to reuse, three small ones."""
    compile_passes, measure_training = models.AdaPonderForCausalLM.compile_passes, training.measure_training

    def measure(recipe, variant, *, batch, **rest):
        done = measure_training(recipe, variant, batch=batch, **rest)
        if batch > room:
            raise torch.OutOfMemoryError("no")
        return done

    monkeypatch.setattr(models.AdaPonderForCausalLM, "compile_passes", partialmethod(compile_passes, backend="eager"))
    monkeypatch.setattr(training, "measure_training", measure)
    counters.clear()
    graphs = []
    found = largest.around(
        recipe(),
        training.Variant("adaponder", checkpointing=True),
        guess=guess,
        start=2,
        device=CPU,
        tried=lambda batch, fits: graphs.append((batch, fits, counters["stats"]["unique_graphs"])),
    )
    assert found.batch == room
    assert {(room, True), (room + 2, False)} <= {trial[:2] for trial in graphs}
    assert [made for _, _, made in graphs] == [5, *[10] * (len(graphs) - 1)]


@pytest.mark.parametrize("compiled", [4, 8, 12])
@pytest.mark.parametrize("eager", [0, 8])
def test_the_compiled_variant_is_looked_for_around_the_eager_one(monkeypatch, eager, compiled):
    room = {"plain": 2, "adaponder, eager, checkpointed": eager, "adaponder, compiled, checkpointed": compiled}

    def measure(recipe, variant, *, batch, **rest):
        if batch > room[variant.name]:
            raise torch.OutOfMemoryError("no")
        return training.Result(variant, batch, 12, timing.Timing([0.5], 10 * batch), 1.0)

    monkeypatch.setattr(training, "measure_training", measure)
    monkeypatch.setattr(largest, "capacity", lambda device: 10_000)
    rows = list(command.search_largest(recipe(), compiles=True, start=2, device=CPU))
    assert {row["variant"]: row["batch"] for row in rows} == room
    assert [row["tokens_per_second"] for row in rows] == [batch * 24 or None for batch in room.values()]
    assert [row["peak_bytes"] for row in rows] == [batch * 10 or None for batch in room.values()]
    assert tables.largest_cells(rows[1], 2)[1] == ("8" if eager else "not even 2")


def test_only_what_is_asked_for_is_measured_and_no_record_stands_for_all(tmp_path):
    asked = ("--trust", "--commit=abc", "--warmup=0", "--repeats=1", "--no-compile", "--only=checkpointed", "--batch=2")
    found = measured("train", *asked, *SET, tmp_path=tmp_path)
    assert [row["variant"] for row in found["metrics"]["rows"]] == ["plain", "adaponder, eager, checkpointed"]
    assert found["settings"]["only"] == ["checkpointed"]
    assert "no record is kept" in found["shown"]
    result = invoke("train", "--trust", "--no-record", "--only=faster", *SET)
    assert isinstance(result.exception, InputError)
    assert "--only faster" in str(result.exception)
    assert "plain; adaponder, eager" in str(result.exception)
    chosen = command.chosen_variants(ops.cases([ops.Size(2, 3, 5)]), ["vocab_expectation"])
    assert {case.op for case in chosen if case.implementation != "plain"} == {"vocab_expectation"}


def test_training_that_skips_halted_tokens_is_compared_with_dense_training(tmp_path):
    found = measured("train", *QUICK, "--no-compile", "--batch=2", "--keep=1,.5,.25", *SET, tmp_path=tmp_path)
    rows = {row["variant"]: row for row in found["metrics"]["rows"]}
    assert list(rows) == ["plain", "ponder, eager", "adaponder, eager, dense", "adaponder, eager, compact"]
    dense, compact = (rows[f"adaponder, eager, {execution}"] for execution in ("dense", "compact"))
    speeds = compact["tokens_per_second"] / dense["tokens_per_second"]
    assert found["metrics"]["compact_over_dense"] == pytest.approx(speeds)
    over_ponder = dense["tokens_per_second"] / rows["ponder, eager"]["tokens_per_second"]
    assert found["metrics"]["adaponder_over_ponder"] == pytest.approx(over_ponder)
    promised = found["metrics"]["compact_over_dense_by_flops"]
    assert compact["matmul_share"] / dense["matmul_share"] == pytest.approx(speeds / promised)
    # The same function: after the same steps the same loss.
    assert compact["loss"] == pytest.approx(dense["loss"], rel=1e-5)
    assert found["metrics"]["dense_and_compact_differ_by"] < 1e-5
    assert found["settings"]["keep"] == [1, 0.5, 0.25]
    assert found["settings"]["mean_depth"] == pytest.approx(1.75)
    assert found["command"] == "bench train"
    shown = " ".join(found["shown"].split())
    assert "that reads 1, 0.5, 0.25 of the tokens" in shown
    assert "of dense's tokens/s, both eager; by FLOPs alone" in shown


def test_what_skipping_promises_in_training_is_counted_by_hand():
    depths = depths_of((1, 0.5, 0.25), 2, 12, seed=0)
    body, mixture, gate = 2 * 2 * (4 * 16 * 16 + 2 * 16 * 24), 2 * 2 * 61 * 16, 2 * (16 * 64 + 64)
    keys = 2 * 2 * 2 * 16
    # A row sees the keys up to its own slot in every iteration that reads it; gates are for all, and so is the loss.
    seen = sum(keys * (slot + 1) * int(depth) for row in depths for slot, depth in enumerate(row)) / depths.numel()
    rest = 2 * gate + 2 * 61 * 16
    compact = 1.75 * body + seen + 0.75 * mixture + rest
    dense = 3 * (body + keys * 6.5) + 2 * mixture + rest
    assert training.promised_over_dense(recipe(), depths) == pytest.approx(dense / compact, rel=1e-12)
    ways = [training.Variant("adaponder", execution=execution) for execution in (None, "dense", "compact")]
    flops = [training.flops_per_token(recipe(), variant, depths) for variant in ways]
    assert flops == pytest.approx([3 * dense, 3 * dense, 3 * compact], rel=1e-12)


@pytest.mark.compiler
def test_compiled_training_that_skips_tokens_stays_compiled(monkeypatch, tmp_path):
    compile_passes = models.AdaPonderForCausalLM.compile_passes
    monkeypatch.setattr(models.AdaPonderForCausalLM, "compile_passes", partialmethod(compile_passes, backend="eager"))
    asked = ("--warmup=1", "--repeats=2", "--trust", "--no-record", "--batch=2", "--keep=1,.5,.25")
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        found = measured("train", *asked, *SET, tmp_path=tmp_path)
    names = ["adaponder, compiled, dense", "adaponder, compiled, compact"]
    losses = {row["variant"]: row["loss"] for row in found["metrics"]["rows"]}
    assert losses[names[0]] == pytest.approx(losses[names[1]], rel=1e-5)


@pytest.mark.parametrize("known", [torch.OutOfMemoryError("no"), EvaluationError("they differ")], ids=repr)
def test_training_that_skips_tokens_is_not_timed_unless_it_was_compared(monkeypatch, known):
    def fails(*args, **kwargs):
        raise known

    monkeypatch.setattr(command, "disagreement", fails)
    result = invoke("train", *QUICK, "--no-compile", "--batch=2", "--keep=1,.5,.5", *SET)
    memory = isinstance(known, torch.OutOfMemoryError)
    assert isinstance(result.exception, InputError if memory else EvaluationError)
    assert ("--batch 2" if memory else "they differ") in str(result.exception)
    assert "measuring plain" not in result.output


def test_forced_depths_hold_for_adaponder_alone_and_say_what_is_read(monkeypatch):
    depths, seen = depths_of((1, 0.5, 0.25), 2, 12, seed=0), []
    forward = models.AdaPonderForCausalLM.forward

    def watch(self, *args, **how):
        output = forward(self, *args, **how)
        seen.append((how["execution"], output.depth))
        return output

    monkeypatch.setattr(models.AdaPonderForCausalLM, "forward", watch)
    settings = {"batch": 2, "depths": depths, "device": CPU, "warmup": 0, "repeats": 1}
    for variant in training.variants(CPU, compiles=False, halting=True)[1:]:
        training.measure_training(recipe(), variant, **settings)
    assert [execution for execution, _ in seen] == ["dense", "dense", "compact"]
    assert (seen[0][1] == 3).all()
    assert all(torch.equal(depth, depths) for _, depth in seen[1:])


def test_a_record_of_halting_does_not_take_the_others_place(monkeypatch, tmp_path):
    (tmp_path / "benchmarks").mkdir()
    monkeypatch.setattr(record, "checkout", lambda: tmp_path)
    monkeypatch.setattr(bench_record, "checkout", lambda: tmp_path)
    asked = ("--trust", "--commit=abc", "--warmup=0", "--repeats=1", "--no-compile", "--batch=2", *SET)
    for more in ([], ["--keep=1,.5,.5"]):
        assert invoke("train", *asked, *more).exit_code == 0
    names = sorted(path.name for path in (tmp_path / "benchmarks" / "records").iterdir())
    assert names == ["train-demo-cpu.json", "train-halting-demo-cpu.json"]


def test_what_was_measured_before_a_fall_is_kept(monkeypatch, tmp_path):
    measure = training.measure_training

    def falls(recipe, variant, **rest):
        if variant.method == "adaponder":
            raise RuntimeError("fell")
        return measure(recipe, variant, **rest)

    monkeypatch.setattr(training, "measure_training", falls)
    kept = tmp_path / "out.json"
    result = invoke("train", *QUICK, "--trust", "--no-record", "--no-compile", "--batch=2", *SET, "--json", str(kept))
    assert str(result.exception) == "fell"
    found = json.loads(kept.read_text())
    assert found["complete"] is False
    assert found["recipe"]["name"] == "cpu/demo"
    assert found["settings"]["batch"] == 2
    assert list(tmp_path.iterdir()) == [kept]
    assert [row["variant"] for row in found["metrics"]["rows"]] == ["plain", "ponder, eager"]
    assert found["hardware"]["device"]
    result = invoke("train", *QUICK, "--no-compile", "--batch=2", "--keep=1,.5,.5", *SET, "--json", str(kept))
    assert str(result.exception) == "fell"
    found = json.loads(kept.read_text())["metrics"]
    assert found.keys() == {"dense_and_compact_differ_by", "compact_over_dense_by_flops", "rows"}


# --- prefill -------------------------------------------------------------------------------------------------------


def test_prefill_compares_dense_and_compact(tmp_path):
    found = measured("prefill", *QUICK, "--no-compile", "--batch=2", "--keep=1,.5,.25", *SET, tmp_path=tmp_path)
    rows = {row["variant"]: row for row in found["metrics"]["rows"]}
    assert list(rows) == ["plain", "dense, eager", "compact, eager"]
    for row in rows.values():
        assert row["times_dense"] == pytest.approx(rows["dense, eager"]["median_seconds"] / row["median_seconds"])
        assert row["times_promised"] == rows["dense, eager"]["flops"] / row["flops"]
    # The body is read 1.75 instead of 3 times, a mixture is made 0.75 instead of 2 times.
    assert 3 / 1.75 < rows["compact, eager"]["times_promised"] < 2 / 0.75
    assert found["settings"]["keep"] == [1, 0.5, 0.25]
    assert found["settings"]["mean_depth"] == 1.75
    assert found["metrics"]["dense_and_compact_differ_by"] < 1e-5


@pytest.mark.parametrize(("keep", "sequence"), [((1, 0.5, 0.5, 0.5), 64), ((1, 0.75, 0.25, 0), 20), ((1, 1, 1), 7)])
def test_forced_depths_have_exactly_these_shares(keep, sequence):
    depths = depths_of(keep, 5, sequence, seed=3)
    for iteration, share in enumerate(keep):
        assert ((depths > iteration).sum(1) == share * sequence).all()
    assert torch.equal(depths, depths_of(keep, 5, sequence, seed=3))
    if keep[1] < 1:
        assert not torch.equal(depths, depths_of(keep, 5, sequence, seed=4))
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


def test_compact_is_promised_what_it_skips():
    depths = depths_of((1, 0.5, 0.5), 2, 12, seed=0)
    plain, dense, compact = (
        prefill.flops_of(variant, depths, recipe()) for variant in prefill.variants(compiles=False)
    )
    compiled = prefill.variants(by="pass")[3:]
    assert [variant.name for variant in compiled] == ["dense, compiled by pass", "compact, compiled by pass"]
    assert [dense, compact] == [prefill.flops_of(variant, depths, recipe()) for variant in compiled]
    gates = 2 * 12 * 2 * (2 * (16 * 64 + 64))
    assert dense - plain == gates
    assert compact < dense


# --- ops -----------------------------------------------------------------------------------------------------------


def test_the_roofline_counts_what_nobody_can_avoid():
    size = ops.Size(2, 3, 5)
    product = 2 * 2 * 3 * 5
    expectation = [ops.work_of("vocab_expectation", size, backward=backward) for backward in (False, True)]
    assert expectation == [(2 * product, 4 * (6 + 15 + 15 + 6)), (6 * product, 4 * 2 * (6 + 15 + 15 + 6))]
    loss = [ops.work_of("linear_cross_entropy", size, backward=backward) for backward in (False, True)]
    assert loss == [(product, 4 * (6 + 15 + 2) + 16), (3 * product, 4 * 2 * (6 + 15 + 2) + 16)]


def test_ops_compare_plain_ours_and_torchs(tmp_path):
    found = measured("ops", *QUICK, "--size", "32,8,50", tmp_path=tmp_path)
    rows = found["metrics"]["rows"]
    # Each operation with and without backward, plain and ours; kept logits serve a backward; torch has one loss.
    assert len(rows) == 8 + 1 + 2 * ops.torch_has_it()
    for row in rows:
        same = ("op", "tokens", "hidden", "vocabulary", "backward")
        (plain,) = [
            other for other in rows if other["implementation"] == "plain" and all(other[k] == row[k] for k in same)
        ]
        seconds = row["milliseconds"] / 1e3
        assert row["times_plain"] == pytest.approx(plain["milliseconds"] / row["milliseconds"])
        assert row["matmul_share"] == pytest.approx(row["flops"] / seconds / 1e9)
        assert row["copy_share"] == pytest.approx(row["bytes"] / seconds / 1e8)
    assert found["recipe"] is None
    assert found["settings"]["sizes"] == [[32, 8, 50]]


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("op", ops.OPERATIONS)
def test_what_is_timed_computes_the_same(op, backward):
    chosen = [case for case in ops.cases([ops.Size(32, 8, 50)]) if case.op == op and case.backward == backward]
    first, *others = (ops.operation(case, device=CPU, dtype=torch.float32, seed=0)() for case in chosen)
    assert others
    for other in others:
        torch.testing.assert_close(list(other), list(first), rtol=1e-4, atol=1e-6)


def test_torchs_own_loss_is_a_row_only_where_torch_has_it(monkeypatch):
    monkeypatch.setattr(ops, "torch_has_it", lambda: False)
    assert {case.implementation for case in ops.cases([ops.Size(2, 3, 5)])} == {"plain", "ours", "ours, logits kept"}


# --- tests first, records, options ---------------------------------------------------------------------------------


@pytest.fixture
def a_checkout(monkeypatch, tmp_path):
    """A folder that the check takes for the checkout: one source, and a file for each test."""
    root = tmp_path / "checkout"
    for name in ("src/source.py", "pyproject.toml", *checks.TESTS):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("pass")
    monkeypatch.setattr(checks, "checkout", lambda: root)
    return root


def test_the_tests_that_run_before_a_benchmark_are_in_the_checkout():
    assert all((record.checkout() / name).is_file() for name in checks.TESTS)


@pytest.mark.parametrize("kind", ["train", "prefill", "ops"])
def test_a_failing_test_refuses(monkeypatch, tmp_path, a_checkout, kind):
    monkeypatch.setattr(record, "checkout", lambda: tmp_path)
    (tmp_path / "benchmarks").mkdir()
    monkeypatch.setattr(checks, "run_tests", lambda arguments, where: (1, "…\nFAILED test_kernels.py::test_it"))
    result = invoke(kind, "--commit", "abc", *(SET if kind != "ops" else []), "--json", str(tmp_path / "out.json"))
    assert isinstance(result.exception, EvaluationError), "exits with 1"
    assert not isinstance(result.exception, InputError)
    assert "FAILED test_kernels.py::test_it" in str(result.exception)
    assert "measuring" not in result.output
    assert list(tmp_path.rglob("*.json")) == []


def test_tests_of_the_device_are_run_and_the_record_says_so(monkeypatch, tmp_path, a_checkout):
    ran = []
    monkeypatch.setattr(checks, "run_tests", lambda arguments, where: (ran.append(arguments), (0, "passed"))[1])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "a GPU")
    found = measured("ops", "--no-record", "--warmup=0", "--repeats=1", "--size=4,4,8", tmp_path=tmp_path)
    assert found["tested"] is True
    checks.require_tests(torch.device("cuda"))
    assert "gpu or not gpu" not in ran[0]
    assert "gpu or not gpu" in ran[1]
    for name in ("kernels", "vocab_expectation", "linear_cross_entropy", "gelu", "rotary", "joined"):
        assert f"tests/unit/ops/test_{name}.py" in ran[0]


def test_what_has_passed_is_not_tested_again_until_something_changes(monkeypatch, a_checkout):
    ends = [1, 0, 0, 0]
    monkeypatch.setattr(checks, "run_tests", lambda arguments, where: (ends.pop(0), "as it went"))
    with pytest.raises(EvaluationError, match="as it went"):
        checks.require_tests(CPU)
    assert [checks.require_tests(CPU) for _ in range(3)] == [True, False, False], "a failure proves nothing"
    (a_checkout / "src" / "source.py").write_text("pass  # changed")
    assert checks.require_tests(CPU)
    (a_checkout / checks.TESTS[-1]).write_text("pass  # changed")
    assert checks.require_tests(CPU)
    assert not checks.require_tests(CPU)


def test_the_runner_runs_the_checkouts_own_sources(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    code, said = checks.run_tests([sys.executable, "-c", "import os; print(os.environ['PYTHONPATH']); exit(3)"], {})
    assert code == 3
    assert said.strip().split(os.pathsep) == [str(record.checkout() / "src"), "elsewhere"]


def test_tests_must_be_there(monkeypatch, tmp_path):
    monkeypatch.setattr(checks, "checkout", lambda: tmp_path)
    with pytest.raises(InputError, match="--trust"):
        checks.require_tests(CPU)


def test_a_record_is_kept_under_a_telling_name(monkeypatch, tmp_path):
    monkeypatch.setattr(record, "checkout", lambda: tmp_path)
    monkeypatch.setattr(bench_record, "checkout", lambda: tmp_path)
    with pytest.raises(InputError, match="--no-record"):
        record.record_path("ops", CPU)
    (tmp_path / "benchmarks").mkdir()
    result = invoke("ops", "--trust", "--commit", "abc", "--warmup", "0", "--repeats", "1", "--size", "4,4,8")
    assert result.exit_code == 0, result.output
    assert "benchmarks/records/ops-cpu.json" in result.output
    assert json.loads((tmp_path / "benchmarks" / "records" / "ops-cpu.json").read_text())["commit"] == "abc"


@pytest.mark.parametrize(
    ("name", "device", "expected"),
    [
        ("paper/adaponder-70m", "NVIDIA H200", "train-70m-h200"),
        ("paper/ponder-410m", "NVIDIA A100-SXM4-80GB", "train-ponder-410m-a100-sxm4-80gb"),
        ("mini/adaponder", "NVIDIA GeForce RTX 4090", "train-mini-rtx-4090"),
        ("cpu/demo", None, "train-demo-cpu"),
    ],
)
def test_labels_come_from_recipe_and_device(monkeypatch, name, device, expected):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: device)
    path = record.record_path("train", torch.device("cuda" if device else "cpu"), load_recipe(name))
    assert path == record.checkout() / "benchmarks" / "records" / f"{expected}.json"


def test_a_commit_is_asked_for_where_there_is_no_git(monkeypatch):
    assert record.commit_of(None, needed=True).removesuffix("-dirty").isalnum()
    monkeypatch.setattr(record, "_git", lambda *arguments: None)
    assert record.commit_of("abc", needed=True) == "abc"
    assert record.commit_of(None, needed=False) == "unknown"
    with pytest.raises(InputError, match="--commit"):
        record.commit_of(None, needed=True)


def test_the_seed_names_weights_and_tokens():
    one, same, other = (
        command.choose_recipe(TrainBenchOptions(recipe="cpu/demo", overrides=TINY, seed=seed), CPU)
        for seed in (1, 1, 2)
    )
    draws = [next(models.batches(chosen, 2, CPU))[0] for chosen in (one, same, other)]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])
    assert one.fingerprint == same.fingerprint != other.fingerprint
    assert command.choose_recipe(TrainBenchOptions(recipe="cpu/demo", overrides=["train.seed=7"]), CPU).train.seed == 7


def test_an_interruption_shows_what_was_measured_and_leaves(monkeypatch):
    real = training.build

    def build(recipe, variant, device):
        if variant.method == "adaponder":
            raise KeyboardInterrupt
        return real(recipe, variant, device)

    monkeypatch.setattr(training, "build", build)
    result = invoke("train", *QUICK, "--no-compile", "--batch", "1", *SET, "--json", "-")
    assert result.exit_code == 130
    assert "ponder, eager" in result.stderr.split("a training step")[1]
    assert "no record is written; standard output has what there is" in result.stderr
    assert json.loads(result.stdout)["complete"] is False


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["ops", "--device", "abacus"], "--device abacus"),
        (["train", "--largest"], "--largest"),
        (["train", "--largest", "--keep", "1,.5,.5"], "--largest --keep"),
        (["train", "--keep", "1,.5"], "--keep 1,0.5: 3 shares"),
        (["prefill", "--keep", "1,.5"], "--keep 1,0.5: 3 shares"),
        (["prefill", "--keep", "1,.5,.6"], "--keep 1,0.5,0.6"),
        (["prefill", "--keep", ".9,.5,.5"], "--keep 0.9,0.5,0.5: the first"),
        (["prefill", "--keep", "1,.5,-.5"], "--keep 1,.5,-.5: -0.5 is out of range"),
        (["prefill", "--keep", "all"], "--keep all"),
        (["ops", "--size", "4,4"], "--size 4,4"),
        (["ops", "--size", "4,4,0"], "--size 4,4,0"),
        (["ops", "--size", "big"], "--size big"),
        (["train", "--recipe", "paper/adaponder-2.8b-from-ponder"], "--recipe paper/adaponder-2.8b-from-ponder"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_wrong_options_are_named(arguments, says):
    shape = [] if arguments[0] == "ops" or "--recipe" in arguments else SET
    result = invoke(*arguments, "--trust", "--no-record", *shape)
    assert isinstance(result.exception, InputError), result.output
    assert says in str(result.exception)


@pytest.mark.parametrize(
    "arguments",
    ["train --batch 0", "train --repeats 0", "prefill --warmup -1", "train --keep=", "ops --dtype int3"],
)
def test_options_out_of_range_are_wrong_use(arguments):
    result = invoke(*arguments.split(), "--trust", "--no-record")
    assert result.exit_code == 2
    assert arguments.replace("=", " ").split()[1] in result.output


def test_each_command_teaches_with_an_example():
    for kind in ("train", "prefill", "ops"):
        assert f"adaponder bench {kind} --device cuda" in " ".join(invoke(kind, "--help").output.split())


def test_measuring_leaves_warm_ups_out():
    calls = []
    found = timing.measure(lambda: calls.append(0), CPU, warmup=2, repeats=3)
    assert len(calls) == 5
    assert len(found.seconds) == 3
    assert found.peak_bytes is None
    assert replace(found, seconds=[1.0, 3.0, 2.0]).median == 2.0
