"""Python and curl of docs/serving.md run as written, and the container file starts a command that parses."""

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from typer.main import get_command

from adaponder.cli import app
from adaponder.serving.protocol import Generation
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
    def answer(line: str) -> str:
        command = [*shlex.split(line.replace(ADDRESS, address)), "--noproxy", "*"]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout

    lines = "\n".join(blocks("bash")).replace("\\\n", " ").splitlines()
    streamed, scored, cut = (answer(line) for line in lines if line.startswith("curl "))
    assert streamed.endswith("data: [DONE]\n\n")
    assert '"depth"' in streamed
    assert {"nll", "depth", "gates", "full_nll"} <= set(json.loads(scored)["tokens"][1])
    assert json.loads(cut)["count"] == len(json.loads(cut)["tokens"]) > 0


def test_every_field_of_the_extension_is_on_the_page():
    assert not [name for name in Generation.model_fields if f"`{name}`" not in TEXT]


def test_the_container_runs_what_the_command_line_takes_without_rights():
    lines = dict(re.findall(r"^(ENTRYPOINT|CMD|USER) (.+)$", CONTAINER, flags=re.MULTILINE))
    assert json.loads(lines["ENTRYPOINT"]) == ["adaponder", "serve"]
    context = get_command(app).commands["serve"].make_context("serve", json.loads(lines["CMD"]))
    assert context.params["host"] == "0.0.0.0"
    assert context.params["api_key_file"]
    assert not context.params["no_auth"]
    assert lines["USER"] != "root"
    copied = re.findall(r"^COPY (.+) \S+$", CONTAINER, flags=re.MULTILINE)
    assert not [name for line in copied for name in line.split() if not (ROOT / name).exists()]
