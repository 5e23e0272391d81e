"""Puzzles: the same bytes for a seed, right answers, and needed depths that the text alone gives back."""

from itertools import pairwise

import numpy as np
import pytest

from adaponder.data import Shards, puzzles, read_windows, readers, sources
from adaponder.data.prepare import prepare
from adaponder.data.puzzles import END_ID, UNKNOWN, documents, ids_of, needed, questions, settings_of, words_of
from adaponder.data.tokenizers import END, load_tokenizer
from adaponder.errors import InputError
from adaponder.training import validation
from adaponder.training.data import model_inputs

SMALL = {
    "hops": "hops:seed=3,documents=60",
    "mano": "mano:seed=3,documents=60",
    "long hops": "hops:documents=10,most=6,questions=6,ends=3",
    "odd hops": "hops:documents=30,most=3,questions=2,letters=5,ends=2",
    "tall mano": "mano:documents=10,modulus=23,most=6,length=300",
    "low mano": "mano:documents=30,modulus=2,most=1,length=7",
}


def answers(text: str) -> list[tuple[int, int, str]]:
    return [tuple(question[:3]) for question in questions(text.split())]


STEPS = "a b . e f . b c . d g . c f ."


@pytest.mark.parametrize(("letter", "hops", "end"), [("a", 3, "f"), ("b", 2, "f"), ("c", 1, "f"), ("d", 1, "g")])
def test_hops_worked_out_by_hand(letter, hops, end):
    assert answers(f"{STEPS} | {letter} a") == [(17, hops, end)]
    assert answers(f"{STEPS} | e f {letter} a") == [(17, 1, "f"), (19, hops, end)]


@pytest.mark.parametrize(
    ("tree", "height", "value"),
    [
        ("+ 3 5", 1, 1),
        ("- 1 2", 1, 6),
        ("+ 3 * 4 5", 2, 2),  # 4 * 5 = 6, 3 + 6 = 2
        ("- * 2 6 + 1 1", 2, 3),  # 12 = 5, 5 - 2
        ("* + 1 - 0 2 3", 3, 4),  # 0 - 2 = 5, 1 + 5 = 6, 6 * 3 = 4
        ("- + * 1 + 5 2 6 2", 4, 4),  # 5 + 2 = 0, 0, 6, 4
    ],
)
def test_trees_worked_out_by_hand(tree, height, value):
    before = "7 * 1 1 = 1"
    wanted = [(5, 1, "1"), (6 + len(tree.split()) + 1, height, str(value))]
    assert answers(f"{before} {tree} = 0 . .") == wanted


@pytest.mark.parametrize(
    "text",
    [
        *("", "7", "| 1 A", "7 + 1 = 2", "7 + 1 2", "7 5 = 5", "1 + 0 0 = 0", "+ 1 1 = 2", "7 =", "+ " * 5000),
        *("7 " + "+ " * 5000 + "1", "a b " * 99, "a b . | b a", "a b . b a . | a b", "a b | a b"),
    ],
)
def test_what_is_no_question_asks_nothing(text):
    assert answers(text) == []


def test_the_needed_depth_stands_at_the_answer_and_nowhere_else():
    words = ["c", "a", ".", "a", "b", ".", "d", "e", ".", "|", "c", "b", "a", "b"]
    trees = ["7", "+", "3", "*", "4", "5", "=", "2", "-", "1", "2", "=", "6", "."]
    ids = np.concatenate([ids_of(words), [END_ID], ids_of(trees), [END_ID]])
    wanted = [*[0] * 11, 2, 0, 1, 0, *[0] * 7, 2, *[0] * 4, 1, 0, 0]
    assert needed(ids).tolist() == wanted
    assert needed(ids[:-1]).tolist() == wanted[:-1]  # an end is not needed after the last
    assert needed(ids[:0]).tolist() == []
    ids[[11, 13]] = ids_of(["a", "c"])  # wrong answers need the same depth
    assert needed(ids).tolist() == wanted


def test_the_last_chain_can_be_inferred_by_elimination():
    steps = ["c", "a", ".", "d", "e", ".", "a", "b", ".", "|"]

    def by_elimination(*asked: str) -> list[bool]:
        return [question.by_elimination for question in questions([*steps, *asked])]

    assert by_elimination("c", "b", "d", "e") == [False, True]
    assert by_elimination("d", "e", "c", "b") == [False, True]
    assert by_elimination("d", "e", "a", "b") == [False, False], "a letter within a chain leaves its first one unasked"
    assert by_elimination("d", "e", "d", "e") == [False, False]
    assert by_elimination("d", "e") == [False], "a document that was cut"
    assert needed(ids_of([*steps, "c", "b", "d", "e"])).tolist() == [*[0] * 11, 2, 0, 0]


@pytest.mark.parametrize("name", SMALL)
def test_plain_interpretation_answers_every_question(name):
    settings = settings_of(SMALL[name])
    count = 0
    for words in documents(settings):
        assert len(words) == settings.length - 1
        found = list(questions(words))
        assert [words[question.place] for question in found] == [question.answer for question in found]
        assert all(1 <= question.needed <= settings.most for question in found)
        places = np.flatnonzero(needed(ids_of(words)))
        assert places.tolist() == [question.place for question in found if not question.by_elimination]
        # Nothing is left unread: all words are context, questions or filling.
        if isinstance(settings, puzzles.Hops):
            assert len(found) == settings.questions
            assert [question.by_elimination for question in found] == [False] * (len(found) - 1) + [True]
            assert words.index("|") == 3 * sum(settings.hops) == 3 * sum(question.needed for question in found)
        else:
            assert set(words[found[-1].place + 1 :]) <= {"."}
        count += len(found)
    assert count >= settings.documents


def test_steps_stand_in_the_order_in_which_they_are_taken():
    """A model cannot join a step with the next while it reads the first: the next is written later."""
    mixed = 0
    for words in documents(settings_of(SMALL["hops"])):
        place = {words[at]: at for at in range(0, words.index("|"), 3)}
        following = [(at, place[words[at + 1]]) for at in place.values() if words[at + 1] in place]
        assert all(at < then for at, then in following)
        mixed += sum(then > at + 3 for at, then in following)
    assert mixed > 200  # of 420: chains are mixed


# Of the text itself: a change of what a seed gives must change the version that prepared folders are known by.
FIRST = {
    "hops:letters=6,most=2,questions=3,ends=4,capitals=1": "f e . e A . d D . c F . | c F f A d D",
    "mano:most=2,length=24": "7 * 2 6 = 5 - 6 + 4 3 = 6 * 3 0 = 0 . . . . .",
}


def test_a_seed_gives_these_words():
    for argument, text in FIRST.items():
        assert " ".join(next(documents(settings_of(argument)))) == text
        assert " ".join(next(documents(settings_of(argument + ",seed=1")))) != text


def test_a_text_cannot_forge_its_end_nor_leave_the_vocabulary():
    tokenizer, _ = load_tokenizer("symbols")
    assert tokenizer.encode(f"a {END} word", add_special_tokens=False).tokens == ["a", UNKNOWN, UNKNOWN]
    with pytest.raises(InputError, match="--end-token"):
        load_tokenizer("symbols", end_token="a")


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        *((f"hops:{wrong}", wrong) for wrong in ("documents=0", "most=17", "letters=25", "ends=1", "capitals=2")),
        *((f"hops:{wrong}", "seed") for wrong in ("seed=1,seed=2", "seed=-1", "seed=")),
        *((right, None) for right in ("hops:", "hops:letters=13,capitals=1", "mano:length=35")),
        ("hops:sead=1", "sead"),
        ("hops:questions=12", "41"),
        ("hops:letters=12,capitals=1", "13"),
        ("hops:modulus=5", "modulus"),
        ("mano:modulus=40", "modulus=40"),
        ("mano:length=34", "35"),
    ],
)
def test_wrong_settings_are_refused_by_name(argument, message):
    if message is None:
        assert settings_of(argument)
        return
    with pytest.raises(InputError, match=message):
        sources.find([argument], readers.Counts())


def test_only_puzzles_have_a_tokenizer_of_their_own(tmp_path):
    with pytest.raises(InputError, match="--tokenizer"):
        prepare(["hops:documents=2", "stdlib"], out=tmp_path)
    both = ["hops:documents=2,answers=0", "mano:documents=2,answers=0"]
    mixed = prepare(both, out=tmp_path / "both", validation=0)
    assert mixed.total("train", "documents") == 4
    assert mixed.vocab_size == 96


def test_a_folder_is_known_by_the_version_and_by_the_defaults_behind_its_name(monkeypatch):
    def described() -> str:
        return sources.describe(sources.find(["hops"], readers.Counts()))[0]["contents"]

    before = described()
    assert described() == before
    monkeypatch.setattr(puzzles, "_VERSION", 0)
    assert described() != before
    monkeypatch.undo()
    monkeypatch.setitem(puzzles.PUZZLES, "hops", puzzles.Hops(questions=5))
    assert described() != before


@pytest.mark.parametrize("name", ["hops", "mano", "low mano"])
def test_answers_alone_are_learned_and_the_text_is_the_same_as_where_everything_is(name, tmp_path):
    whole = f"{SMALL[name]},answers=0"
    prepare([SMALL[name]], out=tmp_path / "answers", validation=0.2)
    prepare([whole], out=tmp_path / "all", validation=0.2)
    for split in ("train", "validation"):
        masked, plain = (Shards.open(tmp_path / folder, split) for folder in ("answers", "all"))
        length = sum(shard.tokens for shard in masked.manifest.splits[split])
        start = np.zeros(1, np.int64)
        ids = masked.read_blocks(start, length)[0]
        assert np.array_equal(ids, plain.read_blocks(start, length)[0])
        assert plain.learned_blocks(start, length) is None
        learned = masked.learned_blocks(start, length)[0]
        # Every answer, also by elimination; where a document ends with an answer, its end token with it.
        asked = np.zeros(length, bool)
        for first, end in pairwise([-1, *np.flatnonzero(ids == END_ID).tolist()]):
            asked[[first + 1 + question.place for question in questions(words_of(ids[first + 1 : end]))]] = True
        assert asked.any()
        assert np.array_equal(learned, asked | ((ids == END_ID) & np.roll(asked, 1)))


def test_puzzles_with_learned_answers_cannot_be_mixed_with_other_text(tmp_path):
    (tmp_path / "text.txt").write_text("a b c")
    text = str(tmp_path / "text.txt")
    for inputs, named in (
        (["hops:documents=9", text], "answers"),
        (["hops:documents=9,answers=0", "mano:documents=9"], "answers"),
        (["hops:documents=9", "mano:documents=9"], "129"),  # validation reads one document per window
    ):
        with pytest.raises(InputError, match=rf"documents=9.*{named}"):
            prepare(inputs, out=tmp_path / "out", tokenizer="symbols")
    with pytest.raises(InputError, match="answers=2"):
        prepare(["mano:answers=2"], out=tmp_path / "out")


@pytest.mark.parametrize("name", ["hops", "mano"])
def test_validation_reads_each_document_from_its_beginning(name, tmp_path):
    prepare([SMALL[name]], out=tmp_path, validation=0.3)
    shards = Shards.open(tmp_path, "validation")
    length = settings_of(SMALL[name]).length - 1
    windows = validation.whole_windows(shards, 10**6, length=length)
    assert windows == shards.documents > 5
    stride = validation._stride(shards, length)
    batch = read_windows(shards, np.arange(windows), sequence=length, stride=stride)
    assert all(len(set(row.tolist())) == 1 for row in batch.documents)
    inputs = model_inputs(batch, across=True)
    for row, learned in zip(inputs["input_ids"], inputs["targets"] != -100, strict=True):
        asked = [place for place, _, _ in answers(" ".join(words_of(row.numpy())))]
        assert set(asked) <= set((learned.nonzero()[:, 0] + 1).tolist())
        assert len(asked) >= 2
    for tokens, few in ((2 * (length + 1), 2), (length, 1)):
        assert validation.whole_windows(shards, tokens, length=length) == few
