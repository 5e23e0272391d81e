"""What docs/serving.md and the container file show is run: Python and curl as written, commands as far as parsing."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from typer.main import get_command

from adaponder.cli import app
from adaponder.serving.served import Served
from harness_support import reader, words
from serving_support import serving

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "docs" / "serving.md").read_text()
CONTAINER = (ROOT / "deploy" / "Containerfile").read_text()
ADDRESS = "http://127.0.0.1:8000"


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.+?)^```", TEXT, flags=re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def address():
    with serving(Served(reader(), words(), name="sample")) as running:
        yield running.address


def test_the_python_of_the_page_runs(address, capsys):
    code = "\n".join(blocks("python"))
    assert code.count(ADDRESS) == 1
    exec(code.replace(ADDRESS, address), {})
    assert len(capsys.readouterr().out.splitlines()) > 8


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl here")
def test_the_curl_lines_of_the_page_run(address):
    lines = [line for line in "\n".join(blocks("bash")).replace("\\\n", " ").splitlines() if line.startswith("curl ")]
    assert len(lines) == 3
    answers = []
    for line in lines:
        command = shlex.split(line.replace(ADDRESS, address))
        done = subprocess.run([*command, "--noproxy", "*"], capture_output=True, text=True, check=True, timeout=60)
        answers.append(done.stdout)
    streamed, scored, cut = answers
    assert streamed.endswith("data: [DONE]\n\n")
    assert '"depth"' in streamed
    assert {"nll", "depth", "gates", "full_nll"} <= set(json.loads(scored)["tokens"][1])
    assert json.loads(cut)["count"] == len(json.loads(cut)["tokens"]) > 0


def test_the_commands_of_the_page_parse():
    lines = re.findall(r"^adaponder (.+?)(?:\s+#.*)?$", TEXT, flags=re.MULTILINE)
    assert len(lines) >= 8
    for line in lines:
        name, *arguments = shlex.split(line)
        get_command(app).commands[name].make_context(name, arguments)


def test_every_field_of_the_extension_is_on_the_page():
    from adaponder.serving.protocol import Generation

    for name in Generation.model_fields:
        assert f"`{name}`" in TEXT, name


def test_paths_and_figures_of_the_page_are_there():
    for path in re.findall(r"`((?:benchmarks|tests|deploy)/[\w./-]+\.\w+|deploy/Containerfile)`", TEXT):
        assert (ROOT / path).exists(), path


def test_the_container_runs_what_the_command_line_takes_without_rights():
    entry = json.loads(re.search(r"^ENTRYPOINT (.+)$", CONTAINER, flags=re.MULTILINE).group(1))
    given = json.loads(re.search(r"^CMD (.+)$", CONTAINER, flags=re.MULTILINE).group(1))
    assert entry == ["adaponder", "serve"]
    context = get_command(app).commands["serve"].make_context("serve", given)
    assert context.params["host"] == "0.0.0.0"
    assert context.params["api_key_file"]
    assert not context.params["no_auth"]
    assert re.search(r"^USER (?!root)\w+$", CONTAINER, flags=re.MULTILINE)
    for line in re.findall(r"^COPY (.+) \S+$", CONTAINER, flags=re.MULTILINE):
        for name in line.split():
            assert (ROOT / name).exists(), name
