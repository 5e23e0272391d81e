"""docs/finetune.md: its commands and its Python run in order, at a small size; its table is what the record says."""

import json
import re
import runpy
import shlex
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from adaponder import AdaPonderForCausalLM, cli
from adaponder.recipes import load_recipe
from adaponder.training.build import with_method

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "finetune.md").read_text()
RECORD = json.loads((ROOT / "experiments" / "records" / "finetune-cpu.json").read_text())
# What makes a command take a second: one step, a few tokens.
SMALL = {
    "prepare": ["--workers", "1"],
    "train": [
        word
        for one in ("train.steps=1", "train.global_batch=2", "data.sequence=32", "train.eval_tokens=64")
        for word in ("--set", one)
    ],
    "compare": ["--max-tokens", "200", "--window", "32"],
    "generate": ["--max-new-tokens", "2"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    (folder / "tests").symlink_to(ROOT / "tests", target_is_directory=True)
    return folder


@pytest.mark.every
def test_the_commands_run_one_after_the_other(folder, monkeypatch):
    monkeypatch.chdir(folder)
    blocks = re.findall(r"```bash\n(.+?)```", PAGE, flags=re.DOTALL)
    run = []
    for block in blocks:
        for name, content in re.findall(r"^cat > (\S+) <<'END'\n(.+?)^END$", block, flags=re.DOTALL | re.MULTILINE):
            Path(name).write_text(content)
        for line in re.sub(r"^cat >.+?^END$", "", block, flags=re.DOTALL | re.MULTILINE).strip().splitlines():
            program, *words = shlex.split(line, comments=True)
            if program == "python":
                runpy.run_path(words[0])
            elif words[0] == "serve":
                get_command(cli.app).commands["serve"].make_context("serve", words[1:])
            else:
                result = CliRunner().invoke(cli.app, [*words, *SMALL[words[0]]])
                assert result.exit_code == 0, f"{line}\n{result.output}\n{result.exception}"
                run.append((words[0], result.output))
    asked = ["prepare", "train", "compare", "prepare", "train", "generate", "train", "train", "train"]
    assert [name for name, _ in run] == asked
    assert all("mean depth" in output for name, output in run if name == "train")


@pytest.mark.every  # what the commands before it left is read
def test_the_python_runs_and_leaves_a_checkpoint(folder, monkeypatch):
    monkeypatch.chdir(folder)
    (code,) = re.findall(r"```python\n(.+?)```", PAGE, flags=re.DOTALL)
    sizes = {"max_steps=60": "max_steps=1, report_to=[]", "batch_size=8": "batch_size=2"}
    sizes |= {"max_length=128": "max_length=48", 'split="train")': 'split="train").select(range(100))'}
    for written, small in sizes.items():
        assert code.count(written) == 1
        code = code.replace(written, small)
    exec(code, {})
    AdaPonderForCausalLM.from_pretrained(folder / "runs" / "sft-merged")
    assert (folder / "runs" / "sft-merged" / "chat_template.jinja").is_file()


def test_the_table_is_what_the_record_says():
    table = PAGE[PAGE.index("| recipe |") :].split("\n\n")[0].splitlines()[2:]
    assert len(table) == len(RECORD["runs"]) == 4
    for line, run in zip(table, RECORD["runs"], strict=True):
        before, after = run["before"], run["after"]
        shown = [cell.strip() for cell in line.strip("|").split("|")]
        expected = [f"`{run['recipe']}`", *(f"{one['validation_loss']:.4f}" for one in (before, after))]
        expected += [f"{one['validation_depth']:.2f}" for one in (before, after)]
        assert shown == [*expected, f"{run['cpu_seconds'] / 60:.1f}"]
        assert after["validation_loss"] < before["validation_loss"]
        assert with_method(load_recipe(run["recipe"])).fingerprint == run["recipe_hash"]
