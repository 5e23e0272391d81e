"""Depth on demand: accuracy and depth by need, of readers whose answers are known beforehand and of a real model."""

import types

import numpy as np
import pytest
import torch

from adaponder import FixedDepth
from adaponder.analysis.demand import measure_demand
from adaponder.data.prepare import prepare
from adaponder.data.puzzles import END_ID, PUZZLES, ids_of, needed
from adaponder.errors import InputError
from adaponder.evaluation.text import open_text, open_vocabulary
from experiments.measures import measuring
from support import stock, wrap

K = 3
WRONG = int(ids_of(["."])[0])


class Reader:
    """Answers what needs at most its depth, and ``.`` elsewhere; halts when it can answer, or ``own`` says."""

    def __init__(self, *, halts: bool = True, own: str = "need"):
        self.config = types.SimpleNamespace(iterations=K, vocab_size=END_ID + 1, max_position_embeddings=128)
        self.method = types.SimpleNamespace(halts=halts)
        self.device, self.training, self.own = torch.device("cpu"), True, own

    def eval(self) -> None:
        self.training = False

    def train(self, training: bool) -> None:
        self.training = training

    def __call__(self, ids, policy=None, max_iterations=None):
        assert not self.training
        # The last token is never read; it is an end token, which asks nothing.
        tokens = np.concatenate([ids.numpy(), np.full((len(ids), 1), END_ID)], axis=1)
        need = np.stack([needed(row) for row in tokens])[:, 1:]
        wanted = need.clip(1, K)
        depth = {"need": wanted, "one": np.full(need.shape, 2), "against": K + 1 - wanted}[self.own]
        if policy is not None or max_iterations is not None:
            depth = np.full(need.shape, max_iterations if policy is None else policy.depth)
        answer = np.where(depth >= need, tokens[:, 1:], WRONG)
        logits = torch.nn.functional.one_hot(torch.from_numpy(answer), END_ID + 1).float()
        return types.SimpleNamespace(logits=logits, depth=torch.from_numpy(depth))


@pytest.fixture(scope="module", params=["hops", "mano"])
def data(request, tmp_path_factory):
    out = tmp_path_factory.mktemp("demand") / request.param
    prepare([f"{request.param}:documents=24"], out=out, validation=0.5)
    return out


def opened(folder, **how):
    return open_text(str(folder), open_vocabulary(str(folder / "tokenizer.json")), whose="the test", **how)


def test_a_reader_that_reads_as_often_as_needed(data):
    found = measure_demand(Reader(), opened(data), batch_size=3)
    assert found.needs == [1, 2, 3, 4]
    assert found.at_depth == {1: [1, 0, 0, 0], 2: [1, 1, 0, 0], 3: [1, 1, 1, 0]}
    assert found.accuracy == [1, 1, 1, 0]
    assert found.depth == [1, 2, 3, 3]
    assert found.least_depth() == [1, 2, 3, None]
    # Needs 3 and 4 share a depth, so their ranks among depths are the mean of both groups' ranks.
    counts = np.array(found.questions)
    after = counts.cumsum()
    of_need = after - (counts - 1) / 2
    of_depth = [*of_need[:2], after[1] + (counts[2] + counts[3] + 1) / 2, after[1] + (counts[2] + counts[3] + 1) / 2]
    assert found.rho == pytest.approx(np.corrcoef(np.repeat(of_need, counts), np.repeat(of_depth, counts))[0, 1])
    first, second, third, last = found.questions
    assert found.by_depth == [[first, 0, 0], [0, second, 0], [0, 0, third], [0, 0, last]]
    total = sum((needed(opened(data).stream[1:]) == need).sum() for need in found.needs)
    assert sum(found.questions) == total >= 50


@pytest.mark.parametrize("halts", [True, False])
def test_readers_whose_depth_is_one_or_runs_against_need(data, halts):
    constant = measure_demand(Reader(halts=halts, own="one"), opened(data))
    assert constant.rho is None
    assert (constant.at_depth[3], constant.accuracy) == ([1, 1, 1, 0], [1, 1, 0, 0])
    against = measure_demand(Reader(halts=halts, own="against"), opened(data))
    assert against.rho < -0.9
    assert against.accuracy == [1, 1, 0, 0]  # depths 3, 2, 1, 1


def test_a_document_that_was_cut_is_measured_as_far_as_it_goes(data):
    length = PUZZLES[data.name].length
    cutting = 2 * length + {"hops": 45, "mano": 100}[data.name]  # behind a word that is no answer
    whole, cut = (opened(data, max_tokens=tokens) for tokens in (3 * length, cutting))
    first, last = measure_demand(Reader(), whole), measure_demand(Reader(), cut)
    assert sum(last.questions) == sum(first.questions) - (needed(whole.stream[1:])[cutting:] > 0).sum()
    assert sum(last.questions) < sum(first.questions)
    assert last.accuracy == [1, 1, 1, 0]


@pytest.fixture(scope="module")
def model():
    return wrap(stock(dtype=torch.float32, vocab_size=END_ID + 1, max_position_embeddings=256), iterations=K)


def test_a_real_model_document_by_document(model, data):
    """Equals each document read alone; and a model that answers by chance gets about as much."""
    text = opened(data)
    found = measure_demand(model, text, batch_size=7)
    tokens = torch.from_numpy(text.stream[1:].reshape(-1, PUZZLES[data.name].length))
    for arguments, accuracy in [({}, found.accuracy), ({"policy": FixedDepth(2)}, found.at_depth[2])]:
        right, depth = {need: [] for need in found.needs}, {need: [] for need in found.needs}
        for row in tokens:
            with torch.no_grad():
                output = model(row[None, :-1], **arguments)
            for place, need in enumerate(needed(row.numpy()).tolist()):
                if need:
                    right[need].append(int(output.logits[0, place - 1].argmax()) == int(row[place]))
                    depth[need].append(int(output.depth[0, place - 1]))
        assert accuracy == pytest.approx([np.mean(right[need]) for need in found.needs])
        if not arguments:
            assert found.depth == pytest.approx([np.mean(depth[need]) for need in found.needs])
    assert max(found.accuracy) < 0.5


def test_the_measure_of_reproduce_goes_into_a_record(model, data, tmp_path):
    model.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes((data / "tokenizer.json").read_bytes())
    measure = measuring(["demand"], device="cpu")
    assert measure is not None
    made = dict(measure(tmp_path, data))["demand"]
    found = measure_demand(model, opened(data), batch_size=32)
    assert made["questions"] == found.questions
    assert set(made["at_depth"]) == {"1", "2", "3"}
    assert made["least_depth"] == [None] * 4


def test_a_model_that_cannot_hold_a_document_or_its_words_is_refused(data):
    length = PUZZLES[data.name].length
    for field, size, says in (("max_position_embeddings", length - 2, "--window"), ("vocab_size", END_ID, "vocabular")):
        reader = Reader()
        setattr(reader.config, field, size)
        with pytest.raises(InputError, match=says):
            measure_demand(reader, opened(data))


def test_other_text_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("some text, and not a puzzle " * 20)
    for tokenizer, says in (("train-bpe:300", "symbols"), ("symbols", "asks nothing")):
        prepare([str(tmp_path / "a.txt")], out=tmp_path / says, tokenizer=tokenizer, validation=0)
        with pytest.raises(InputError, match=says):
            measure_demand(Reader(), opened(tmp_path / says, split="train"))
