"""The harness: kernels are checked first, records have telling names, wrong options are named."""

import json
import re
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.main import get_command

from adaponder.errors import EvaluationError, InputError
from bench_support import QUICK, SET, invoke, measured
from benchmarks import against, harness, ops
from benchmarks.__main__ import app

CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parents[3]
SMALL = ("--trust", "--commit=abc", "--warmup=0", "--repeats=1", "--size=4,4,8")


def fail(monkeypatch, implementation: str, error: BaseException) -> None:
    """Makes one implementation of the operations over the vocabulary raise."""
    real = ops.operation

    def operation(case, **how):
        if case.implementation == implementation:
            raise error
        return real(case, **how)

    monkeypatch.setattr(ops, "operation", operation)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no"), RuntimeError("CUDA out of memory"), MemoryError()])
def test_only_a_lack_of_memory_is_a_row_without_figures(monkeypatch, tmp_path, error):
    fail(monkeypatch, "plain", error)
    found = measured("ops", *SMALL, "--no-record", "--only=expectation", folder=tmp_path)
    for row in found["metrics"]["rows"]:
        assert row["fits"] == (row["implementation"] != "plain") == (row["milliseconds"] is not None)
        assert row["times_plain"] is None
    assert "out of memory" in found["shown"]
    fail(monkeypatch, "plain", RuntimeError("something else"))
    assert isinstance(invoke("ops", *SMALL, "--no-record").exception, RuntimeError)


def test_a_failing_kernel_refuses(monkeypatch, tmp_path):
    failed = SimpleNamespace(returncode=1, stdout="…\nFAILED test_kernels.py::test_it")
    monkeypatch.setattr(harness.subprocess, "run", lambda command, **how: failed)
    result = invoke("ops", "--commit", "abc", "--json", str(tmp_path / "out.json"))
    assert isinstance(result.exception, EvaluationError), "exits with 1"
    assert "FAILED test_kernels.py::test_it" in str(result.exception)
    assert "measuring" not in result.output
    assert list(tmp_path.rglob("*.json")) == []


def test_kernels_are_interpreted_on_a_cpu_and_compiled_on_a_gpu(monkeypatch, tmp_path):
    ran, passed = [], SimpleNamespace(returncode=0, stdout="passed")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(harness.subprocess, "run", lambda command, env, **how: (ran.append(env), passed)[1])
    found = measured("ops", *SMALL[1:], "--no-record", folder=tmp_path)
    assert found["tested"] is True
    harness.check_kernels(torch.device("cuda"))
    assert [environment.get("TRITON_INTERPRET") for environment in ran] == ["1", None]
    assert ran[0]["CUDA_VISIBLE_DEVICES"] == ""


def test_every_kernel_has_a_test_that_runs_before_a_benchmark():
    tests = "".join(path.read_text() for path in (ROOT / "tests" / "unit" / "ops").glob("test_*.py"))
    listed = (ROOT / "tests" / "unit" / "ops" / "conftest.py").read_text()
    checks = re.findall(r'^    "(test_\w+)"', listed, re.MULTILINE)
    assert len(checks) > 10
    assert all(f"def {name}(" in tests for name in checks)


def test_records_have_telling_names_and_do_not_replace_each_other(monkeypatch, tmp_path):
    monkeypatch.setattr(harness, "ROOT", tmp_path)
    training = ("--trust", "--commit=abc", "--warmup=0", "--repeats=1", "--no-compile", "--batch=2", *SET)
    for arguments in (("train", *training, "--keep=1,.5,.5"), ("prefill", *training), ("ops", *SMALL)):
        result = invoke(*arguments)
        assert result.exit_code == 0, f"{result.output} {result.exception!r}"
    assert "benchmarks/records/ops-cpu.json" in result.output
    records = {path.name: json.loads(path.read_text()) for path in tmp_path.rglob("*.json")}
    assert set(records) == {"train-halting-demo-cpu.json", "prefill-demo-cpu.json", "ops-cpu.json"}
    assert all(found["commit"] == "abc" for found in records.values())


def test_names_come_from_recipe_and_device(monkeypatch):
    for device, recipe, expected in (
        ("NVIDIA H200", "paper/adaponder-70m", "train-70m-h200"),
        ("NVIDIA A100-SXM4-80GB", "paper/ponder-410m", "train-ponder-410m-a100-sxm4-80gb"),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_, device=device: device)
        name = "-".join(["train", *harness.words_of(recipe)])
        assert harness.record_path(name, torch.device("cuda")).stem == expected


def test_a_commit_is_asked_for_where_there_is_no_git(monkeypatch):
    assert harness.commit_of(None, required=True).removesuffix("-dirty").isalnum()
    monkeypatch.setenv("PATH", "")
    assert harness.commit_of("abc", required=True) == "abc"
    assert harness.commit_of(None, required=False) == "unknown"
    with pytest.raises(InputError, match="--commit"):
        harness.commit_of(None, required=True)


def test_an_interruption_shows_what_was_measured_and_leaves(monkeypatch):
    fail(monkeypatch, "ours", KeyboardInterrupt())
    result = invoke("ops", *SMALL, "--no-record", "--json", "-")
    assert result.exit_code == 130
    assert "plain, forward" in result.stderr.split("vocab_expectation: 4 tokens")[1]
    assert "standard output has the rows so far" in result.stderr
    assert json.loads(result.stdout)["complete"] is False


def test_only_what_is_asked_for_is_measured_and_no_record_stands_for_all(tmp_path):
    found = measured("ops", *SMALL, "--only=kept", folder=tmp_path)
    assert {row["implementation"] for row in found["metrics"]["rows"]} == {"plain", "ours, logits kept"}
    assert found["settings"]["only"] == ["kept"]
    assert "no record is written" in found["shown"]
    result = invoke("ops", *SMALL, "--only=faster")
    assert isinstance(result.exception, InputError)
    assert "--only faster" in str(result.exception)


def test_ops_resume_by_size(tmp_path):
    first = measured("ops", *SMALL, "--no-record", "--size=8,4,9", folder=tmp_path)
    earlier = tmp_path / "earlier.json"
    earlier.write_text(json.dumps(first))
    again = measured("ops", *SMALL, "--no-record", "--size=8,4,9", "--resume", str(earlier), folder=tmp_path)
    assert [row["seconds"] for row in again["metrics"]["rows"]] == [row["seconds"] for row in first["metrics"]["rows"]]
    assert len({tuple(row["seconds"]) for row in first["metrics"]["rows"]}) == len(first["metrics"]["rows"])


def test_the_roofline_counts_the_unavoidable_work():
    size = ops.Size(2, 3, 5)
    product = 2 * 2 * 3 * 5
    expectation = [ops.work_of("vocab_expectation", size, backward=backward) for backward in (False, True)]
    assert expectation == [(2 * product, 4 * (6 + 15 + 15 + 6)), (6 * product, 4 * 2 * (6 + 15 + 15 + 6))]
    loss = [ops.work_of("linear_cross_entropy", size, backward=backward) for backward in (False, True)]
    assert loss == [(product, 4 * (6 + 15 + 2) + 16), (3 * product, 4 * 2 * (6 + 15 + 2) + 16)]


def test_ops_compare_plain_ours_and_torchs(tmp_path, monkeypatch):
    found = measured("ops", *QUICK, "--size", "32,8,50", folder=tmp_path)
    rows = {(row["op"], row["implementation"], row["backward"]): row for row in found["metrics"]["rows"]}
    # Each operation with and without backward, plain and ours; kept logits serve a backward; torch has one loss.
    assert len(rows) == 8 + 1 + 2 * ops.has_torch_loss()
    for (op, _, backward), row in rows.items():
        seconds = row["milliseconds"] / 1e3
        assert row["times_plain"] == pytest.approx(rows[op, "plain", backward]["milliseconds"] / row["milliseconds"])
        assert row["matmul_share"] == pytest.approx(row["flops"] / seconds / 1e9)
        assert row["copy_share"] == pytest.approx(row["bytes"] / seconds / 1e8)
    assert found["recipe"] is None
    assert found["settings"]["sizes"] == [[32, 8, 50]]
    monkeypatch.setattr(ops, "has_torch_loss", lambda: False)
    assert {case.implementation for case in ops.cases([ops.Size(2, 3, 5)])} == {"plain", "ours", "ours, logits kept"}


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("op", ops.OPERATIONS)
def test_what_is_timed_computes_the_same(op, backward):
    chosen = [case for case in ops.cases([ops.Size(32, 8, 50)]) if case.op == op and case.backward == backward]
    first, *others = (ops.operation(case, device=CPU, dtype=torch.float32, seed=0)() for case in chosen)
    assert others
    for other in others:
        torch.testing.assert_close(list(other), list(first), rtol=1e-4, atol=1e-6)


WRONG = {
    "ops": ("--device abacus", "--size 4,4"),
    "train": ("--keep 1,0.5", "--recipe paper/adaponder-2.8b-from-ponder"),
    "prefill": ("--keep 1,0.5,0.6", "--keep all"),
    "decode": ("--lanes 0", "--only nothing", "--shape huge", "--depths 5"),
    "serve": ("--stand-in 64", "--stand-in x,8", "--stand-in 64,0"),
    "serve runs/x": ("--rates 2,1", "--rates nan", "--dtype int3"),
}


@pytest.mark.parametrize(
    ("line", "option"),
    [
        *((f"{command} {option}", option) for command, options in WRONG.items() for option in options),
        *((f"{command} --dtype int3", "--dtype") for command in ("ops", "decode")),
        ("decode --scenario=ouro --subset", "--scenario ouro"),
        ("decode --checkpoint=x", "--checkpoint"),
        ("decode --subset --lanes=3", "--subset"),
        ("serve", "CKPT"),
        ("serve runs/x --url http://127.0.0.1:1", "CKPT"),
    ],
)
def test_wrong_options_are_named(line, option):
    name, *rest = line.split()
    shape = SET if name in ("train", "prefill") and "--recipe" not in rest else []
    result = invoke(name, *rest, "--no-record", *([] if name == "serve" else ["--trust"]), *shape)
    assert isinstance(result.exception, InputError) or result.exit_code == 2, result.output
    assert option in (str(result.exception) if isinstance(result.exception, InputError) else result.output)


def test_commands_in_documents_and_help_are_ones_that_the_command_line_takes():
    commands = get_command(app).commands
    texts = [path.read_text() for path in (*(ROOT / "docs").glob("*.md"), ROOT / "benchmarks" / "README.md")]
    texts += [(command.help or "").replace("[/]", "") for command in commands.values()]
    lines = re.findall(r"^(?:\[dim\])?python -m benchmarks (\S.*)$", "\n".join(texts), flags=re.MULTILINE)
    assert {line.split()[0] for line in lines} == set(commands)
    for line in lines:
        name, *arguments = shlex.split(line, comments=True)
        commands[name].make_context(name, arguments)


@pytest.mark.every
@pytest.mark.parametrize("case", ["tiny", "tiny-prefill", "tiny-decode"])
def test_two_checkouts_are_timed_in_turn(case):
    result = against.compare(ROOT, case, device="cpu", rounds=2, steps=1)
    assert result["this"] > 0 < result["other"]
    assert min(result["ratios"]) <= result["ratio"] <= max(result["ratios"])
