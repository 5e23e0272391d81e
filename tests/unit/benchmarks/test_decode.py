"""benchmarks decode: depths have their means, limits count the bytes that move, and a row that fails stops no other."""

import json

import pytest
import torch

from adaponder.conversion.open import describe
from adaponder.errors import InputError
from bench_support import invoke
from bench_support import measured as run_command
from benchmarks import decode, decode_cases, decode_sides
from benchmarks.decode import COLUMNS
from benchmarks.decode_cases import DecodeCase
from benchmarks.decode_sides import as_row, limit, tick_bytes
from benchmarks.models import SHARES, draw_depths, shape_config, shares_of
from harness_support import reader, words
from looped_support import OURO

QUICK = ("--trust", "--no-record", "--warmup", "0", "--repeats", "2", "--tokens", "3", "--commit", "abc")


def measured(*arguments: str, tmp_path) -> dict:
    return run_command("decode", *QUICK, *arguments, folder=tmp_path)


def test_shares_have_the_mean_they_are_named_by():
    for mean in (1.0, 1.3, 2.0, 3.0, 3.5, 3.7, 4.0):
        shares = shares_of(mean)
        assert sum(shares) == pytest.approx(1)
        assert sum(depth * share for depth, share in enumerate(shares, start=1)) == pytest.approx(mean)
    assert shares_of(2.0) == SHARES[2.0] == (0.4, 0.3, 0.2, 0.1)


def test_drawn_depths_are_in_exact_shares_and_random_order():
    depths = draw_depths(SHARES[2.0], 1000, seed=3)
    assert [depths.count(depth) for depth in (1, 2, 3, 4)] == [400, 300, 200, 100]
    assert depths == draw_depths(SHARES[2.0], 1000, seed=3) != draw_depths(SHARES[2.0], 1000, seed=4)
    assert depths != sorted(depths)
    assert len(draw_depths(SHARES[3.7], 7, seed=0)) == 7


def test_one_stream_moves_k_bodies_k_heads_and_k_minus_one_tables():
    config = shape_config("410m")
    body, table = 24 * 12 * 1024**2, 50304 * 1024
    gate, kv = 4 * 1024**2 + 4 * 1024, 2 * 24 * 1024
    moved = tick_bytes(config, SHARES[4.0], lanes=1, context=200, dtype=torch.bfloat16)
    token = 2 * (4 * body + 4 * table + 3 * table + 3 * gate + 4 * 201 * kv)
    assert 4 * sum(moved.values()) == pytest.approx(token)
    rate = limit(config, SHARES[4.0], lanes=1, context=200, dtype=torch.bfloat16, copy_rate=4.26e12)
    assert rate == pytest.approx(4.26e12 / token)
    assert 1200 < rate < 1400


def test_a_method_that_mixes_no_vocabulary_reads_its_head_once_a_token():
    config = shape_config("ouro-1.4b")
    moved = tick_bytes(config, SHARES[4.0], lanes=1, context=8, dtype=torch.bfloat16)
    assert 4 * moved["head"] == pytest.approx(49152 * 2048 * 2)
    assert moved["table"] == 0


def test_cases_are_told_apart_and_hold_what_the_aims_are_stated_for():
    every = decode_cases.cases(["70m", "410m"], list(SHARES), **decode_cases.ON_GPU)
    names = [case.name for case in every]
    assert len(set(names)) == len(names)
    assert {case.lanes for case in every if case.side == "engine"} >= {1, 4, 16, 64, 256}
    assert {case.depth for case in every if case.side == "engine"} == {4.0, 3.7, 3.0, 2.0, 1.0}
    few = decode_cases.subset_cases(["70m", "410m"])
    assert {case for case in few if case.kind == "steady"} <= set(every)
    assert DecodeCase("engine", "70m", 1, 128) in few
    assert DecodeCase("engine", "410m", 64, 512, 3.7) in few
    assert {(case.context, case.new) for case in decode_cases.served()} == {(1024, 128)}
    assert len(decode_cases.served()) == 3 * 4 + 4


def test_a_case_that_fails_is_a_row_and_the_rest_goes_on():
    chosen = [DecodeCase("engine", "tiny", lanes, 8) for lanes in (1, 2, 3)]

    def measure(case: DecodeCase) -> dict:
        if case.lanes == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate\nmuch")
        if case.lanes == 2:
            raise TypeError("no such option")
        return as_row([10.0, 12.0, 11.0], resident_lanes=3, shares=(0.5, 0.5))

    rows = [decode.row_of(case, measure) for case in chosen]
    assert [row["works"] for row in rows] == [False, False, True]
    assert [COLUMNS["tokens/s"](row) for row in rows] == ["out of memory", "failed", "11"]
    assert all(isinstance(cell(row), str) for row in rows for cell in COLUMNS.values())
    assert rows[1]["problem"] == "no such option"
    assert rows[2]["mean_depth"] == 1.5
    with pytest.raises(KeyError):
        decode.row_of(chosen[0], lambda case: {}["a mistake of ours"])


def test_speeds_are_relative_to_the_engine_at_full_depth_without_drafting():
    def row(side: str, depth: float | None, speed: float, lanes: int = 64) -> dict:
        case = DecodeCase(side, "410m", lanes, 512, depth)
        return decode.row_of(case, lambda _: as_row([speed], resident_lanes=lanes))

    rows = [row("engine", 4.0, 100), row("engine", 2.0, 195), row("drafting", 4.0, 250), row("portable", 4.0, 5)]
    rows += [row("engine", 2.0, 5, lanes=1), row("engine", None, 100), row("drafting", None, 140)]
    decode.compare(rows)
    assert [row["times_engine"] for row in rows] == [1.0, 1.95, 2.5, None, None, 1.0, 1.4]


@pytest.mark.every
def test_the_record_has_every_figure_of_every_row(tmp_path):
    found = measured("--lanes=2", "--contexts=6", "--depths=4,2", "--only=engine", "--only=portable", tmp_path=tmp_path)
    assert found["command"] == "bench decode"
    assert found["settings"]["shares"]["2"] == list(SHARES[2.0])
    rows = {row["name"]: row for row in found["metrics"]["rows"]}
    stream = rows["tiny, engine, 2 lanes, context 6, depth 4"]
    assert stream["mean_depth"] == 4.0
    assert stream["resident_lanes"] == 2.0
    assert stream["tokens_per_second"] == pytest.approx(sum(stream["rates"]) / 2)
    assert stream["limit_share"] == pytest.approx(stream["tokens_per_second"] / stream["limit_tokens_per_second"])
    assert stream["first_token_seconds"]["p50"] > 0
    assert stream["between_tokens_seconds"]["p99"] >= stream["between_tokens_seconds"]["p50"] > 0
    assert stream["kv_rows"] >= 2 * 4 * 6
    halted = rows["tiny, engine, 2 lanes, context 6, depth 2"]
    assert 1 < halted["mean_depth"] < 3
    assert rows["tiny, portable, 2 lanes, context 6, depth 4"]["tokens_per_second"] > 0
    memory = [row for row in rows.values() if row["kind"] == "memory"]
    assert len(memory) == 2
    assert all(row["works"] and row["limit_share"] is None for row in memory)
    assert halted["times_engine"] == halted["tokens_per_second"] / stream["tokens_per_second"]


def test_the_shape_of_ouro_is_that_of_its_release(tmp_path):
    """In sizes, and in the layers that it opens as: norms after attention and after the MLP, no multipliers."""
    sizes = {"vocab_size": 49152, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24}
    sizes |= {"num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 128, "max_position_embeddings": 65536}
    (tmp_path / "config.json").write_text(json.dumps(OURO | sizes | {"layer_types": None}))
    published, shape = (
        config.backbone_config.to_dict() for config in (describe(str(tmp_path)), shape_config("ouro-1.4b"))
    )
    ignored = {"dtype", "bos_token_id", "eos_token_id", "pad_token_id"}
    assert {name for name in published if published[name] != shape[name]} <= ignored
    assert shape["use_post_norm"]


@pytest.mark.every
def test_ouro_is_served_at_each_depth_and_rows_of_an_earlier_call_are_kept(tmp_path):
    every = ("--scenario=ouro", "--contexts=6")
    found = measured(*every, "--only=2 lanes, context 6, depth 2,", tmp_path=tmp_path)
    served, memory = rows = found["metrics"]["rows"]
    assert [row["kind"] for row in rows] == ["end to end", "memory"]
    assert all(row["works"] and 1 < row["mean_depth"] < 3 for row in rows), [row["problem"] for row in rows]
    assert 0 < served["resident_lanes"] <= 2
    assert 0 < memory["resident_lanes"] <= 6  # pages are longer than these sequences
    earlier = tmp_path / "earlier.json"
    earlier.write_text(json.dumps(found))
    again = measured(*every, "--only=2 lanes, context 6, depth 2", "--resume", str(earlier), tmp_path=tmp_path)
    kept = {row["name"]: row["rates"] for row in again["metrics"]["rows"]}
    assert len(kept) == 4
    assert all(kept[row["name"]] == row["rates"] for row in rows)
    assert "times_engine" in again["metrics"]["rows"][0]
    for other in (("--commit=abd",), ("--repeats=3",)):
        result = invoke("decode", *QUICK, *every, "--only=depth 2,", "--resume", str(earlier), *other)
        assert isinstance(result.exception, InputError)
        assert "--resume" in str(result.exception)


def test_a_checkpoint_decides_its_own_depths(tmp_path):
    folder = tmp_path / "ada"
    reader().save_pretrained(folder)
    words().save_pretrained(folder)
    (tmp_path / "text.txt").write_text("The river ran past the mill. " * 40)
    asked = ("--checkpoint", str(folder), "--data", str(tmp_path / "text.txt"), "--lanes=2", "--contexts=9")
    metrics = measured(*asked, tmp_path=tmp_path)["metrics"]
    for row in metrics["rows"]:
        assert row["works"], row["problem"]
        assert row["depth"] is None
        assert 1 <= row["mean_depth"] <= 3
    plain, drafting = metrics["rows"]
    assert plain["accepted_share"] is None
    assert 0 <= drafting["accepted_share"] <= 1
    assert drafting["times_engine"] == drafting["tokens_per_second"] / plain["tokens_per_second"]


def test_hugging_face_decodes_the_plain_shape(monkeypatch):
    monkeypatch.setattr(decode_sides, "OUTSIDE", dict.fromkeys(decode_cases.OUTSIDE, 4))
    how = {"warmup": 0, "repeats": 1, "part": 2}
    sides = decode_sides.Sides(torch.device("cpu"), torch.float32, 0, 1e9, how)
    for side in (decode_cases.HF, decode_cases.HF_COMPILED, decode_cases.VANILLA):
        row = sides.measure(DecodeCase(side, "tiny", 2, 6, 1.0))
        assert row["tokens_per_second"] > 0
        assert row["mean_depth"] == 1.0
