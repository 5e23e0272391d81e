"""Scoring a text: every token once, the same loss whatever the batch, window or execution, and honest costs."""

import json
import math
import shutil
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from adaponder import Divergence, Entropy, FixedDepth, LearnedGate, cli
from adaponder.conversion.convert import convert
from adaponder.data import DataError
from adaponder.data.prepare import prepare
from adaponder.errors import InputError
from adaponder.evaluation import scoring
from adaponder.evaluation.meter import Meter, check_all
from adaponder.evaluation.scoring import ScoringOptions, agreement, default_length, score
from adaponder.evaluation.summary import paired_difference
from adaponder.evaluation.text import Windows, open_text, open_vocabulary
from adaponder.methods.cost import cost_of
from lab_support import made_up
from stock_support import make_stock
from support import HALTING, METHODS, VOCABULARY, tiny
from word_support import small_tokenizer

RECORDS = [("the cat sat", "books"), ("def f(x): return x", "code"), ("", "books"), ("naïve café 猫", "books")]


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    folder = tmp_path_factory.mktemp("evaluation") / "stock"
    make_stock(folder)
    return folder


@pytest.fixture(scope="module")
def ada(stock):
    convert(str(stock), stock.parent / "ada", method="adaponder", iterations=3, tau=0.982)
    return stock.parent / "ada"


@pytest.fixture(scope="module")
def records(stock):
    path = stock.parent / "records.jsonl"
    path.write_text("\n".join(json.dumps({"text": text, "source": source}) for text, source in RECORDS))
    return path


@pytest.mark.parametrize("prepared", [False, True])
def test_each_document_is_predicted_from_the_end_token_before_it(stock, records, tmp_path, prepared):
    words, data = open_vocabulary(str(stock)), records
    if prepared:
        data = tmp_path / "shards"
        prepare([str(records)], out=data, tokenizer=str(stock), validation=0.0, workers=1)
    text = open_text(str(data), words, whose="stock", split="train")
    documents = [(content, source) for content, source in RECORDS if content]
    assert text.sources == tuple(source for _, source in documents)
    assert text.utf8_bytes.tolist() == [len(content.encode()) for content, _ in documents]
    assert text.stream[0] == words.end_id
    for index, (content, _) in enumerate(documents):
        targets = text.stream[1:][text.document == index]
        assert words.tokenizer.decode(targets[:-1].tolist()) == content
        assert targets[-1] == words.end_id
        assert text.position[text.document == index].tolist() == list(range(len(targets)))


def test_repaired_text_is_reported(stock, tmp_path, capsys):
    (tmp_path / "[red]latin.txt").write_bytes("café\n".encode("latin-1") * 9)
    open_text(str(tmp_path / "[red]latin.txt"), open_vocabulary(str(stock)), whose="stock", max_tokens=1)
    assert "[red]latin.txt:documentswithinvalidUTF-8" in "".join(capsys.readouterr().err.split())


def test_foreign_tokens_and_empty_texts_are_refused(stock, records, tmp_path):
    words = open_vocabulary(str(stock))
    prepare([str(records)], out=tmp_path / "shards", tokenizer="train-bpe:300", validation=0.0, workers=1)
    with pytest.raises(DataError, match="tokenizer"):
        open_text(str(tmp_path / "shards"), words, whose="stock", split="train")
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(InputError, match=r"--data .*empty.txt"):
        open_text(str(tmp_path / "empty.txt"), words, whose="stock")
    prepare([str(records)], out=tmp_path / "all", tokenizer=str(stock), validation=0.0, workers=1)
    with pytest.raises(InputError, match="no text in its validation split; name the other with --split"):
        open_text(str(tmp_path / "all"), words, whose="stock")
    with pytest.raises(InputError, match="no such file"):
        open_text(str(tmp_path / "nowhere"), words, whose="stock")


@given(st.integers(1, 70), st.integers(1, 20), st.data())
def test_every_prediction_is_scored_exactly_once(predictions, length, data):
    stride = data.draw(st.none() | st.integers(1, length))
    size = data.draw(st.integers(1, 5))
    text = made_up((predictions,))
    seen = np.zeros(predictions, int)
    windows = Windows(length, stride)
    for batch in windows.batches(text, size):
        place = batch.index
        assert batch.input_ids.numpy().tolist() == text.stream[place].tolist()
        assert batch.targets.numpy().tolist() == text.stream[place + 1].tolist()
        np.add.at(seen, place[batch.fresh], 1)
        if stride is not None:
            # What is scored late in the text has at least length - stride tokens before it, itself read included.
            context = np.arange(batch.input_ids.shape[1])[None].repeat(len(place), 0)[batch.fresh] + 1
            assert (context >= np.minimum(place[batch.fresh] + 1, length - stride + 1)).all()
    assert (seen == 1).all()


@pytest.mark.parametrize("predictions", [17, 20, 21, 64, 99])
def test_sliding_windows_are_all_full(predictions):
    """Every prediction beyond the first window has at least ``length - stride`` tokens before it."""
    starts = Windows(16, 5).starts(predictions)
    assert starts[0] == 0
    assert starts[-1] + 16 == predictions
    assert ((np.diff(starts) > 0) & (np.diff(starts) <= 5)).all()


@pytest.mark.one_of(4)
@pytest.mark.parametrize("method", [name for name in METHODS if name not in ("act", "pondernet")])  # as ouro's
@pytest.mark.parametrize("windows", [Windows(16), Windows(16, 5), Windows(20, across_documents=False)], ids=str)
def test_scores_depend_neither_on_the_batch_nor_on_looking_closer(method, windows):
    model, text = tiny(method), made_up()
    one, many = (score(model, text, windows, batch_size=size) for size in (1, 7))
    close = score(model, text, windows, batch_size=4, detail=True)
    for other in (many, close):
        assert np.abs(one.nll - other.nll).max() < 1e-12
        assert one.depth.tolist() == other.depth.tolist()
    assert close.nll_by_iteration is not None
    last = np.minimum(close.depth, close.nll_by_iteration.shape[1]) - 1
    assert np.abs(close.nll_by_iteration[np.arange(len(last)), last] - close.nll).max() < 1e-12
    if method in HALTING:
        assert len(set(one.depth.tolist())) > 1


def test_half_precision_logits_are_scored_in_float32():
    model, text = tiny(dtype=torch.bfloat16), made_up((16,))
    scores = score(model, text, Windows(16), detail=True)
    ids = torch.from_numpy(text.stream[:17])[None]
    with torch.no_grad():
        output = model(ids[:, :-1])
    logits = output.logits[0]
    assert logits.dtype == torch.bfloat16
    assert scores.depth.tolist() == output.depth[0].tolist()
    log_p = logits.double().log_softmax(-1)
    assert np.abs(scores.nll + log_p[range(16), ids[0, 1:]].numpy()).max() < 1e-5
    assert np.abs(scores.nll_by_iteration[:, -1] - scores.nll).max() < 1e-12
    assert np.abs(scores.entropy[:, -1] + (log_p.exp() * log_p).sum(-1).numpy()).max() < 1e-5


def test_documents_alone_score_as_if_the_others_were_not_there():
    model, text = tiny(), made_up((30, 1, 20, 9))
    together = score(model, text, Windows(60, across_documents=False))
    for first, last in pairwise([*text.starts, text.predictions]):
        stream, starts = text.stream[first : last + 1], np.array([0])
        alone = score(model, replace(text, stream=stream, starts=starts, sources=("a",)), Windows(60))
        assert np.abs(together.nll[first:last] - alone.nll).max() < 1e-12


def test_a_window_that_does_not_fit_and_an_id_outside_the_vocabulary_are_refused():
    with pytest.raises(InputError, match="--window 65"):
        score(tiny(), made_up(), Windows(65))
    with pytest.raises(InputError, match="--stride 9"):
        Windows(8, 9)
    # A pause stands at its token's position: it takes no context away.
    assert default_length(tiny("pause")) == 64
    assert score(tiny("pause"), made_up(), Windows(64)).loss > 0
    text = made_up()
    text.stream[5] = VOCABULARY
    with pytest.raises(InputError, match="--tokenizer"):
        score(tiny(), text, Windows(16))


def test_the_meter_counts_what_the_depths_cost():
    model, text = tiny(), made_up((64,))
    scores = score(model, text, Windows(16))
    cost = scores.spent.cost
    assert cost == cost_of(torch.from_numpy(scores.depth.reshape(4, 16)), model.config, dtype=torch.float64)
    assert scores.spent.iterations == pytest.approx(scores.depth.mean())
    assert scores.spent.histogram == tuple(int((scores.depth == d).sum()) for d in (1, 2, 3))
    assert scores.spent.halted == pytest.approx((scores.depth < 3).mean())
    # A token of depth D has passed D - 1 of K - 1 gates open.
    assert scores.spent.gates_closed == pytest.approx((3 - scores.depth.mean()) / 2)


def test_dense_execution_pays_for_every_iteration_and_says_so():
    model, text = tiny(), made_up((64,))
    dense = score(model, text, Windows(16), how=ScoringOptions(execution="dense")).spent
    full = score(model, text, Windows(16), how=ScoringOptions(policy=FixedDepth(3))).spent
    assert dense.iterations < 3
    for part in ("rows", "body", "attention", "head", "expectation", "gates"):
        assert getattr(dense.cost, part) == getattr(full.cost, part) > 0, part
    assert dense.cost.kv_bytes < full.cost.kv_bytes


@pytest.mark.parametrize(
    ("execution", "policy", "times"),
    [
        ("compact", Entropy(math.inf), 1),  # everybody halts at once and is asked no more
        ("dense", Entropy(math.inf), 2),  # halted tokens are asked all the same
        ("compact", Divergence(0.0), 2),  # twice after the second iteration: its own logits and those before
    ],
    ids=lambda value: str(value),
)
def test_deciding_costs_the_logits_of_those_who_are_asked(execution, policy, times):
    model, text = tiny(), made_up((64,))
    asking = score(model, text, Windows(16), how=ScoringOptions(policy=policy, execution=execution))
    forced = score(model, text, Windows(16), how=ScoringOptions(depths=asking.depth, execution=execution))
    assert asking.spent.cost.gates - forced.spent.cost.gates == times * 64 * 2 * VOCABULARY * 16


def test_looking_closer_pays_for_the_gates_it_looks_at():
    model, text = tiny(), made_up((64,))
    plain, close = (score(model, text, Windows(16), detail=detail) for detail in (False, True))
    depth = torch.from_numpy(plain.depth.reshape(4, 16))
    assert plain.spent.cost.gates == cost_of(depth, model.config).gates
    assert close.spent.cost.gates == cost_of(depth, model.config, every_gate=True).gates > plain.spent.cost.gates


def test_halting_numbers_know_how_far_a_run_could_go():
    spent = score(tiny(), made_up((64,)), Windows(16), how=ScoringOptions(policy=FixedDepth(3), max_iterations=2)).spent
    assert spent.halted == 0.0
    assert spent.gates_closed == 0.0
    assert score(tiny("ponder"), made_up((64,)), Windows(16)).spent.gates_closed is None
    nothing = Meter(tiny().config, dtype=torch.float32, device=torch.device("cpu")).spent()
    assert (nothing.iterations, nothing.tokens_per_second) == (0, None)
    assert "NaN" not in json.dumps(nothing.as_dict())


def test_the_meter_agrees_with_torch_for_every_method():
    checks = check_all()
    assert [check.method for check in checks] == list(METHODS)
    assert all(check.ratio == pytest.approx(1.0, abs=0.01) for check in checks)


def test_a_paired_difference_sees_what_two_intervals_would_hide():
    text = made_up((20,) * 30)
    noise = np.random.default_rng(0).normal(5.0, 2.0, text.predictions)
    result = paired_difference(text, noise, noise - 0.01)
    assert result.mean == pytest.approx(-0.01)
    assert result.significant
    assert (result.wins, result.ties) == (1.0, 0.0)
    half = np.where(np.arange(text.predictions) % 2 == 0, noise, noise + 1.0)
    assert (paired_difference(text, noise, half).wins, paired_difference(text, noise, half).ties) == (0.0, 0.5)
    assert not paired_difference(text, noise, noise).significant
    with pytest.raises(InputError):
        paired_difference(text, noise, noise[1:])


def test_a_flip_far_from_the_threshold_is_not_explained_away(monkeypatch):
    model, text = tiny(dtype=torch.float32), made_up()

    def wrong(*args, how, **kwargs):
        if how.execution == "compact":
            how = ScoringOptions(policy=FixedDepth(2), execution="compact")
        return score(*args, how=how, **kwargs)

    monkeypatch.setattr(scoring, "score", wrong)
    result = agreement(model, text, Windows(16))
    assert result.flips > 50
    assert result.unexplained is not None
    assert result.unexplained > result.flips / 2
    assert str(result).startswith("dense and skipping DISAGREE")
    assert not result.holds


def test_a_tau_per_gate_is_compared_gate_by_gate():
    model = tiny(dtype=torch.float32)
    assert agreement(model, made_up(), Windows(16), how=ScoringOptions(policy=LearnedGate((0.5, 0.4)))).holds
    deeper = tiny(iterations=4, dtype=torch.float32)
    how = ScoringOptions(policy=LearnedGate((0.5, 0.4, 0.3)), max_iterations=2)
    assert agreement(deeper, made_up(), Windows(16), how=how).holds


def invoke(*arguments: str):
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments], env={"COLUMNS": "200"})


def test_eval_prints_loss_and_cost_and_writes_them_down(ada, records, tmp_path):
    record = tmp_path / "eval.json"
    result = invoke("eval", ada, "--data", records, "--depths", "1,3", "--window", "16", "--json", record)
    assert result.exit_code == 0, result.output
    outcome = json.loads(record.read_text())
    assert [row["label"] for row in outcome["rows"]] == ["its own depths", "depth 1", "depth 3"]
    assert [row["cost"]["iterations"] for row in outcome["rows"][1:]] == [1.0, 3.0]
    assert outcome["agreement"]["loss_difference"] < 1e-5
    assert set(outcome["sources"]) == {"books", "code"}
    for words in ("bits/byte", "x vanilla", "disjoint windows of 16", "dense and skipping agree", "By source"):
        assert words in result.output


def test_compare_pairs_the_tokens(stock, ada, records, tmp_path):
    sides = ("--policy-b", "fixed:2", "--max-iterations-b", "2", "--weights-b", "int8", "--tokenizer", ada)
    record = tmp_path / "compare.json"
    result = invoke("compare", stock, ada, "--data", records, *sides, "--json", record)
    assert result.exit_code == 0, result.output
    compared = json.loads(record.read_text())
    first, second = compared["rows"]
    assert compared["difference"]["mean"] == pytest.approx(second["loss"] - first["loss"])
    assert compared["difference"]["mean"] != 0.0
    assert (first["label"], second["label"]) == ("A: depth 1", "B: fixed:2, at most 2, int8 weights")
    assert second["cost"]["iterations"] == 2.0
    assert first["embedding_scale"] == second["embedding_scale"] == 1.0


def test_checkpoints_of_different_tokenizers_are_not_compared(ada, stock, records, tmp_path):
    shutil.copytree(stock, tmp_path / "other")
    small_tokenizer().save_pretrained(tmp_path / "other")
    result = invoke("compare", ada, tmp_path / "other", "--data", records)
    assert isinstance(result.exception, InputError)
    assert "different tokenizers" in str(result.exception)
