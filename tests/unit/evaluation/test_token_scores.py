"""A text scored from a kept beginning equals one uncached forward over the whole of it, whatever was scored before."""

import random

import pytest
import torch

from adaponder.errors import EvaluationError, InputError
from adaponder.evaluation import token_scores
from adaponder.evaluation.token_scores import ScoreSettings, TokenScorer
from adaponder.policies import Custom, Entropy, FixedDepth, LearnedGate, Random
from support import METHODS, POSITIONS, VOCABULARY, ids, tiny


def by_forward(model, text, how: ScoreSettings) -> list[dict]:
    """What a forward without a cache says of each token: depth, gates, and logits after each of its iterations."""
    shown = []
    policy = how.policy
    if how.depths:
        rule = policy or model.method.default_policy(training=False)
        table = torch.tensor([how.depths.get(slot, 0) for slot in range(len(text))])

        def decide(rows):
            forced = table[rows.slot]
            return torch.where(forced > 0, rows.iteration + 1 < forced, rule(rows))

        policy = Custom(decide)
    with torch.no_grad():
        settings = {"policy": policy, "max_iterations": how.max_iterations, "seed": how.seed}
        output = model(torch.tensor([text]), **settings, output_iteration_logits=True, on_iteration=shown.append)
    log_p = [torch.log_softmax(logits[0], -1) for logits in output.iteration_logits]
    expected = []
    for slot in range(len(text)):
        active = [one for one in shown if one.active[0, slot]]
        gates = [float(one.gate[0, slot]) for one in active if one.gate is not None]
        logs = [log_p[one.index][slot] for one in active]
        expected.append({"depth": int(output.depth[0, slot]), "gates": gates, "logs": logs})
    return expected


def in_parts(scorer, text, how, size):
    """Scores a text part by part, and another text between parts; returns its scores and the number of parts."""
    parts, count = scorer.in_parts(text, how, size), 1
    while True:
        try:
            next(parts)
            count += 1
            scorer.score([3, *text[:4]], how)
        except StopIteration as end:
            return end.value, count


def check(model, scorer, text, how=None, size=None) -> int:
    """Compares with :func:`by_forward`; returns how many tokens were cached."""
    how = how or ScoreSettings(top=3)
    scores = scorer.score(text, how) if size is None else in_parts(scorer, text, how, size)[0]
    assert len(scores.tokens) == len(text)
    for slot, (score, expected) in enumerate(zip(scores.tokens, by_forward(model, text, how), strict=True)):
        assert score.depth == expected["depth"]
        assert score.gates == pytest.approx(expected["gates"], abs=1e-12)
        assert len(score.top) == len(score.nll) == len(expected["logs"])
        for top, logs in zip(score.top, expected["logs"], strict=True):
            values, likeliest = logs.topk(min(how.top, VOCABULARY))
            assert [token for token, _ in top] == likeliest.tolist()
            assert [value for _, value in top] == pytest.approx(values.tolist(), abs=1e-12)
        if slot + 1 < len(text):
            losses = [-float(logs[text[slot + 1]]) for logs in expected["logs"]]
            assert score.nll == pytest.approx(losses, abs=1e-12)
    return scores.cached


@pytest.mark.parametrize("method", METHODS)
def test_edits_equal_an_uncached_forward(method):
    model = tiny(method)
    scorer = TokenScorer(model)
    text, generator = ids(1, 20)[0].tolist(), random.Random(0)
    assert check(model, scorer, text) == 0
    for place in (19, 18, 20, 14, 3, 0):  # the end, before it, a longer text, the middle, the beginning
        text = text[:place] + [generator.randrange(VOCABULARY) for _ in range(22 - place)]
        cached = check(model, scorer, text)
        assert cached == (place if place >= 14 else 0)
    assert check(model, scorer, text) == len(text)
    assert check(model, scorer, text[:5]) == 5
    assert check(model, scorer, text) == len(text)


@pytest.mark.parametrize(
    "how",
    [
        ScoreSettings(FixedDepth(2), top=1),
        ScoreSettings(Entropy(2.0), top=2),
        ScoreSettings(Random(0.5), seed=3, top=1),
        ScoreSettings(LearnedGate(0.3), 2, top=1),
        ScoreSettings(depths={0: 3, 4: 1, 13: 3, 60: 2}, top=1),
        ScoreSettings(Custom(lambda rows: rows.gate > 0.4), top=1),
    ],
    ids=["fixed", "entropy", "random", "at most 2", "forced", "callable"],
)
def test_any_policy_and_forced_depths(how):
    model = tiny()
    scorer = TokenScorer(model)
    text = ids(1, 14)[0].tolist()
    check(model, scorer, text, how)
    cached = check(model, scorer, [*text[:-1], 7, 8], how)
    assert cached == (0 if isinstance(how.policy, Custom) else 13)


@pytest.mark.parametrize(
    "how", [ScoreSettings(top=2), ScoreSettings(depths={0: 3, 13: 3}, top=1)], ids=["learned", "forced"]
)
def test_a_text_read_in_parts_equals_one_read_at_once(how):
    model = tiny()
    text = ids(1, 22)[0].tolist()
    for size in (1, 5, 22):
        scorer = TokenScorer(model)
        assert check(model, scorer, text, how, size) == 0
        assert check(model, scorer, [*text[:20], 9, 8, 7], how, size) == 20
    for scorer in (TokenScorer(model), TokenScorer(model, max_bytes=0)):
        assert in_parts(scorer, text, how, 5)[1] == 5
    scorer = TokenScorer(model)
    parts = scorer.in_parts(text, how, 8)
    next(parts)
    next(parts)
    parts.close()
    assert check(model, scorer, text, how) == 16, "a scoring that is given up keeps what it has"


def test_more_likeliest_tokens_are_told_of_tokens_that_were_read_without():
    model = tiny()
    scorer = TokenScorer(model)
    text = ids(1, 12)[0].tolist()
    assert not any(score.top for score in scorer.score(text, ScoreSettings()).tokens)
    for top in (3, 1, VOCABULARY + 5):
        assert check(model, scorer, text, ScoreSettings(top=top)) == 12


def test_notes_of_a_score_are_gone_when_it_says_something_else():
    scorer = TokenScorer(tiny())
    text = ids(1, 12)[0].tolist()
    for score in scorer.score(text, ScoreSettings()).tokens:
        score.notes["mark"] = True
    scores = scorer.score([*text[:8], 1, 2], ScoreSettings()).tokens
    assert [bool(score.notes) for score in scores] == [True] * 7 + [False] * 3  # the eighth has another next token


def test_texts_are_kept_apart_by_rule_seed_salt_and_limits():
    model = tiny()
    scorer = TokenScorer(model)
    text = ids(1, 12)[0].tolist()
    ways = [
        *(ScoreSettings(), ScoreSettings(salt="a"), ScoreSettings(max_iterations=2), ScoreSettings(LearnedGate(0.2))),
        *(ScoreSettings(Random(0.5), seed=1), ScoreSettings(Random(0.5), seed=2), ScoreSettings(depths={3: 1})),
    ]
    for how in ways:
        assert scorer.score(text, how).cached == 0
    for how in ways:
        assert scorer.score(text, how).cached == 12
    assert scorer.score(text, ScoreSettings(seed=9)).cached == 12  # the gate does not look at it


def test_only_the_last_texts_are_kept_and_few_bytes():
    scorer = TokenScorer(tiny(), max_texts=2)
    first, *others = [ids(1, 10, seed=seed)[0].tolist() for seed in range(3)]
    for text in (first, *others):
        scorer.score(text, ScoreSettings())
    assert [scorer.score(text, ScoreSettings()).cached for text in (*others, first)] == [10, 10, 0]
    small = TokenScorer(scorer.model, max_bytes=100)
    small.score(first, ScoreSettings())
    assert small.nbytes == 0


def test_a_text_that_branches_early_leaves_the_kept_one_alone(monkeypatch):
    monkeypatch.setattr(token_scores, "_WORTH_COPYING", 8)
    model = tiny()
    scorer = TokenScorer(model)
    text = ids(1, 50)[0].tolist()
    check(model, scorer, text)
    assert check(model, scorer, [*text[:20], 5, 6]) == 20  # a copy
    assert check(model, scorer, text) == 50
    assert check(model, scorer, [*text[:30], 5, 6]) == 30  # more than half is left: it is cut
    assert check(model, scorer, text) == 30


def test_what_cannot_be_scored_is_refused_by_name():
    scorer = TokenScorer(tiny())
    for text, how, field in (
        ([], ScoreSettings(), "prompt"),
        ([VOCABULARY], ScoreSettings(), "prompt"),
        ([1] * (POSITIONS + 1), ScoreSettings(), "prompt"),
        ([1, 2], ScoreSettings(depths={0: 9}), "depths"),
        ([1, 2], ScoreSettings(max_iterations=9), "max_iterations"),
    ):
        with pytest.raises(InputError, match=field):
            scorer.score(text, how)
    with pytest.raises(InputError, match="depths"):
        TokenScorer(tiny("loop")).score([1, 2], ScoreSettings(depths={0: 1}))
    broken = tiny()
    with torch.no_grad():
        broken.get_output_embeddings().weight.fill_(float("nan"))
    with pytest.raises(EvaluationError, match="finite"):
        TokenScorer(broken).score([1, 2, 3], ScoreSettings())
