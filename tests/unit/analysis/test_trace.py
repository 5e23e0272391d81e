"""A trace says of every prediction what scoring says, at its own depth and at every forced one."""

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, models

import lab_support
from adaponder.analysis.trace import Trace, columns_of, make_trace, planned_scorings, read_trace, write_trace
from adaponder.errors import InputError
from adaponder.evaluation import scoring
from adaponder.evaluation.scoring import ScoringOptions, score
from adaponder.evaluation.text import Text, Vocabulary, Windows
from adaponder.policies import FixedDepth, LearnedGate
from support import METHODS, VOCABULARY, tiny
from trace_support import made_up

WINDOWS = Windows(12)


def text() -> Text:
    """Three documents of random words."""
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))
    return replace(lab_support.made_up((10, 10, 20)), vocabulary=Vocabulary(words, 0))


def traced(model, *, windows: Windows = WINDOWS, how: ScoringOptions | None = None) -> Trace:
    return make_trace(model, text(), windows, checkpoint="tiny", data="random", how=how, batch_size=3)


def forced(model, depth: int, windows: Windows = WINDOWS) -> np.ndarray:
    how = ScoringOptions(policy=FixedDepth(depth)) if model.method.halts else ScoringOptions(max_iterations=depth)
    return score(model, text(), windows, how=how).nll


@pytest.mark.one_of(3)
@pytest.mark.parametrize("method", METHODS)
def test_a_trace_says_what_scoring_says_at_every_depth(method):
    model = tiny(method)
    trace, alone = traced(model), score(model, text(), WINDOWS)
    assert list(trace.frame.columns) == columns_of(trace.about)
    assert len(trace) == text().predictions
    spent = {k: v for k, v in alone.spent.as_dict().items() if k not in ("tokens_per_second", "seconds")}
    assert trace.about.spent == spent, "gates that only a trace evaluates are not counted"
    np.testing.assert_array_equal(trace["depth"], alone.depth)
    np.testing.assert_allclose(trace["nll"], alone.nll, rtol=0, atol=1e-12)
    if model.method.halts:  # a halted token stays as it was
        own = trace.by_iteration("nll")[np.arange(len(trace)), trace["depth"].astype(int) - 1]
        np.testing.assert_allclose(trace["nll"], own, rtol=1e-6)
        np.testing.assert_allclose(trace["nll"], trace.by_iteration("nll")[:, -1], rtol=1e-6)
    for depth in range(1, model.config.iterations):
        np.testing.assert_allclose(trace[f"full_nll_{depth}"], forced(model, depth), rtol=1e-6, atol=1e-6)


def test_a_trace_of_a_conversation_has_the_loss_of_what_is_learned_of_it():
    model, learned = tiny(), np.arange(40) % 5 == 0
    talk = replace(text(), learned=learned)
    trace = make_trace(model, talk, WINDOWS, checkpoint="tiny", data="random")
    assert trace.loss == pytest.approx(score(model, talk, WINDOWS).loss, rel=1e-9)
    assert (trace["learned"] == learned).all()
    with pytest.raises(InputError, match="learned"):
        make_trace(model, replace(talk, learned=learned & False), WINDOWS, checkpoint="tiny", data="random")


@pytest.mark.parametrize("windows", [Windows(7), Windows(12, 5), Windows(12, across_documents=False)], ids=str)
def test_a_text_read_in_portions_is_the_text_read_at_once(windows, monkeypatch):
    model, whole = tiny(), text()
    alone = score(model, whole, windows, detail=True)
    monkeypatch.setattr(scoring, "BATCHES", 1)
    assert len(scoring.portions(windows, whole.predictions, 2)) > 1
    found = scoring.score_portions(model, whole, windows, how=ScoringOptions(), name="all", batch_size=2)
    np.testing.assert_array_equal(found.depth, alone.depth)
    for name in ("nll", "gates", "nll_by_iteration", "entropy"):
        np.testing.assert_allclose(getattr(found, name), getattr(alone, name), rtol=0, atol=1e-5)
    assert replace(found.spent, seconds=0.0) == replace(alone.spent, seconds=0.0)


def test_gates_and_thresholds_explain_the_depths():
    trace = traced(tiny(), how=ScoringOptions(policy=LearnedGate((0.4, 0.6))))
    gates, tau = trace.by_iteration("gate"), np.array(trace.about.tau)
    assert trace.about.tau == (0.4, 0.6)
    assert trace.about.policy == "gate:0.4,0.6"
    keeps = np.cumprod(gates >= tau, axis=1).sum(axis=1)
    np.testing.assert_array_equal(trace["depth"], 1 + keeps)
    fewer = traced(tiny(iterations=4), how=ScoringOptions(policy=LearnedGate((0.5, 0.4, 0.3)), max_iterations=2))
    about = fewer.about
    assert (about.iterations, about.deepest, about.gates, about.tau) == (4, 2, 1, (0.5,))
    assert fewer["depth"].max() <= 2
    assert "nll_3" not in fewer.frame


def test_places_counts_and_sources_are_those_of_the_text():
    trace, given = traced(tiny(), windows=Windows(12, stride=5)), text()
    np.testing.assert_array_equal(trace["token_id"], given.stream[:-1])
    np.testing.assert_array_equal(trace["target_id"], given.stream[1:])
    assert list(trace.frame["token"]) == [f" w{i}" for i in given.stream[:-1]]
    assert list(trace.frame["target"]) == [f" w{i}" for i in given.stream[1:]]
    np.testing.assert_array_equal(trace["document"], given.document)
    np.testing.assert_array_equal(trace["position"], given.position)
    assert list(trace.frame["source"]) == [given.sources[i] for i in given.document]
    read = given.stream[:-1].tolist()
    assert trace["count"].tolist() == [read.count(one) for one in read]
    by_rank = trace.frame.drop_duplicates("token_id").sort_values("rank")
    assert by_rank["rank"].tolist() == list(range(1, len(set(read)) + 1))
    assert by_rank["count"].is_monotonic_decreasing
    place = np.concatenate([np.arange(12)[batch.fresh[0]] for batch in Windows(12, stride=5).batches(given, 1)])
    np.testing.assert_array_equal(trace["window_position"], place)


def test_each_reading_is_announced_so_that_progress_can_end():
    for method, expected in (("adaponder", 2), ("pause", 3), ("vanilla", 1)):
        model, seen = tiny(method), []
        make_trace(model, text(), WINDOWS, checkpoint="", data="", advance=seen.append)
        assert len(planned_scorings(model, ScoringOptions())) == expected
        assert sum(seen) == expected * text().predictions


def test_what_is_written_is_what_is_read(tmp_path):
    trace = traced(tiny())
    write_trace(trace, tmp_path / "trace.parquet")
    again = read_trace(tmp_path / "trace.parquet")
    assert again.about == trace.about
    for column in trace.frame:
        assert trace.frame[column].tolist() == again.frame[column].tolist(), column


@pytest.mark.parametrize(
    ("spoil", "word"),
    [
        (lambda frame: frame.drop(columns=["gate_2", "rank"]), "rank, gate_2 are missing"),
        (lambda frame: frame.assign(depth=9), "depths from 9 to 9"),
        (lambda frame: frame.assign(depth=0), "must be from 1 to 4"),
        (lambda frame: frame.assign(full_nll_2=np.nan), "full_nll_2"),
        (lambda frame: frame.iloc[:0], "predictions"),
    ],
)
def test_a_table_that_cannot_be_a_trace_is_refused_by_name(tmp_path, spoil, word):
    trace = made_up(20)
    write_trace(Trace(spoil(trace.frame), trace.about), tmp_path / "trace.parquet")
    with pytest.raises(InputError, match=word):
        read_trace(tmp_path / "trace.parquet")


def test_a_file_that_is_no_trace_is_refused(tmp_path):
    path, table = tmp_path / "a.parquet", pa.table({"x": [1]})
    path.write_text("not Parquet")
    with pytest.raises(InputError, match="Parquet"):
        read_trace(path)
    for metadata, word in (({}, "analyze CKPT"), ({b"adaponder.trace": b'{"tau": null}'}, "version")):
        pq.write_table(table.replace_schema_metadata(metadata), path)
        with pytest.raises(InputError, match=word):
            read_trace(path)
