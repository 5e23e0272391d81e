"""What the README shows is run: its Python as written, its commands as far as parsing."""

import re
import shlex
from pathlib import Path

import pytest
import transformers
from typer.main import get_command

from adaponder.cli import app
from adaponder.integrations import PonderCallback
from support import ids, stock

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
COMMANDS = re.findall(r"^adaponder (.+?)(?:\s+#.*)?$", README, flags=re.MULTILINE)


def test_the_python_of_the_readme_runs(monkeypatch, tmp_path):
    blocks = re.findall(r"```python\n(.+?)```", README, flags=re.DOTALL)
    assert len(blocks) == 2
    encoded = transformers.BatchEncoding({"input_ids": ids(1, 6)})
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", lambda name: stock())
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda name: lambda text, **how: encoded)
    begun = []
    monkeypatch.setattr(transformers.Trainer, "train", lambda trainer: begun.append(trainer))
    monkeypatch.chdir(tmp_path)
    rows = [{"input_ids": row, "labels": row} for row in ids(2, 6)]
    exec("".join(blocks), {"dataset": rows})
    assert any(isinstance(one, PonderCallback) for one in begun[0].callback_handler.callbacks)


@pytest.mark.parametrize("line", COMMANDS)
def test_the_commands_of_the_readme_parse(line):
    name, *arguments = shlex.split(line)
    command = get_command(app).commands[name]
    command.make_context(name, arguments)


def test_what_the_first_commands_read_is_there_in_a_fresh_clone():
    """What ``make demo`` left, what a line before it made, or a file of the checkout."""
    block = README[README.index("On a CPU, nothing downloaded") :].split("```")[1]
    made = {"runs/demo", "data/stdlib-train-bpe-2048"}
    for line in re.findall(r"^adaponder (.+?)(?:\s+#.*)?$", block, flags=re.MULTILINE):
        words = shlex.split(line)
        taken = {word for word, before in zip(words[1:], words, strict=False) if before == "--data"}
        taken |= {word.partition("=")[2] for word in words if word.startswith("data.source=")}
        taken |= (
            {words[1]} if words[0] in ("prepare", "eval", "policies", "calibrate", "analyze", "generate") else set()
        )
        for path in taken - made:
            assert (ROOT / path).exists(), f"adaponder {line}: there is no {path}"
        made |= {word for word, before in zip(words[1:], words, strict=False) if before == "--out"}


def test_the_readme_shows_every_command_and_every_file_of_the_house():
    assert {line.split()[0] for line in COMMANDS} | {"demo"} == set(get_command(app).commands)
    source = ROOT / "src" / "adaponder"
    shown = README[README.index("## The house") :]
    for path in source.iterdir():
        if path.name not in ("__init__.py", "__main__.py", "__pycache__", "errors.py", "py.typed", "version.py"):
            assert path.name in shown or path.name + "/" in shown, path.name
