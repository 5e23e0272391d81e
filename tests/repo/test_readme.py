"""What the documents show is run: Python as written, tables against records; commands are in tests/docs."""

import importlib
import json
import operator
import re
import subprocess
from fnmatch import fnmatch
from pathlib import Path

import pytest
import torch
import transformers
from typer.main import get_command

from adaponder.cli import app
from adaponder.integrations import PonderCallback
from support import ids, stock

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
USAGE = (ROOT / "docs" / "commands.md").read_text()
DESIGN = (ROOT / "docs" / "design.md").read_text()
BENCHMARKS = (ROOT / "benchmarks" / "README.md").read_text()


def commands_of(text: str) -> list[str]:
    """Returns the command lines of a document, without ``adaponder`` and comments."""
    return re.findall(r"^adaponder (.+?)(?:\s+#.*)?$", text, flags=re.MULTILINE)


def test_the_python_of_the_documents_runs(monkeypatch, tmp_path):
    blocks = re.findall(r"```python\n(.+?)```", README + USAGE, flags=re.DOTALL)
    assert len(blocks) == 2
    code = "".join(blocks).replace("max_new_tokens=50", "max_new_tokens=2")
    auto = transformers.AutoModelForCausalLM
    open_model = auto.from_pretrained
    hub = {"EleutherAI/pythia-70m": stock()}
    monkeypatch.setattr(auto, "from_pretrained", lambda name: hub.get(name) or open_model(name))
    begun = []
    monkeypatch.setattr(transformers.Trainer, "train", lambda trainer: begun.append(trainer))
    monkeypatch.chdir(tmp_path)
    rows = [{"input_ids": row, "labels": row} for row in ids(2, 6)]
    names = {"dataset": rows}
    exec(code, names)
    output = names["output"]
    depths = ", ".join(str(depth) for depth in output.depth[0].tolist())
    assert f"[batch, time]: {depths}\n" in README
    assert "lower half of all gates; for this model a gate counts 0 once its token has halted" in README
    reached = torch.arange(output.gates.shape[-1]) < output.depth[..., None]
    counted = (output.gates * reached).flatten().sort().values
    lower = counted[: len(counted) // 2].mean()
    assert output.loss.item() == pytest.approx((output.terms["cross_entropy"] + 0.1 * lower).item(), abs=1e-6)
    assert any(isinstance(one, PonderCallback) for one in begun[0].callback_handler.callbacks)


def test_the_first_screen_quotes_the_results():
    sentence = " ".join(README[README.index("**Does it work?**") :].split("\n\n")[0].split())
    results = (ROOT / "docs" / "results.md").read_text()
    (row,) = re.findall(r"^\| AdaPonder, K = 4 \|.+$", README, flags=re.MULTILINE)
    cost, gain = re.findall(r"([\d.]+)x .+? -([\d.]+) \[", row)[0]
    assert f"{gain} nats below" in sentence
    assert f"{cost}x its FLOPs" in sentence
    quoted = [
        r"AdaPonder, K = 4 minus PonderLM, K = 4: (\S+ \[.+?\])",
        r"iterations saved: \+(\S+ %)",
        r"FLOPs saved: \+(\S+ %)",
    ]
    for pattern in quoted:
        number = re.findall(pattern, results)[0]
        assert number in sentence, pattern


def test_every_command_is_documented_and_the_readme_s_are_on_the_full_page():
    moved = {"bench", "reproduce"}  # each says where it has moved
    assert {line.split()[0] for line in commands_of(USAGE)} == set(get_command(app).commands) - moved
    assert set(commands_of(README)) <= set(commands_of(USAGE))


def test_the_layout_lists_every_package_and_what_it_lists_is_there():
    layout = DESIGN[DESIGN.index("## Layout") :].partition("### Where is")[0]
    listed = set(re.findall(r"`([\w]+(?:\.py|/))`", layout))
    package = ROOT / "src" / "adaponder"
    code = {f"{path.name}/" for path in package.iterdir() if (path / "__init__.py").exists()}
    assert code <= listed
    assert all((package / name).exists() or (ROOT / name).exists() for name in listed)


def test_links_and_pictures_of_the_documents_lead_somewhere():
    for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"), ROOT / "CONTRIBUTING.md"):
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", path.read_text()):
            assert (path.parent / target).exists(), f"{path.name}: {target}"


def test_files_that_the_documents_name_are_there():
    """Sources and tests by the end of their path; records by their name (``*`` stands for any)."""
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    documents = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    documents += [ROOT / "benchmarks" / "README.md", ROOT / "experiments" / "README.md"]
    for document in documents:
        text = document.read_text()
        for name in re.findall(r"`([\w/.-]+\.py)`", text) + re.findall(r"`(?:[\w/]*records/)?([\w*.-]+\.json)`", text):
            if name.endswith(".json") and not re.search(r"-(h200|cpu)\.json$|^(mini|cpu|first|two)-", name):
                continue  # what a command writes
            assert any(fnmatch(path, f"*/{name}") or path == name for path in tracked), f"{document.name}: {name}"


WHERE = re.findall(
    r"^\| (.+?) \| `([\w/]+)\.py` \| (.+?) \|$",
    DESIGN[DESIGN.index("### Where is") :].partition("\n## ")[0],
    flags=re.MULTILINE,
)


@pytest.mark.parametrize(("what", "file", "names"), WHERE, ids=[what for what, *_ in WHERE])
def test_each_name_is_defined_in_the_file_that_the_design_page_names(what, file, names):
    module = importlib.import_module(f"adaponder.{file.replace('/', '.')}")
    assert (ROOT / "src" / "adaponder" / f"{file}.py").samefile(module.__file__)
    for name in re.findall(r"`([\w.]+)`", names):
        value = operator.attrgetter(name)(module)
        # Defined there, not merely imported.
        assert value.__module__ == module.__name__, name


VARIANTS = {
    "plain PonderLM": "plain",
    "plain PonderLM, compiled": "plain, compiled",
    "PonderLM, ours, compiled": "ponder, compiled",
    "AdaPonder, eager": "adaponder, eager",
    "AdaPonder, compiled": "adaponder, compiled",
    "… with `train.keep_logits`": "adaponder, compiled, logits kept",
    "… with `train.memory_budget=0.5`": "adaponder, compiled, memory budget 0.5",
    "… checkpointed": "adaponder, compiled, checkpointed",
    "… with `train.cuda_graphs`": "adaponder, compiled, CUDA graphs",
    "… with `keep_logits` and `cuda_graphs`": "adaponder, compiled, logits kept, CUDA graphs",
    "… packed documents": "adaponder, compiled, packed documents",
    "… left padding": "adaponder, compiled, left padding",
    "dense, compiled": "dense, compiled",
    "compact (halted tokens skipped), compiled": "compact, compiled",
}


def table_after(mention: str) -> list[list[str]]:
    """Returns the cells, without headings, of the first table after ``mention`` in benchmarks/README.md."""
    table = BENCHMARKS[BENCHMARKS.index(mention) :].split("\n\n")[1]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def metrics_of(record: str) -> dict:
    return json.loads((ROOT / "benchmarks" / "records" / f"{record}.json").read_text())["metrics"]


def rows_of(record: str, key: str = "variant") -> dict[str, dict]:
    """Returns a benchmark record's rows by the name of their variant."""
    return {row[key]: row for row in metrics_of(record)["rows"]}


def gib(row: dict) -> str:
    return f"{row['peak_bytes'] / 2**30:.1f}"


def percent(share: float) -> str:
    return f"{share:.1%}".replace("%", " %")


def of_training(row: dict) -> list[str]:
    cells = [f"{row['tokens_per_second']:,.0f}", percent(row["spread"]), f"{row['times_plain']:.2f}", gib(row)]
    return [*cells, f"{row['memory_of_plain']:.2f}", percent(row["matmul_share"])]


def of_compiled(row: dict) -> list[str]:
    ratios = [f"{row[name]:.2f}" for name in ("times_plain", "times_compiled_plain")]
    cells = [f"{row['tokens_per_second']:,.0f}", percent(row["spread"]), *ratios, gib(row)]
    return [*cells, f"{row['memory_of_compiled_plain']:.2f}", percent(row["matmul_share"])]


def of_prefill(row: dict) -> list[str]:
    return [f"{1000 * row['median_seconds']:.1f}", percent(row["spread"]), f"{1 / row['times_compiled']:.2f}"]


@pytest.mark.parametrize(
    ("record", "count", "cells_of"),
    [("train-70m-h200", 6, of_training), ("train-410m-h200", 12, of_compiled), ("prefill-410m-h200", 3, of_prefill)],
)
def test_tables_of_speed_are_what_the_records_say(record, count, cells_of):
    rows, cells = rows_of(record), table_after(f"`records/{record}.json`")
    assert len(cells) == count
    assert {name: cells_of(rows[VARIANTS[name]]) for name, *_ in cells} == {name: shown for name, *shown in cells}


def test_the_table_of_training_with_halting_is_what_the_records_say():
    cells = table_after("`records/train-halting-410m-h200.json`")
    assert len(cells) == 8
    for name, *shown in cells:
        size, kind, *further = name.split(", ")
        metrics, rows = metrics_of(f"train-halting-{size.lower()}-h200"), rows_of(f"train-halting-{size.lower()}-h200")
        dense, compact = (", ".join(["adaponder, compiled", way, *further]) for way in ("dense", "compact"))
        dense = dense if dense in rows else "adaponder, compiled"  # as older records call it
        row, base = rows[compact if kind == "compact" else dense], rows[dense]["tokens_per_second"]
        speed, ponder = row["tokens_per_second"], rows["ponder, compiled"]["tokens_per_second"]
        by_flops = metrics["compact_over_dense_by_flops"] if kind == "compact" else 1
        expected = [f"{speed:,.0f}", percent(row["spread"]), f"{speed / base:.2f}", f"{by_flops:.2f}"]
        assert shown == [*expected, f"{speed / ponder:.2f}", gib(row)], name


def of_requests(row: dict) -> list[str]:
    lanes = "one stream" if row["lanes"] == 1 else f"{row['lanes']} lanes"
    seconds = row["first_token_seconds"]["p50"], row["between_tokens_seconds"]["p50"]
    cells = [f"{lanes}, equal memory" if row["kind"] == "memory" else lanes, f"{row['depth']:g}"]
    cells += [f"{row['tokens_per_second']:,.0f}", f"{1000 * seconds[0]:,.0f}", f"{1000 * seconds[1]:.1f}"]
    return [*cells, f"{row['resident_lanes']:.0f}", gib(row)]


def test_the_tables_of_decoding_are_what_the_records_say():
    rows = rows_of("decode-70m-410m-subset-h200", "name")
    cells = table_after("`records/decode-70m-410m-subset-h200.json`")
    assert len(cells) == sum(row["works"] for row in rows.values())
    for name, *shown in cells:
        row = rows[name]
        shares = [row["spread"], row["limit_share"], row["idle_share"]]
        spread, limit, idle = ("–" if share is None else percent(share) for share in shares)
        expected = [f"{row['tokens_per_second']:,.0f}", spread, limit, f"{row['resident_lanes']:.0f}", idle]
        assert shown == expected, name
    drafting = {(row["side"], row["lanes"]): row for row in metrics_of("decode-checkpoint-h200")["rows"]}
    for lanes, *shown in table_after("`records/decode-checkpoint-h200.json`"):
        plain, row = drafting["engine", int(lanes)], drafting["drafting", int(lanes)]
        speeds = plain["tokens_per_second"], row["tokens_per_second"]
        shares = [percent(row[name]) for name in ("accepted_share", "idle_share")]
        expected = [*(f"{speed:,.0f}" for speed in speeds), percent(row["spread"]), f"{speeds[1] / speeds[0]:.2f}"]
        assert shown == expected + shares, lanes
    served = [row for row in metrics_of("decode-ouro-h200")["rows"] if row["works"]]
    assert table_after("`records/decode-ouro-h200.json`") == [of_requests(row) for row in served]


def test_the_speeds_that_the_readme_quotes_are_those_of_the_tables():
    sentence = " ".join(README[README.index("**Speed**") :].split("\n\n")[0].split())
    large, small = (rows_of(f"train-{size}-h200")["adaponder, compiled"] for size in ("410m", "70m"))
    assert f"{large['times_compiled_plain']:.2f} times the tokens/s of a compiled plain PonderLM" in sentence
    assert f"in {large['memory_of_compiled_plain']:.2f} of its memory" in sentence
    assert f"at {large['times_plain']:.2f} times those of an eager one (70M: {small['times_plain']:.2f})" in sentence
    decoding = rows_of("decode-70m-410m-subset-h200", "name")
    stream = decoding["410m, engine, one stream, context 128, depth 4"]
    assert f"{stream['tokens_per_second']:,.0f} tokens/s in one stream" in sentence
    assert percent(stream["limit_share"]) in sentence.replace("\n", " ")
