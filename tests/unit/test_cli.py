"""The command line: what it prints, what it exits with, and that its errors name the field and the cure."""

import json
import math
import re
import subprocess
import sys
from unittest.mock import Mock

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from adaponder import __version__, cli, terminal
from adaponder.commands import demo, doctor
from adaponder.errors import AdaPonderError
from adaponder.evaluation import meter
from benchmarks import __main__ as benchmarks
from experiments import __main__ as experiments
from stock_support import make_stock

COMMANDS = {name: one for name, one in get_command(cli.app).commands.items() if name not in cli.MOVED}


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cli") / "stock"
    make_stock(folder, seed=0)
    return folder


@pytest.fixture(scope="module")
def checkpoint(stock):
    out = stock.parent / "ada"
    shown("convert", str(stock), "--out", str(out), "--iterations", "3")
    return out


def shown(*arguments: str) -> str:
    result = CliRunner().invoke(cli.app, list(arguments), env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output + repr(result.exception)
    return result.output


def generated(checkpoint, folder, *arguments: str) -> dict:
    record = folder / "generated.json"
    few = ("--prompt", "def f", "--max-new-tokens", "6", "--json", str(record))
    shown("generate", str(checkpoint), *few, *arguments)
    return json.loads(record.read_text())


def test_help_lists_the_commands_in_the_order_in_which_a_newcomer_meets_them():
    output = shown("--help")
    assert "--install-completion" in output
    order = [output.index(f"│ {name} ") for name in ("demo", "train", "eval", "export")]
    assert order == sorted(order)
    assert all(name in output for name in COMMANDS)
    without_json = {name for name, one in COMMANDS.items() if not any("--json" in param.opts for param in one.params)}
    assert without_json == {"serve"}
    assert shown("--version").strip() == f"adaponder {__version__}"


@pytest.mark.parametrize("app", [cli.app, benchmarks.app, experiments.app])
def test_no_value_is_shown_by_the_name_of_its_option(app):
    """Typer 0.27 would name an option ``--NAME`` if its value is shown as NAME."""
    parameters = [parameter for command in get_command(app).commands.values() for parameter in command.params]
    options = [parameter for parameter in parameters if f"--{parameter.name}" in parameter.opts]
    assert options
    assert not [option.name for option in options if (option.metavar or "").lower() == option.name]


def test_an_option_s_old_name_works_with_a_notice(command, checkpoint):
    asked = ("serve", str(checkpoint), "--tokens", "64", "--max-tokens=7", "--host", "0.0.0.0")
    code, _, error = command(*asked)
    assert error.splitlines()[0] == "--tokens is now --max-length; the old name works until the next release"
    assert error.splitlines()[1].startswith("--max-tokens is now --max-new-tokens")
    assert (code, "--host 0.0.0.0 is reachable by others" in error) == (2, True), "both were taken"


def test_a_checkpoint_that_is_nearly_there_is_suggested(command, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "demo").mkdir(parents=True)
    for name, near in (("sampel", "sample"), ("runs/dmeo", "runs/demo"), ("./sample-hop", "sample-hops")):
        code, _, error = command("inspect", name)
        assert code
        assert f"did you mean {near}?" in error


def test_every_command_has_help_and_no_slow_library_is_imported_for_it():
    code = """
import sys
from typer.main import get_command
from typer.testing import CliRunner
from adaponder.cli import MOVED, app
for path in ([], *([name] for name in get_command(app).commands)):
    result = CliRunner().invoke(app, [*path, "--help"])
    assert result.exit_code == 0, (path, result.output, result.exception)
    assert "<bool>" not in result.output or path[0] in MOVED, (path, "a flag takes no value")
heavy = ["torch", "transformers", "pandas", "matplotlib", "pyarrow", "numpy", "huggingface_hub", "yaml"]
print([name for name in heavy if name in sys.modules])
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (result.stdout.strip(), result.returncode) == ("[]", 0), result.stderr


def test_a_recipe_is_shown_by_what_differs_from_its_base(command, monkeypatch, tmp_path):
    overrides = ("--set", "train.steps=7", "--set", "train.compile=true")
    monkeypatch.setattr("adaponder.training.run.train", stopped := Mock(side_effect=KeyboardInterrupt))
    out = str(tmp_path / "run")
    _, output, _ = command("train", "mini/vanilla", *overrides, "--seed", "9", "--out", out)
    assert stopped.called
    words = output.split()
    # compile=True is as the base has it, but set on the command line.
    assert {"method=vanilla", "iterations=1", "steps=7", "seed=9", "compile=True"} <= set(words)
    assert not any(word.startswith(("lr=", "backbone.", "tokenizer=")) for word in words)


def test_one_recipe_is_shown_with_every_field_and_where_it_is_from(tmp_path):
    output = " ".join(shown("recipes", "paper/adaponder-410m", "--json", str(tmp_path / "it.json")).split())
    assert "train.lr=0.0003 stated" in output
    assert json.loads((tmp_path / "it.json").read_text())["paper/adaponder-410m"]["train"]["steps"] == 50_000
    (tmp_path / "mine.yaml").write_text("base: mini/vanilla\ntrain: {clip: 1.0, betas: [0.9, 0.95]}\n")
    output = " ".join(shown("recipes", str(tmp_path / "mine.yaml")).split())
    assert "train.betas=[0.9,0.95] this recipe" in output  # stated, though it is the default
    assert "model.backbone.hidden_size=256 from mini/adaponder" in output
    assert "train.execution=dense default" in output


def test_generate_reads_as_deep_as_asked_and_counts_the_cost_of_prompt_and_tokens(stock, checkpoint, tmp_path):
    result = generated(checkpoint, tmp_path, "--policy", "fixed:2")
    assert set(result["depths"][:-1]) == {2}
    assert result["depths"][-1] == 0, "the last token was never read"
    assert result["prefill"]["tokens"] + result["decode"]["tokens"] == len(result["tokens"]) - 1
    assert result["decode"]["iterations"] == result["prefill"]["iterations"] == 2.0
    assert result["decode"]["flops"]["attention"] > result["prefill"]["flops"]["attention"]
    for limit in (("--max-iterations", "1"), ("--tau", "0.99")):
        assert set(generated(checkpoint, tmp_path, *limit)["depths"][:-1]) == {1}
    assert generated(stock, tmp_path)["mean_depth"] == 1, "a plain checkpoint is vanilla"
    greedy = generated(checkpoint, tmp_path, "--greedy", "--seed", "2")
    assert generated(checkpoint, tmp_path, "--temperature", "0", "--seed", "1")["text"] == greedy["text"]


def test_a_result_on_standard_output_stands_there_alone(command, checkpoint, tmp_path):
    record, asked = tmp_path / "out.json", ["inspect", str(checkpoint)]
    code, shown, _ = command(*asked, "--json", str(record))
    assert code == 0
    code, out, err = command(*asked, "--json", "-")
    assert code == 0
    result = json.loads(out)
    assert result == json.loads(record.read_text())
    assert result["parameters"]["added"] == 2 * (4 * 128 * 128 + 4 * 128 + 4 * 128 + 1)
    assert [round(depth["ratio"]) for depth in result["depths"]] == [1, 2, 3]
    assert "added by the method" in err
    assert err == shown, "what was on standard output is on standard error"
    assert not (tmp_path / "-").exists()


def test_of_several_results_standard_output_gets_the_last_also_of_a_command_that_fails(capsys):
    def failing():
        with terminal.json_alone(terminal.STDOUT):
            terminal.write_json(terminal.STDOUT, {"complete": False})
            print("on the way")
            terminal.write_json(terminal.STDOUT, {"complete": True})
            raise AdaPonderError("in the end")

    with pytest.raises(AdaPonderError):
        failing()
    shown = capsys.readouterr()
    assert json.loads(shown.out) == {"complete": True}
    assert shown.err == "on the way\n"
    with terminal.json_alone(terminal.STDOUT):
        pass
    assert capsys.readouterr().out == "", "a command that has no result prints none, not the last one's"


def test_a_result_is_json_also_where_a_number_is_not_finite(tmp_path):
    def refuse(word):
        raise AssertionError(f"{word} is no JSON")

    measured = {"perplexity": math.inf, "rows": [{"interval": (math.nan, 1.0), "tokens": 3}]}
    terminal.write_json(tmp_path / "result.json", measured)
    read = json.loads((tmp_path / "result.json").read_text(), parse_constant=refuse)
    assert read == {"perplexity": None, "rows": [{"interval": [None, 1.0], "tokens": 3}]}


def test_doctor_lists_versions_devices_and_kernels(tmp_path, monkeypatch):
    monkeypatch.setattr(meter, "check_all", lambda: [meter.check_flops("adaponder")])
    shown("doctor", "--json", str(tmp_path / "doctor.json"))
    result = json.loads((tmp_path / "doctor.json").read_text())
    assert result["versions"]["torch"]
    assert result["devices"][0]["name"] == "cpu"
    kernels = {kernel["op"]: kernel["runs"] for kernel in result["kernels"] if kernel["device"] == "cpu"}
    assert {"ledger_attention", "linear_cross_entropy", "vocab_expectation", "lanes", "next_token"} <= set(kernels)
    assert set(kernels.values()) == {"torch (reference)"}
    for there, words in ((True, "Triton kernels"), (False, "not installed")):
        monkeypatch.setattr("adaponder.ops.dispatch.HAS_TRITON", there)
        assert all(words in doctor.would_run(op, "cuda:0") for op in kernels)


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ("generate {ada} --prompt x --policy fixed:9", "policy=fixed:9"),
        ("generate {ada} --prompt x --max-iterations 9", "--max-iterations 9"),
        ("generate {ada} --prompt x --interactive", "--prompt has no effect"),
        ("generate {ada} --prompt x --policy fixd:2", "no policy is called fixd; did you mean fixed?"),
        ("generate {ada} --prompt x --greedy true", "--greedy takes no value"),
        ("generate {ada} --prompt x --greedy --temperature 0.7", "--temperature has no effect with --greedy"),
        ("inspect", "CKPT"),
        ("convert {stock} --out {stock}", "--out"),
        ("convert {stock} --out {new} --method anitime", "did you mean anytime?"),
        ("convert {stock} --out {stock}/config.json/x", "config.json is a file, not a folder"),
        ("convert {ada} --out {new} --iterations 3", "has this method already"),
        ("train cpu/demo --json {stock}/config.json/x", "config.json is a file, not a folder"),
        ("train cpu/demo --set data.sequence=100000", "exceeds model.backbone.max_position_embeddings"),
        ("sweep cpu/demo", "--grid is missing"),
        ("eval {ada} --data x --tasks sciq", "one of --data"),
        ("eval {ada} --data x --depths 9", "--depths"),
        ("eval x --data=", "--data is empty"),
        ("compare {ada} {ada} --data x --profile-b none", "--profile-b none"),
        ("compare {ada} {ada} --data x --profile-b n --policy-b fixed:1", "--policy-b and"),
        ("compare {ada} {ada} --data x --max-iterations-b 9", "--max-iterations-b 9"),
        ("policies {ada}", "--data"),
        ("policies nothing.json", "not a result"),
        ("calibrate {ada} --budget 2", "--data"),
        ("calibrate {ada} --data x", "--budget"),
        ("ponder", "ponder"),
        ("bench decode --device cuda", "python -m benchmarks decode"),
        ("reproduce decode --device cuda", "python -m experiments"),
    ],
)
def test_a_wrong_value_is_one_line_that_names_its_option(command, stock, checkpoint, tmp_path, arguments, field):
    words = arguments.format(ada=checkpoint, stock=stock, new=tmp_path / "new").split()
    code, _, error = command(*words)
    assert (code, len(error.splitlines())) == (2, 1)
    assert field in error
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("raised", "code", "words"),
    [
        (OSError(28, "No space left on device"), 1, "error: [Errno 28] No space left on device\n"),
        (MemoryError(), 1, "error: out of memory:\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (type("PanicException", (BaseException,), {})("a\nb"), 1, "error: a native library failed: a b\n"),
    ],
)
def test_a_full_disk_a_panic_and_an_interruption_are_one_line(command, monkeypatch, raised, code, words):
    monkeypatch.setattr("adaponder.conversion.open.load", Mock(side_effect=raised))
    ended, _, error = command("generate", "x", "--prompt", "x")
    assert (ended, error) == (code, words)


def test_the_demo_trains_assesses_and_writes_how_to_go_on(monkeypatch, shards, tmp_path, capsys):
    train = {"steps": 6, "ponder_start": 2, "ponder_full": 4, "eval_tokens": 256, "eval_every": 0, "save_every": 0}
    small = [f"data.source={shards}", "data.sequence=32", "model.backbone.max_position_embeddings=256"]
    small += ["model.backbone.hidden_size=32", "model.backbone.intermediate_size=64"]
    small += [f"train.{name}={value}" for name, value in train.items()]
    result = demo.demo(out=tmp_path / "runs" / "demo", overrides=small)
    output = capsys.readouterr().out
    assert "read  1x" not in output, "a key of colours where there are none"
    assert "token frequencies alone" in output
    shares = re.findall(r"^(\d)x +([\d.]+)%$", output[output.index("How often tokens were read") :], flags=re.MULTILINE)
    assert [depth for depth, _ in shares] == ["1", "2", "3", "4"]
    assert sum(float(share) for _, share in shares) == pytest.approx(100, abs=0.3), "no token counts twice"
    assert result["forced"][-1] == pytest.approx(result["validation_loss"], abs=0.05)
    assert result["unigram"] < result["uniform"]
    trained, sample = result["beside"]
    assert trained["bytes"] == sample["bytes"]
    assert sample["bits_per_byte"] < 0.5 * trained["bits_per_byte"], "six steps against three thousand"
    assert 1.5 < sample["depth"] < 3.5
    assert "adaponder generate" in (tmp_path / "runs" / "demo" / "README.md").read_text()
    monkeypatch.setattr(demo, "compare_with_sample", lambda final: result["beside"])
    monkeypatch.setattr(demo, "puzzle", lambda seed: {"by_need": result["puzzles"]})
    assert demo.demo(out=tmp_path / "runs" / "demo", overrides=small) == result, "a finished run is looked at again"
    assert "finished: " in capsys.readouterr().out


def test_a_budget_found_on_one_half_is_a_profile_everywhere(checkpoint, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("\n".join(f"def function_{i}(x): return x + {i * 37}" for i in range(60)))
    common = ["--data", str(text), "--window", "64", "--max-tokens", "1000"]
    shown("calibrate", str(checkpoint), "--budget", "2.0", "--name", "half", *common)
    assert "half" in shown("calibrate", str(checkpoint), "--list")
    shown("eval", str(checkpoint), "--profile", "half", *common, "--json", str(tmp_path / "eval.json"))
    (row,) = json.loads((tmp_path / "eval.json").read_text())["rows"]
    assert row["cost"]["iterations"] == pytest.approx(2.0, abs=0.25)
    shown("generate", str(checkpoint), "--prompt", "def", "--max-new-tokens", "3", "--profile", "half")
    shown("analyze", str(checkpoint), *common, "--profile", "half", "--only", "active", f"--out={tmp_path}/report")
    assert "Content-Security-Policy" in (tmp_path / "report" / "report.html").read_text()
