"""What the benchmarks' tests share: a tiny recipe and the command line."""

import json

from typer.testing import CliRunner

from adaponder.recipes import load_recipe
from benchmarks.__main__ import app
from support import SHAPE

TINY = [f"model.backbone.{name}={value}" for name, value in (SHAPE | {"vocab_size": 61}).items()]
TINY += ["model.iterations=3", "data.sequence=12"]
SET = [part for override in TINY for part in ("--set", override)]
QUICK = ["--trust", "--no-record", "--warmup", "0", "--repeats", "2"]


def tiny_recipe(*overrides: str):
    return load_recipe("cpu/demo", [*TINY, *overrides])


def invoke(*arguments: str):
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "180"})


def measured(*arguments: str, folder) -> dict:
    result = invoke(*arguments, "--json", str(folder / "out.json"))
    assert result.exit_code == 0, f"{result.output} {result.exception!r}"
    return json.loads((folder / "out.json").read_text()) | {"shown": result.output}
