"""Of conversations and puzzles a loss is that of what training learns: what the assistant says, and the answers."""

import dataclasses
import json

import numpy as np
import pytest

from adaponder.analysis.tables import numbers
from adaponder.analysis.trace import make_trace
from adaponder.checkpoints.shipped import sample_path
from adaponder.commands.evaluate import described
from adaponder.data.prepare import prepare
from adaponder.data.puzzles import questions
from adaponder.errors import InputError
from adaponder.evaluation.lab.dials import at_full_depth, priced_depths
from adaponder.evaluation.lab.halves import halve
from adaponder.evaluation.summary import by_source, paired_difference, per_document, summarise
from adaponder.evaluation.text import Windows, open_text, open_vocabulary
from adaponder.modeling import AdaPonderForCausalLM

PUZZLES = "hops:seed=8,documents=40"


@pytest.fixture(scope="module")
def vocabulary():
    return open_vocabulary("symbols")


@pytest.fixture(scope="module")
def text(vocabulary):
    return open_text(PUZZLES, vocabulary, whose="a model")


def answers(text) -> np.ndarray:
    """Which predictions are of answers or of a document's end, found by reading each as a person would."""
    result = np.zeros(text.predictions, bool)
    ends = [*text.starts[1:].tolist(), text.predictions]
    for start, end in zip(text.starts.tolist(), ends, strict=True):
        words = text.vocabulary.tokenizer.decode(text.stream[start + 1 : end + 1].tolist()).split()
        for question in questions(words):
            result[start + question.place] = True
        result[end - 1] = True
    return result


def test_answers_are_what_counts_of_puzzles_prepared_or_not(text, vocabulary, tmp_path):
    assert (text.counted == answers(text)).all()
    assert int(text.counted.sum()) == 40 * 7
    prepare([PUZZLES, "mano:documents=30,length=53"], out=tmp_path, validation=0.0)
    prepared = open_text(str(tmp_path), vocabulary, whose="a model", split="train")
    names = np.array(prepared.sources)[prepared.document]
    hops = names == "hops"
    assert (prepared.counted == answers(prepared))[hops].all()
    assert (prepared.stream[1:][hops] == text.stream[1:]).all()
    nll, depth = np.arange(prepared.predictions, dtype=float), np.ones(prepared.predictions, np.int64)
    for name, summary in by_source(prepared, nll, depth).items():
        assert summary.loss == pytest.approx(nll[(names == name) & prepared.counted].mean(), rel=1e-12)
        assert summary.bits_per_byte is None
    plain = open_text(PUZZLES + ",answers=0", vocabulary, whose="a model")
    assert plain.learned is None
    assert plain.counted.all()


def test_text_that_the_tokenizer_does_not_know_is_counted_and_has_no_bits_per_byte(vocabulary, tmp_path):
    lines = [{"text": "a b . c d", "source": "known"}, {"text": "def a ( b", "source": "foreign"}]
    (tmp_path / "text.jsonl").write_text("\n".join(map(json.dumps, lines)))
    text = open_text(str(tmp_path / "text.jsonl"), vocabulary, whose="a model")
    assert int(text.unknown.sum()) == 2
    nll, depth = np.ones(text.predictions), np.ones(text.predictions, np.int64)
    assert summarise(text, nll, depth).bits_per_byte is None
    by_name = by_source(text, nll, depth)
    assert by_name["foreign"].bits_per_byte is None
    assert by_name["known"].bits_per_byte == pytest.approx(6 / 9 / np.log(2))
    assert "2 tokens unknown to the tokenizer (no bits per byte)" in described("it", text, Windows(8))
    model = AdaPonderForCausalLM.from_pretrained("adaponder:sample-hops").eval()
    assert numbers(make_trace(model, text, Windows(8), checkpoint="", data="")).bits_per_byte is None
    assert open_vocabulary(str(sample_path())).unknown_id is None, "bytes spell any text"


def test_cut_and_halved_texts_know_what_counts_of_them(text, vocabulary):
    cut = open_text(PUZZLES, vocabulary, whose="a model", max_tokens=400)
    assert (cut.counted == text.counted[:400]).all()
    assert (text.first(400).counted == text.counted[:400]).all()
    halves = halve(text, Windows(53))
    assert halves.drawn == "documents"
    for half in halves[:2]:
        assert (half.own_text.counted == answers(half.own_text)).all()
    with pytest.raises(InputError, match="--data"):
        open_text(PUZZLES, vocabulary, whose="a model", max_tokens=5)
    short = text.first(53 * 4)
    few = halve(short, Windows(30))
    assert few.drawn == "windows"
    numbers = []
    for half in (few.tuning, few.held_out):
        assert (half.own_text.counted == short.counted[half.mask]).all()
        numbers.append(half.learned)
    assert numbers[0] != numbers[1]
    assert sum(numbers) == 28
    assert int(few.tuning.own_text.counted.sum()) == numbers[0]


def test_documents_that_count_nothing_are_in_no_interval_and_a_half_without_targets_is_refused(text):
    learned = text.counted.copy()
    learned[text.starts[5] :] = False
    thin = dataclasses.replace(text, learned=learned)
    nll, depth = np.ones(text.predictions), np.ones(text.predictions, np.int64)
    assert summarise(thin, nll, depth).interval is None, "five documents are too few"
    learned[text.starts[1] :] = False
    with pytest.raises(InputError, match="--data"):
        halve(dataclasses.replace(text, learned=learned), Windows(53))


def test_what_does_not_count_is_read_once_by_the_oracle(text):
    model = AdaPonderForCausalLM.from_pretrained("adaponder:sample-hops").eval()
    half = halve(text, Windows(53)).tuning
    depths = priced_depths(at_full_depth(model, half, batch_size=8, seed=0).nll, 0.01)
    counted = half.own_text.counted
    assert (depths[~counted] == 1).all()
    assert depths[counted].mean() > 1.5


def test_means_and_intervals_are_of_what_counts_and_depth_is_of_all(text):
    generator = np.random.default_rng(0)
    nll, other = generator.exponential(size=(2, text.predictions))
    depth = generator.integers(1, 5, text.predictions)
    summary = summarise(text, nll, depth)
    assert summary.loss == pytest.approx(nll[text.counted].mean(), rel=1e-12)
    assert summary.tokens == 280
    assert summary.bits_per_byte is None
    assert summary.depth == depth.mean()
    assert summary.interval is not None
    assert summary.interval.low < summary.loss < summary.interval.high
    silly = summarise(text, np.where(text.counted, 1.0, 1e9), depth)
    assert silly.interval == (1.0, 1.0), "what does not count moves nothing"
    gap = paired_difference(text, nll, other)
    assert gap.mean == pytest.approx((other - nll)[text.counted].mean(), rel=1e-12)
    assert gap.wins == (other < nll)[text.counted].mean()
    assert gap.tokens == 280
    assert per_document(text, text.counted).tolist() == [7] * 40
    assert by_source(text, nll, depth) == {}
