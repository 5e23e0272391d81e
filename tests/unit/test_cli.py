"""The command line: what it prints, what it exits with, and that its errors name the field and the cure."""

import json
import math
import re
import subprocess
import sys
from dataclasses import replace

import pytest
import yaml
from typer.main import get_command
from typer.testing import CliRunner

from adaponder import __version__, cli, terminal
from adaponder.commands import demo, doctor, generate
from adaponder.commands.recipes import flat, show_recipe
from adaponder.errors import AdaPonderError
from adaponder.recipes import load_recipe, recipe_names
from stock_support import make_stock
from training_support import corpus, small


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cli") / "stock"
    make_stock(folder, seed=0)
    return folder


@pytest.fixture(scope="module")
def checkpoint(stock):
    out = stock.parent / "ada"
    result = CliRunner().invoke(cli.app, ["convert", str(stock), "--out", str(out), "--iterations", "3"])
    assert result.exit_code == 0, result.output
    return out


def run(monkeypatch, capsys, *arguments: str) -> tuple[int, str, str]:
    """(exit code, standard output, standard error) of the real entry point."""
    monkeypatch.setattr(sys, "argv", ["adaponder", *arguments])
    with pytest.raises(SystemExit) as end:
        cli.main()
    shown = capsys.readouterr()
    return int(end.value.code or 0), shown.out, shown.err


def test_help_teaches_every_command():
    result = CliRunner().invoke(cli.app, ["--help"])
    for name in get_command(cli.app).commands:
        assert name in result.output
        one = CliRunner().invoke(cli.app, [name, "--help"])
        assert one.exit_code == 0
        assert len(one.output) > 200
    assert "read up to K times" in " ".join(result.output.split())
    order = [result.output.index(f"│ {name} ") for name in ("demo", "train", "eval", "export")]
    assert order == sorted(order), "as a newcomer meets them"


COMMANDS = {name: one for name, one in get_command(cli.app).commands.items() if name not in cli.MOVED}


@pytest.mark.parametrize("name", COMMANDS)
def test_help_cuts_no_word_at_80_columns(name):
    shown = CliRunner().invoke(cli.app, [name, "--help"], env={"COLUMNS": "80"}).output
    whole = set(shown.replace("│", " ").split())
    for param in COMMANDS[name].params:
        told = {*(param.help or "").split(), *param.opts, *param.secondary_opts} - {param.name.upper(), param.metavar}
        if param.opts[0].startswith("--") and not param.hidden:
            assert not (cut := told - whole), f"{param.opts[0]}: {cut}"


@pytest.mark.parametrize(("name", "module"), [("bench", "benchmarks"), ("reproduce", "experiments")])
def test_a_command_that_moved_out_says_where_to(monkeypatch, capsys, name, module):
    code, _, error = run(monkeypatch, capsys, name, "decode", "--device", "cuda")
    assert code == 2
    assert f"python -m {module}" in error


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("eval", "x", "--batch-size", "0"), "--batch-size"),
        (("eval", "x", "--data="), "--data is empty"),
        (("eval", "x", "--tau", "nan"), "--tau"),
        (("generate", "x", "--top-p", "2"), "--top-p"),
        (("inspect",), "CKPT"),
        (("eval", "x", "--data", "x", "--depths", "two"), "--depths two must be whole numbers"),
    ],
)
def test_a_wrong_value_is_one_line_that_names_its_option(monkeypatch, capsys, words, said):
    code, _, error = run(monkeypatch, capsys, *words)
    assert code == 2
    assert said in error
    assert len(error.splitlines()) == 1


def test_help_is_quick():
    """No library that takes seconds to import is imported before a command needs it."""
    code = """
import sys
from typer.main import get_command
from typer.testing import CliRunner
from adaponder.cli import app
for path in ([], *([name] for name in get_command(app).commands)):
    result = CliRunner().invoke(app, [*path, "--help"])
    assert result.exit_code == 0, (path, result.output, result.exception)
heavy = ["torch", "transformers", "pandas", "matplotlib", "pyarrow", "numpy", "huggingface_hub", "yaml"]
print([name for name in heavy if name in sys.modules])
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (result.stdout.strip(), result.returncode) == ("[]", 0), result.stderr


def test_it_says_which_version_it_is():
    result = CliRunner().invoke(cli.app, ["--version"])
    assert (result.exit_code, result.output.strip()) == (0, f"adaponder {__version__}")


def test_recipes_can_be_copied_from_a_narrow_window():
    shown = CliRunner().invoke(cli.app, ["recipes"], env={"COLUMNS": "60"}).output.splitlines()
    for name in recipe_names():
        assert any(line.startswith(f"{name}  ") for line in shown), name
    assert any(line.startswith("    AdaPonderLM on Pythia-70M from scratch") for line in shown)


def test_a_recipe_is_shown_by_what_differs_from_its_base(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "60")
    overrides = ["train.steps=7", "train.compile=true"]
    show_recipe("mini/vanilla", load_recipe("mini/vanilla", overrides), overrides)
    shown = capsys.readouterr().out
    words = shown.split()
    assert "as mini/adaponder, but" in shown
    assert {"method=vanilla", "iterations=1", "ponder_weight=0.0", "steps=7"} <= set(words)
    assert "compile=True" in words  # as the base has it, but asked for
    assert not any(word.startswith(("lr=", "backbone.", "tokenizer=")) for word in words)
    show_recipe("mini/vanilla", load_recipe("mini/vanilla"), [], verbose=True)
    everything = capsys.readouterr().out.split()
    for key, value in flat(load_recipe("mini/vanilla")).items():
        assert f"{key.partition('.')[2]}={value}" in everything  # whole: never broken within
    show_recipe("cpu/demo", load_recipe("cpu/demo"), [])
    shown = capsys.readouterr().out.split()
    assert "backbone.hidden_size=128" in shown
    assert not any(word.startswith("weight_decay") for word in shown)  # the default


def test_one_recipe_is_shown_with_every_field_and_where_it_is_from(tmp_path):
    result = CliRunner().invoke(cli.app, ["recipes", "paper/adaponder-410m", "--json", str(tmp_path / "it.json")])
    shown = " ".join(result.output.split())
    assert "model.initial_multiplier=3.0 inferred: not stated; as PonderLM's release" in shown
    assert "model.embedding_scale=sqrt(d) release: PonderLM's scale_embeds" in shown
    assert "train.lr=0.0003 stated" in shown
    assert "code.gate_activation=gelu inferred" in shown
    assert json.loads((tmp_path / "it.json").read_text())["paper/adaponder-410m"]["train"]["steps"] == 50_000


def test_a_recipe_of_no_paper_says_whose_each_value_is(tmp_path):
    (tmp_path / "own.yaml").write_text("base: mini/vanilla\ntrain: {clip: 1.0, betas: [0.9, 0.95]}\n")
    result = CliRunner().invoke(cli.app, ["recipes", str(tmp_path / "own.yaml")], env={"COLUMNS": "120"})
    shown = " ".join(result.output.split())
    assert "train.betas=[0.9,0.95] this recipe" in shown  # stated, though it is the default
    assert "train.clip=1.0 this recipe" in shown  # stated, though it is the base's
    assert "model.method=vanilla from mini/vanilla" in shown
    assert "model.backbone.hidden_size=256 from mini/adaponder" in shown
    assert "train.execution=dense default" in shown


def test_the_module_runs_like_the_command():
    result = subprocess.run([sys.executable, "-m", "adaponder", "--help"], capture_output=True, text=True, check=True)
    assert "adaponder" in result.stdout


def test_convert_prints_the_proof_and_writes_it_down(stock, tmp_path):
    record = tmp_path / "convert.json"
    arguments = ["convert", str(stock), "--out", str(tmp_path / "out"), "--text", "def f(x):", "--json", str(record)]
    result = CliRunner().invoke(cli.app, arguments)
    assert result.exit_code == 0
    assert "one iteration equals the source" in result.output
    assert "gates start open" in result.output
    done = json.loads(record.read_text())
    assert done["checks"][0]["difference"] == 0
    assert len(done["losses"]) == 4


def test_generate_shows_depth_and_can_be_told_how_deep(checkpoint, tmp_path):
    record = tmp_path / "out.json"
    base = ["generate", str(checkpoint), "--prompt", "def f", "--max-new-tokens", "6", "--json", str(record)]
    CliRunner().invoke(cli.app, [*base, "--policy", "fixed:2"], catch_exceptions=False)
    done = json.loads(record.read_text())
    assert set(done["depths"][:-1]) == {2}
    assert done["depths"][-1] == 0, "the last token was never read"
    assert done["prompt"] == "def f"
    result = CliRunner().invoke(cli.app, [*base, "--max-iterations", "1"], catch_exceptions=False)
    assert "Mean depth 1.00 of 1" in result.output
    CliRunner().invoke(cli.app, [*base, "--tau", "0.99"], catch_exceptions=False)
    assert set(json.loads(record.read_text())["depths"][:-1]) == {1}


def test_generate_says_what_prompt_and_tokens_cost(checkpoint, tmp_path):
    record = tmp_path / "generated.json"
    arguments = ["generate", str(checkpoint), "--prompt", "def f(x):", "--max-new-tokens", "5", "--policy", "fixed:2"]
    result = CliRunner().invoke(cli.app, [*arguments, "--json", str(record)], env={"COLUMNS": "120"})
    assert "What it cost" in result.output
    found = json.loads(record.read_text())
    # The last token is never read.
    assert found["prefill"]["tokens"] + found["decode"]["tokens"] == len(found["tokens"]) - 1
    assert found["decode"]["iterations"] == found["prefill"]["iterations"] == 2.0
    assert found["decode"]["tokens"] == 4
    assert found["decode"]["flops"]["attention"] > found["prefill"]["flops"]["attention"]


def test_generate_follows_the_seed(checkpoint, tmp_path):
    texts = []
    for seed in ("1", "1", "2"):
        record = tmp_path / "out.json"
        few = ["--max-new-tokens", "9", "--json", str(record)]
        CliRunner().invoke(
            cli.app, ["generate", str(checkpoint), "--prompt", "x", "--seed", seed, *few], catch_exceptions=False
        )
        texts.append(json.loads(record.read_text())["text"])
    assert texts[0] == texts[1] != texts[2]


def test_temperature_0_is_greedy(checkpoint, tmp_path):
    texts = []
    for how in (["--temperature", "0", "--seed", "1"], ["--greedy", "--seed", "2"]):
        record = tmp_path / "out.json"
        asked = ["generate", str(checkpoint), "--prompt", "x", "--max-new-tokens", "9", "--json", str(record)]
        CliRunner().invoke(cli.app, [*asked, *how], catch_exceptions=False)
        texts.append(json.loads(record.read_text())["text"])
    assert texts[0] == texts[1]


def test_rows_of_drafts_are_counted_in_words_that_fit_a_window(checkpoint, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    (done,) = generate.generate(checkpoint=str(checkpoint), prompt="x", max_new_tokens=3)
    for rows, said in ((1, "Not counted: 1 row of drafted"), (2, "Not counted: 2 rows of drafted")):
        capsys.readouterr()
        generate.show([replace(done, dropped_rows=rows)], colours=True)
        shown = capsys.readouterr().out
        assert said in shown
        assert max(map(len, shown.splitlines())) <= 80


def test_a_result_on_standard_output_stands_there_alone(monkeypatch, capsys, checkpoint, tmp_path):
    record, asked = tmp_path / "out.json", ["generate", str(checkpoint), "--prompt", "def f", "--max-new-tokens", "6"]
    code, shown, _ = run(monkeypatch, capsys, *asked, "--json", str(record))
    assert code == 0
    code, out, err = run(monkeypatch, capsys, *asked, "--json", "-")
    assert code == 0
    written, printed = json.loads(record.read_text()), json.loads(out)
    assert written.keys() == printed.keys()
    assert all(written[key] == printed[key] for key in ("text", "depths"))
    assert err.splitlines()[0] == shown.splitlines()[0], "what was on standard output is on standard error"
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


def test_every_command_but_serve_has_json():
    assert {name for name, one in COMMANDS.items() if not any(p.name == "json" for p in one.params)} == {"serve"}


def test_help_says_which_texts_come_with_the_package_and_what_another_tau_is():
    for name in ("eval", "compare"):
        shown = " ".join(CliRunner().invoke(cli.app, [name, "--help"], env={"COLUMNS": "200"}).output.split())
        assert "sample, hops:seed=3" in shown
    assert "gate:0.1 is another tau" in shown


def test_a_plain_checkpoint_generates_as_vanilla(stock):
    result = CliRunner().invoke(cli.app, ["generate", str(stock), "--prompt", "def", "--max-new-tokens", "3"])
    assert result.exit_code == 0
    assert "Mean depth 1.00 of 1" in result.output


def test_inspect_counts_parameters_and_cost(checkpoint, tmp_path):
    record = tmp_path / "inspect.json"
    result = CliRunner().invoke(cli.app, ["inspect", str(checkpoint), "--json", str(record)])
    assert result.exit_code == 0
    assert "added by the method" in result.output
    found = json.loads(record.read_text())
    assert found["parameters"]["added"] == 2 * (4 * 128 * 128 + 4 * 128 + 4 * 128 + 1)
    assert [round(depth["ratio"]) for depth in found["depths"]] == [1, 2, 3]


def test_doctor_says_what_is_there(tmp_path, monkeypatch):
    record = tmp_path / "doctor.json"
    result = CliRunner().invoke(cli.app, ["doctor", "--json", str(record)])
    assert result.exit_code == 0
    found = json.loads(record.read_text())
    assert found["versions"]["torch"]
    assert found["devices"][0]["name"] == "cpu"
    ops = {"compact_attention", "ledger_attention", "linear_cross_entropy", "vocab_expectation"}
    ops |= {"row_gates", "row_linear", "row_vocabulary", "lanes", "next_token"}
    assert {kernel["op"] for kernel in found["kernels"]} == ops
    assert {doctor.would_run(op, "cpu") for op in ops} == {"torch (reference)"}
    monkeypatch.setattr("adaponder.ops.dispatch.HAS_TRITON", True)
    assert all("Triton kernels" in doctor.would_run(op, "cuda:0") for op in ops)
    monkeypatch.setattr("adaponder.ops.dispatch.HAS_TRITON", False)
    assert all("not installed" in doctor.would_run(op, "cuda:0") for op in ops)


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["generate", "{ada}", "--prompt", ""], 2, "--prompt"),
        (["generate", "{ada}", "--prompt", "x", "--policy", "wild:1"], 2, "--policy"),
        (["generate", "{ada}", "--prompt", "x", "--policy", "fixed:many"], 2, "--policy"),
        (["generate", "{ada}", "--prompt", "x", "--tau", "0.1", "--policy", "fixed:1"], 2, "--tau"),
        (["generate", "{ada}", "--prompt", "x", "--tau", "1.5"], 2, "tau"),
        (["generate", "{ada}", "--prompt", "x", "--max-iterations", "9"], 2, "--max-iterations 9"),
        (["generate", "{ada}", "--prompt", "x", "--temperature", "-1"], 2, "temperature"),
        (["generate", "{ada}", "--prompt", "x", "--max-new-tokens", "1000000000"], 2, "max_new_tokens"),
        (["generate", "{ada}", "--prompt", "x", "--device", "abacus"], 2, "--device"),
        (["generate", "{ada}", "--prompt", "x", "--dtype", "int3"], 2, "--dtype"),
        (["generate", "{ada}", "--prompt", "x", "--interactive"], 2, "--prompt has no effect"),
        (["generate", "{ada}", "--prompt-file", "x", "--interactive"], 2, "--prompt-file has no effect"),
        (["generate", "{ada}", "--prompt", "x", "--policy", "fixed:9"], 2, "policy=fixed:9"),
        (["generate", "./nowhere", "--prompt", "x"], 2, "nowhere"),
        (["inspect", "{ada}", "--context", "100000"], 2, "--context"),
        (["convert", "{stock}", "--out", "{stock}"], 2, "--out"),
        (
            ["convert", "{stock}", "--out", "{new}", "--method", "magic"],
            2,
            "'magic' is not one of adaponder,",
        ),
        (["convert", "{stock}", "--out", "{new}", "--method", "magic"], 2, "vanilla, backbone"),
        (["convert", "{stock}", "--out", "{stock}/config.json/x"], 2, "config.json is a file, not a folder"),
        (["train", "cpu/demo", "--out", "{stock}/config.json/x"], 2, "config.json is a file, not a folder"),
        (["train", "cpu/demo", "--json", "{stock}/config.json/x"], 2, "config.json is a file, not a folder"),
        (["compare", "{ada}", "{ada}", "--data", "x", "--profile-b", "none"], 2, "--profile-b none"),
        (["compare", "{ada}", "{ada}", "--data", "x", "--policy-a", "wild:1"], 2, "--policy-a wild:1"),
        (
            ["compare", "{ada}", "{ada}", "--data", "x", "--profile-b", "n", "--policy-b", "fixed:1"],
            2,
            "--policy-b and",
        ),
        (["compare", "{ada}", "{ada}", "--data", "x", "--max-iterations-b", "9"], 2, "--max-iterations-b 9"),
        (["convert", "{stock}", "--out", "{new}", "--iterations", "0"], 2, "iterations"),
        (["convert", "{ada}", "--out", "{new}", "--iterations", "2"], 2, "--iterations 2"),
        (["convert", "{ada}", "--out", "{new}", "--iterations", "3"], 2, "is that already"),
        (["train", "cpu/demo", "--set", "data.sequence=100000"], 2, "exceeds model.backbone.max_position_embeddings"),
        (["convert", "nobody/nothing", "--out", "{new}"], 1, "nobody/nothing"),
        (["convert"], 2, "SRC"),
        (["ponder"], 2, "ponder"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_wrong_use_exits_with_its_code_and_names_the_field(
    monkeypatch, capsys, stock, checkpoint, tmp_path, arguments, code, says
):
    places = {"ada": str(checkpoint), "stock": str(stock), "new": str(tmp_path / "new")}
    ended, _, error = run(monkeypatch, capsys, *(argument.format(**places) for argument in arguments))
    assert ended == code
    assert says.format(**places) in error
    assert "Traceback" not in error
    assert not (tmp_path / "new").exists()


HOSTILE = "x\x1b]0;owned\x07[/b]:smile:"


def test_prompt_and_paths_reach_the_terminal_as_text(monkeypatch, capsys, checkpoint, tmp_path):
    ended, shown, _ = run(
        monkeypatch, capsys, "generate", str(checkpoint), "--prompt", HOSTILE, "--max-new-tokens", "2"
    )
    assert ended == 0
    assert "x␛]0;owned" in shown
    assert "[/b]:smile:" in shown
    assert "\x1b" not in shown
    for arguments in (
        ["inspect", HOSTILE],
        ["convert", str(checkpoint), "--out", f"{checkpoint}/config.json/{HOSTILE}"],
    ):
        ended, _, error = run(monkeypatch, capsys, *arguments)
        assert ended in (1, 2)
        assert "[/b]:smile:" in error
        assert "\x1b" not in error
        assert len(error.splitlines()) == 1


def test_a_run_whose_name_looks_like_markup_trains_and_resumes(monkeypatch, capsys, tmp_path):
    fields = yaml.safe_load(
        small(corpus(tmp_path), "train.steps=2", "train.ponder_start=1", "train.ponder_full=2").to_yaml()
    )
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(fields))
    (tmp_path / "x[").mkdir()
    arguments = ("train", str(tmp_path / "tiny.yaml"), "--out", str(tmp_path / "x[/b]:smile:"), "--resume", "auto")
    for _ in range(2):
        ended, shown, error = run(monkeypatch, capsys, *arguments)
        assert ended == 0, error
        assert "x[/b]:smile:" in shown.replace("\n", "")


def test_a_disk_that_is_full_is_one_line(monkeypatch, capsys, checkpoint):
    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("adaponder.conversion.open.load", full)
    ended, _, error = run(monkeypatch, capsys, "generate", str(checkpoint), "--prompt", "x")
    assert (ended, error) == (1, "error: [Errno 28] No space left on device\n")


def test_interruption_exits_with_130(monkeypatch, capsys, checkpoint):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("adaponder.conversion.open.load", interrupted)
    ended, _, error = run(monkeypatch, capsys, "generate", str(checkpoint), "--prompt", "x")
    assert (ended, error) == (130, "interrupted\n")


def test_the_demo_trains_assesses_and_writes_how_to_go_on(tmp_path, capsys):
    shards = corpus(tmp_path)
    small = [
        f"data.source={shards}",
        "data.sequence=32",
        "train.steps=6",
        "train.ponder_start=2",
        "train.ponder_full=4",
        "train.eval_tokens=256",
        "train.eval_every=0",
        "train.save_every=0",
        "model.backbone.max_position_embeddings=256",
    ]
    found = demo.demo(out=tmp_path / "runs" / "demo", overrides=small)
    shown = capsys.readouterr().out
    assert "token frequencies alone" in shown
    shares = re.findall(r"^(\d)x +([\d.]+)%$", shown[shown.index("How often tokens were read") :], flags=re.MULTILINE)
    assert [depth for depth, _ in shares] == ["1", "2", "3", "4"]
    assert sum(float(share) for _, share in shares) == pytest.approx(100, abs=0.3), "no token counts twice"
    assert len(found["forced"]) == 4
    assert found["forced"][-1] == pytest.approx(found["validation_loss"], abs=0.05)
    assert found["unigram"] < found["uniform"]
    trained, sample = found["beside"]
    assert (trained["model"], sample["model"]) == ("just trained", "sample")
    assert trained["bytes"] == sample["bytes"]
    assert sample["bits_per_byte"] < 0.5 * trained["bits_per_byte"], "six steps against three thousand"
    assert 1.5 < sample["depth"] < 3.5
    assert "bytes of Python that neither was trained on" in shown
    readme = (tmp_path / "runs" / "demo" / "README.md").read_text()
    assert "adaponder generate" in readme
    assert demo.demo(out=tmp_path / "runs" / "demo", overrides=small) == found, "a finished run is looked at again"
    assert "finished: " in capsys.readouterr().out
    result = CliRunner().invoke(
        cli.app, ["generate", str(tmp_path / "runs" / "demo"), "--prompt", "the cat", "--max-new-tokens", "3"]
    )
    assert result.exit_code == 0


def test_depth_colours_grow_lighter_and_never_repeat():
    for deepest in (1, 2, 4, 7):
        styles = [terminal.depth_style(depth, deepest) for depth in range(1, deepest + 1)]
        assert len(set(styles)) == deepest
    assert terminal.depth_style(0, 4) == "dim"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("policies", "{checkpoint}"), "--data"),
        (("calibrate", "{checkpoint}", "--budget", "2"), "--data"),
        (("calibrate", "{checkpoint}", "--data", "x"), "--budget"),
        (("analyze", "{checkpoint}"), "--data is needed"),
        (("policies", "{checkpoint}", "--data", "x", "--budgets", "two"), "--budgets two"),
        (("eval", "{checkpoint}", "--data", "x", "--tasks", "sciq"), "one of --data"),
        (("generate", "{checkpoint}", "--prompt", "x", "--profile", "none"), "none"),
        (("policies", "nothing.json"), "not a result"),
        (("sweep", "cpu/demo"), "--grid is missing"),
    ],
)
def test_evaluation_commands_say_what_is_missing(checkpoint, arguments, says):
    result = CliRunner().invoke(cli.app, [argument.format(checkpoint=checkpoint) for argument in arguments])
    assert isinstance(result.exception, AdaPonderError), result.output
    assert says in str(result.exception)


def test_a_budget_found_on_one_half_is_a_profile_everywhere(checkpoint, tmp_path):
    """calibrate, list, eval, generate, analyze: the way of a budget through the commands."""
    text = tmp_path / "text.txt"
    text.write_text("\n".join(f"def function_{i}(x): return x + {i * 37}" for i in range(120)))
    common = ["--data", str(text), "--window", "64"]

    def run(*arguments: str):
        result = CliRunner().invoke(cli.app, list(arguments), env={"COLUMNS": "200"})
        assert result.exit_code == 0, result.output + str(result.exception)
        return result.output

    run("calibrate", str(checkpoint), "--budget", "2.0", "--name", "half", *common)
    assert "half" in run("calibrate", str(checkpoint), "--list")
    run("eval", str(checkpoint), "--profile", "half", *common, "--json", str(tmp_path / "eval.json"))
    (row,) = json.loads((tmp_path / "eval.json").read_text())["rows"]
    assert row["cost"]["iterations"] == pytest.approx(2.0, abs=0.25)
    run("generate", str(checkpoint), "--prompt", "def", "--max-new-tokens", "3", "--profile", "half")
    run("analyze", str(checkpoint), *common, "--profile", "half", "--only", "active", "--out", str(tmp_path / "report"))
    assert "Content-Security-Policy" in (tmp_path / "report" / "report.html").read_text()
