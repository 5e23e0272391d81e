"""Puzzles in the terminal: answers, depths and needs are those of the model and of the text."""

import json

import numpy as np
import pytest
import torch

from adaponder import AdaPonderForCausalLM, FixedDepth
from adaponder.commands import puzzle
from adaponder.data.prepare import prepare
from adaponder.data.puzzles import END_ID, WORDS, Hops, documents, ids_of, questions, settings_of
from adaponder.data.tokenizers import SYMBOLS, load_tokenizer
from adaponder.errors import InputError
from support import stock, wrap


@pytest.fixture(scope="module", params=["relay", "loop"])
def model(request) -> AdaPonderForCausalLM:
    return wrap(stock(dtype=torch.float32, vocab_size=128), request.param)


def test_what_is_counted_is_what_a_reader_of_the_text_finds(model, monkeypatch):
    monkeypatch.setattr(puzzle, "_BATCH", 3)  # the last batch is smaller
    read = puzzle.read_puzzles(model, Hops(seed=9, documents=7))
    once = {"policy": FixedDepth(1)} if model.method.halts else {"max_iterations": 1}
    count = 0
    for row, words in enumerate(documents(settings_of("hops:seed=9,documents=7"))):
        assert read.words[row] == words
        ids = torch.from_numpy(ids_of(words))[None]
        with torch.no_grad():
            own, shallow = model(ids), model(ids, **once)
        for made, output in ((read.predicted, own), (read.predicted_at_1, shallow)):
            assert made[row].tolist() == output.logits[0, :, :END_ID].argmax(-1).tolist()
        assert read.depth[row].tolist() == own.depth[0].tolist()
        for question in questions(words):
            assert read.need[row, question.place - 1] == question.needed
            assert WORDS[read.correct[row, question.place - 1]] == question.answer
            last = question.place == len(words) - 1
            assert read.by_elimination[row, question.place - 1] == question.by_elimination == last
            count += 1
    assert int((read.need > 0).sum()) == count == 42
    assert read.by_elimination.sum() == 7


def test_answers_are_counted_by_need():
    need = np.array([[0, 1, 2, 1], [2, 0, 1, 4]])
    right, answer, once = np.full((2, 4), 7), np.array([[7, 7, 3, 7], [7, 7, 3, 7]]), np.array([[7, 3, 7, 3]] * 2)
    depth, by_elimination = np.array([[4, 1, 2, 2], [3, 4, 1, 4]]), np.zeros((2, 4), bool)
    rows = [
        {"hops": 1, "questions": 3, "right": 2 / 3, "depth": 4 / 3, "right_once": 1 / 3},
        {"hops": 2, "questions": 2, "right": 1 / 2, "depth": 5 / 2, "right_once": 1.0},
        {"hops": 4, "questions": 1, "right": 1.0, "depth": 4.0, "right_once": 0.0},
    ]
    assert puzzle.by_need(puzzle.PuzzleResults([], answer, depth, once, need, right, by_elimination)) == rows
    by_elimination[1, [0, 3]] = True
    assert puzzle.by_need(puzzle.PuzzleResults([], answer, depth, once, need, right, by_elimination)) == [
        rows[0],
        {"hops": 2, "questions": 1, "right": 0.0, "depth": 2.0, "right_once": 1.0},
        {"hops": None, "questions": 2, "right": 1.0, "depth": 7 / 2, "right_once": 1 / 2},
    ]


def test_the_command_shows_a_puzzle_and_the_tally_and_a_seed_gives_it_again(model, tmp_path, capsys):
    model.save_pretrained(tmp_path / "model")
    load_tokenizer(SYMBOLS)[0].save(str(tmp_path / "model" / "tokenizer.json"))
    folder = str(tmp_path / "model")
    assert puzzle.puzzle(folder, puzzles=1)["seed"] != puzzle.puzzle(folder, puzzles=1)["seed"]
    capsys.readouterr()
    outputs = []
    for _ in range(2):
        puzzle.puzzle(folder, seed=3, puzzles=5, json=tmp_path / "result.json")
        outputs.append(capsys.readouterr().out)
    text = outputs[0]
    assert outputs[1] == text
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["seed"] == 3
    assert sum(row["questions"] for row in result["by_need"]) == 30
    words = next(iter(documents(settings_of("hops:seed=3,documents=5"))))
    assert " ".join(words[:3]) in text
    read = puzzle.read_puzzles(model, Hops(seed=3, documents=5))
    lines = [" ".join(line.split()) for line in text.splitlines() if " says " in line]
    for line, question in zip(lines, sorted(questions(words), key=lambda question: question.needed), strict=True):
        answer = WORDS[read.predicted[0, question.place - 1]]
        verdict = "right" if answer == question.answer else f"wrong, it is {question.answer}"
        assert f" says {answer}, {verdict} " in line
        assert line.removesuffix(" asked last").endswith(question.answer)


@pytest.mark.parametrize("prepared", [False, True], ids=["named", "prepared"])
def test_the_puzzles_are_those_it_was_trained_on_and_others_than_hops_are_refused(tmp_path, prepared):
    def trained_on(source: str) -> Hops:
        if prepared:
            folder = tmp_path / source.partition(":")[0]
            prepare([source], out=folder, tokenizer=SYMBOLS, validation=0.0, workers=1)
            source = str(folder)
        (tmp_path / "state.json").write_text(json.dumps({"recipe": {"data": {"source": source}}}))
        return puzzle.hops_of(tmp_path)

    assert puzzle.hops_of(tmp_path) == Hops()
    assert trained_on("hops:documents=2,most=3,capitals=1") == Hops(documents=2, most=3, capitals=1)
    with pytest.raises(InputError, match=r"trained on mano:documents=2.*hops"):
        trained_on("mano:documents=2")


def test_a_checkpoint_of_other_tokens_is_refused():
    with pytest.raises(InputError, match="adaponder:sample"):
        puzzle.puzzle("adaponder:sample")
