"""lm-eval over the family: its own model's answers, whatever the batch, and every token's cost in its place."""

import random

import pytest
import torch

pytest.importorskip("lm_eval", reason="the extra eval is not installed")

from lm_eval.api.instance import Instance
from lm_eval.evaluator import evaluate
from lm_eval.models.huggingface import HFLM

from adaponder.conversion.open import load
from adaponder.errors import InputError
from adaponder.evaluation.scoring import ScoringOptions
from adaponder.evaluation.tasks.harness import HarnessLM
from adaponder.evaluation.tasks.lm_tasks import find_tasks, open_task, quiet, run_task
from adaponder.evaluation.tasks.task_data import TaskData
from adaponder.methods.cost import cost_of
from adaponder.policies import Random
from harness_support import LAMBADA, POSITIONS, RECORDS, reader, stock, words, write_records

TASKS = tuple(RECORDS)
GENERATION = {"until": ["\n", ",", "er"], "max_gen_toks": 6, "do_sample": False}


@pytest.fixture(scope="module")
def manager():
    return find_tasks(TASKS)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    # Some must be cut, or the cutting is not compared.
    assert len(words().encode(LAMBADA[2]["text"])) > POSITIONS
    return TaskData(write_records(tmp_path_factory.mktemp("records")))


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """One stock checkpoint, opened by this package and by lm-eval."""
    folder = tmp_path_factory.mktemp("vanilla")
    stock().save_pretrained(folder)
    words().save_pretrained(folder)
    with quiet():
        theirs = HFLM(pretrained=str(folder), device="cpu", dtype="float64", batch_size=3)
    return load(str(folder), dtype="float64")[0], theirs


def opened(manager, name, data):
    task = open_task(manager, name, 0, data)
    if name == "triviaqa":
        task.task.set_config("generation_kwargs", dict(GENERATION))
    return task


@pytest.mark.parametrize("name", TASKS)
def test_scores_equal_those_of_lm_evals_own_model_item_by_item(name, manager, data, models):
    model, theirs = models
    with quiet():
        result = run_task(HarnessLM(model, words(), batch_size=2), opened(manager, name, data))
        task = opened(manager, name, data).task
        expected = evaluate(theirs, {"tasks": {name: task}, "groups": {}}, bootstrap_iters=0)
    assert len(result.samples) == len(RECORDS[name]) == len(expected["samples"][name])
    for ours, other in zip(result.samples, expected["samples"][name], strict=True):
        assert ours["arguments"] == other["arguments"]
        for part in ("resps", "filtered_resps"):
            assert_same(ours[part], other[part])
    scores = {key.split(",")[0]: value for key, value in expected["results"][name].items() if "_stderr" not in key}
    for metric in result.metrics:
        assert metric.value == pytest.approx(scores[metric.name.split(" ")[0]], rel=1e-12)


def flat(nested):
    """Every leaf in order: numbers, truths and texts."""
    return [leaf for part in nested for leaf in flat(part)] if isinstance(nested, (list, tuple)) else [nested]


def assert_same(result, expected):
    """Equal truths and texts, and numbers equal to float64's rounding."""
    result, expected = flat(result), flat(expected)
    assert [x for x in result if not isinstance(x, float)] == [x for x in expected if not isinstance(x, float)]
    numbers = [x for x in expected if isinstance(x, float)]
    assert [x for x in result if isinstance(x, float)] == pytest.approx(numbers, rel=1e-12, abs=1e-12)


def requests(kind: str, arguments: list[tuple], task: str = "some") -> list[Instance]:
    return [Instance(kind, {}, one, 0, (task, index, 1)) for index, one in enumerate(arguments)]


TEXTS = [row["text"] for row in LAMBADA] + ["A", "The miller slept while the river ran"]
PAIRS = [("She saw", " the door"), ("She saw", " the mill"), ("A", "."), ("A", ","), ("", "river")]
PAIRS += [(TEXTS[2], " ran past"), (TEXTS[1], " again and again")]
ASKED = {
    "loglikelihood": requests("loglikelihood", PAIRS),
    "loglikelihood_rolling": requests("loglikelihood_rolling", [(text,) for text in TEXTS]),
    "generate_until": requests("generate_until", [(text, GENERATION) for text in TEXTS]),
}


@pytest.mark.one_of(3)
@pytest.mark.parametrize("kind", ASKED)
@pytest.mark.parametrize(
    ("method", "policy"),
    [("adaponder", None), ("adaponder", Random(0.5)), ("mor", None), ("ponder", None), ("pause", None)],
)
def test_answers_depths_and_costs_do_not_depend_on_batch_or_order(kind, method, policy):
    model, how = reader(method), ScoringOptions(policy=policy, seed=3)
    alone = HarnessLM(model, words(), batch_size=1, how=how)
    expected = getattr(alone, kind)(ASKED[kind])
    order = list(range(len(expected)))
    for size in (3, len(expected)):
        random.Random(size).shuffle(order)
        together = HarnessLM(model, words(), batch_size=size, how=how)
        result = getattr(together, kind)([ASKED[kind][index] for index in order])
        assert_same(result, [expected[index] for index in order])
        assert together.meters["some"].spent().histogram == alone.meters["some"].spent().histogram
        assert together.meters["some"].cost == alone.meters["some"].cost
    depths = alone.meters["some"].histogram
    assert (sum(count > 0 for count in depths) > 1) == model.method.halts


@pytest.mark.parametrize("beside", [[], [(TEXTS[1], " again and again")]])
def test_a_context_of_spaces_alone_is_no_context(beside):
    """Its spaces belong to the continuation: nothing is scored from padding, whatever is in the batch."""
    harness = HarnessLM(reader(), words(), batch_size=2)
    spaces, spelled = (
        harness.loglikelihood(requests("loglikelihood", [pair, *beside]))
        for pair in [("  ", "the door"), ("", "  the door")]
    )
    assert_same(spaces, spelled)


def test_the_cost_of_a_task_is_that_of_reading_its_texts_once():
    model = reader()
    harness = HarnessLM(model, words(), batch_size=3)
    # The first two differ in their last token, which is not read: they share a reading.
    harness.loglikelihood(requests("loglikelihood", [("A", "."), ("A", ","), ("She saw", " the door")]))
    first, second = (torch.tensor([words().encode(text)[:-1]]) for text in ("A.", "She saw the door"))
    scored = second.shape[1] + 1 - len(words().encode("She saw"))
    expected = cost_of(model(first).depth, model.config, logits=1, dtype=model.dtype)
    expected += cost_of(model(second).depth, model.config, logits=scored, dtype=model.dtype)
    assert harness.meters["some"].cost == expected
    # Generation reads the prompt and all new tokens but the last.
    settings = {"until": [], "max_gen_toks": 5}
    harness.generate_until(requests("generate_until", [("She opened the door", settings)], "other"))
    prompt = torch.tensor([words().encode("She opened the door")])
    full = model.generate(prompt, max_new_tokens=5, do_sample=False, eos_token_id=0, pad_token_id=0)
    new = full.shape[1] - prompt.shape[1]
    read = model(full[:, :-1]).depth
    assert harness.meters["other"].cost == cost_of(read, model.config, logits=new, dtype=model.dtype)
    assert harness.meters["some"].cost == expected, "costs of another task are its own"


def test_a_row_that_has_stopped_costs_nothing_while_its_neighbours_go_on():
    model, prompts = reader(), ["The river", "She opened the door"]

    def spent(size: int, until: list[str]):
        harness = HarnessLM(model, words(), batch_size=size)
        options = [(prompt, {"until": until, "max_gen_toks": 8}) for prompt in prompts]
        return harness.generate_until(requests("generate_until", options)), harness.meters["some"].cost

    (first, second), full = spent(1, [])
    stop = next(letter for letter in first[:3] if letter not in second)
    texts, cost = spent(1, [stop])
    assert texts == [first.split(stop)[0], second]
    assert cost.tokens < full.tokens
    assert spent(2, [stop]) == (texts, cost)


def test_a_sampled_answer_depends_on_seed_and_repeat_alone():
    before = torch.get_rng_state()
    settings = {"do_sample": True, "temperature": 1.0, "max_gen_toks": 4, "until": []}
    options = requests("generate_until", [("The river", settings), ("A", settings), ("The river", settings)])
    model = reader()

    def sampled(size: int, seed: int, asked: list[Instance]) -> list[str]:
        return HarnessLM(model, words(), batch_size=size, how=ScoringOptions(seed=seed)).generate_until(asked)

    first, again, other = sampled(1, 1, options), sampled(3, 1, options), sampled(3, 2, options)
    turned = sampled(3, 1, options[1:])
    assert first == again
    assert turned == [first[1], first[0]]
    assert first[0] != first[2]
    assert first != other
    assert torch.equal(before, torch.get_rng_state())


def test_bad_settings_name_the_option():
    with pytest.raises(InputError, match="--batch-size 0"):
        HarnessLM(reader(), words(), batch_size=0)
    many = words().__class__(tokenizer_object=words().backend_tokenizer, eos_token=words().eos_token)
    many.add_tokens([f"extra{n}" for n in range(10)])
    with pytest.raises(InputError, match="--tokenizer"):
        HarnessLM(reader(), many)
    ends = words().__class__(tokenizer_object=words().backend_tokenizer)
    with pytest.raises(InputError, match="--tokenizer"):
        HarnessLM(reader(), ends)
    harness = HarnessLM(reader(), words())
    with pytest.raises(InputError, match="prompt"):
        harness.generate_until(requests("generate_until", [("A", {"max_gen_toks": POSITIONS})], "long"))
    for name in ("num_beams", "width"):
        with pytest.raises(InputError, match=f"generation_kwargs: .*{name}"):
            harness.generate_until(requests("generate_until", [("A", {"max_gen_toks": 2, name: 2})]))
    with pytest.raises(InputError, match="continuation"):
        harness.loglikelihood(requests("loglikelihood", [("A", " xyz" * POSITIONS)], "long"))
