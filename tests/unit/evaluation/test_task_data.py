"""Task records from files: found by rule or by map, in the layout lm-eval reads, and every refusal names its file."""

import gzip
import json
import lzma
import os

import pytest
import yaml

pytest.importorskip("lm_eval", reason="the extra eval is not installed")

from adaponder.errors import InputError
from adaponder.evaluation.tasks.lm_tasks import find_tasks, open_task, quiet
from adaponder.evaluation.tasks.suites import PAPER
from adaponder.evaluation.tasks.task_data import TaskData
from harness_support import ARC, LAMBADA

WINOGRANDE = {"sentence": "The cup fit the box as the _ was small.", "option1": "cup", "option2": "box", "answer": "1"}
ENDINGS = ["runs.", "sits.", "eats.", "[step] flies."]
HELLASWAG = {"ind": 1, "activity_label": "Roof", "ctx_a": "A man sits.", "ctx_b": "he", "ctx": "", "endings": ENDINGS}
DISTRACTORS = {f"distractor{number}": word for number, word in enumerate("abc", 1)}
SCIQ = {"question": "What?", "support": " It is ice.", "correct_answer": "ice"} | DISTRACTORS
PROBLEMS = [
    {"question": "Who ran?", "answer": "B", "options": ["a", "b", "c", "d"]},
    {"question": "It is  _  .", "answer": "A", "options": ["e", "f", "g", "h"]},
]
NINE = {
    "lambada_openai": LAMBADA,
    "lambada_standard": LAMBADA,
    "arc_easy": ARC,
    "arc_challenge": ARC,
    "winogrande": [WINOGRANDE],
    "piqa": [{"goal": "open a door", "sol1": "pull it", "sol2": "eat it", "label": 0}],
    "hellaswag": [HELLASWAG | {"label": label} for label in "30"],
    "sciq": [SCIQ],
    "race": [{"article": "Some article.", "problems": repr(PROBLEMS)}],
}
EVALUATED = {"winogrande": "validation", "piqa": "validation", "hellaswag": "validation"}


@pytest.fixture(scope="module")
def manager():
    return find_tasks(tuple(NINE))


@pytest.fixture(autouse=True)
def silence():
    with quiet():
        yield


def write(path, records):
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(record) + "\n" for record in records)
    opener = {".xz": lzma.open, ".gz": gzip.open}.get(path.suffix, open)
    with opener(path, "wt") as file:
        file.write(text)


def test_every_task_of_the_suite_reads_the_public_fields(manager, tmp_path):
    assert set(NINE) == set(PAPER.tasks)
    for name, records in NINE.items():
        write(tmp_path / name / f"{EVALUATED.get(name, 'test')}.jsonl", records)
    for name, records in NINE.items():
        opened = open_task(manager, name, 0, TaskData(tmp_path))
        assert opened.split == EVALUATED.get(name, "test")
        opened.task.build_all_requests()
        assert len({request.doc_id for request in opened.task.instances}) == len(records)


@pytest.mark.parametrize(
    ("file", "name", "split"),
    [
        ("arc_easy/test.jsonl.gz", "arc_easy", "test"),
        ("arc_easy_test.jsonl.xz", "arc_easy", "test"),
        ("hellaswag_val.jsonl.xz", "hellaswag", "validation"),
        ("lambada_test_openai.jsonl.xz", "lambada_openai", "test"),
        ("sciq/validation.jsonl", "sciq", "validation"),  # where there is no test split
    ],
)
def test_a_file_is_found_by_task_and_split_compressed_or_not(file, name, split, manager, tmp_path):
    write(tmp_path / file, NINE[name])
    opened = open_task(manager, name, 0, TaskData(tmp_path))
    assert (opened.file, opened.split, len(opened.task.eval_docs)) == (tmp_path / file, split, len(NINE[name]))
    assert TaskData(tmp_path).read(name, split) == NINE[name]


def test_a_map_renames_files_and_splits(manager, tmp_path):
    write(tmp_path / "data" / "a.jsonl", ARC)
    write(tmp_path / "data" / "b.jsonl", ARC[:1])
    (tmp_path / "map.yaml").write_text(yaml.safe_dump({"arc_easy": {"test": "data/a.jsonl", "train": "data/b.jsonl"}}))
    for place in (tmp_path, tmp_path / "map.yaml"):
        opened = open_task(manager, "arc_easy", 1, TaskData(place))
        assert (opened.file, opened.split, opened.examples) == (tmp_path / "data/a.jsonl", "test", "train")


def test_examples_come_from_the_training_split_and_change_with_the_seed(manager, tmp_path):
    train = [record | {"question": f"Example {number}?"} for number in range(9) for record in ARC[:1]]
    write(tmp_path / "arc_easy" / "test.jsonl", ARC)
    write(tmp_path / "arc_easy" / "train.jsonl", train)

    def prompts(seed):
        opened = open_task(manager, "arc_easy", 2, TaskData(tmp_path), seed=seed)
        assert opened.examples == "train"
        opened.task.build_all_requests()
        return [request.args[0] for request in opened.task.instances]

    assert all(prompt.count("Example") == 2 for prompt in prompts(0))
    assert prompts(0) == prompts(0) != prompts(1)


def test_lambada_standard_draws_from_validation_as_lm_eval_does(manager, tmp_path):
    write(tmp_path / "lambada_standard" / "test.jsonl", LAMBADA)
    write(tmp_path / "lambada_standard" / "train.jsonl", [{"text": "a whole novel"}] * 3)
    with pytest.raises(InputError, match=r"lambada_standard/validation\.jsonl"):
        open_task(manager, "lambada_standard", 1, TaskData(tmp_path))
    write(tmp_path / "lambada_standard" / "validation.jsonl", [{"text": "a held out page"}] * 3)
    opened = open_task(manager, "lambada_standard", 1, TaskData(tmp_path))
    opened.task.build_all_requests()
    assert all("a held out" in request.args[0] for request in opened.task.instances)


@pytest.mark.parametrize(("name", "split"), [("arc_easy", "test"), ("hellaswag", "validation")])
def test_a_map_may_draw_examples_from_the_evaluated_split_and_no_item_sees_itself(name, split, manager, tmp_path):
    records = [row | {"question": f"item {n}", "activity_label": f"item {n}"} for n, row in enumerate(NINE[name] * 2)]
    records = records[:3]
    write(tmp_path / name / f"{split}.jsonl", records)
    (tmp_path / "map.yaml").write_text(yaml.safe_dump({name: {"fewshot": split}}))
    opened = open_task(manager, name, len(records) - 1, TaskData(tmp_path))
    assert opened.examples == split
    opened.task.build_all_requests()
    for request in opened.task.instances:
        assert [request.args[0].count(f"item {n}") for n in range(len(records))] == [1] * len(records)


def released_arc(record: dict) -> dict:
    """A record as in ARC's first release."""
    pairs = zip(*record["choices"].values(), strict=True)
    choices = [{"text": text, "label": label} for text, label in pairs]
    return record | {"question": {"stem": record["question"], "choices": choices}}


COLUMNS = {"questions": "question", "answers": "answer", "options": "options"}
RELEASED = {
    "arc_challenge": [released_arc(record) for record in ARC],
    "race": [
        {"article": "Some article.", "id": "x"}
        | {name: [problem[field] for problem in PROBLEMS] for name, field in COLUMNS.items()}
    ],
    "race, problems as a list": [{"article": "Some article.", "problems": PROBLEMS}],
    "race, a problem per record": [{"article": "Some article.", **problem} for problem in PROBLEMS],
}


@pytest.mark.parametrize("name", RELEASED)
def test_other_published_layouts_are_read_as_the_hubs(name, tmp_path):
    task = name.partition(",")[0]
    write(tmp_path / task / "test.jsonl", RELEASED[name])
    expected = [dict(record) for record in NINE[task]]
    records = TaskData(tmp_path).read(task, "test")
    assert [{field: record[field] for field in expected[0]} for record in records] == expected


def refusals():
    good = json.dumps(ARC[0])
    yield "not json", good + "\nnot json\n", r"test\.jsonl: line 2"
    yield "no object", "[1]\n", "line 1"
    yield "deep", good + "\n" + '{"question": ' * 100_000, "line 2"
    yield "surrogate", json.dumps(ARC[0] | {"question": "half \ud800"}), r"test\.jsonl"
    yield "empty", "\n", r"test\.jsonl"
    yield "fields", json.dumps({"question": "q", "choices": None}), "record 1 has no answerKey, choices"
    yield "layout", json.dumps({"question": {"stem": "q"}, "answerKey": "A"}), r"test\.jsonl: records of arc_easy"
    yield "kinds", good + "\n" + json.dumps(ARC[1] | {"question": 3}), r"test\.jsonl"
    yield "first", json.dumps(ARC[0] | {"answerKey": "Z"}), r"test\.jsonl"


@pytest.mark.parametrize(("text", "message"), [pytest.param(*rest, id=name) for name, *rest in refusals()])
def test_a_bad_file_is_refused_by_name(text, message, manager, tmp_path):
    (tmp_path / "arc_easy").mkdir()
    (tmp_path / "arc_easy" / "test.jsonl").write_text(text)
    with pytest.raises(InputError, match=message):
        open_task(manager, "arc_easy", 0, TaskData(tmp_path))


def test_what_is_not_a_whole_file_is_refused_by_name(manager, tmp_path):
    write(tmp_path / "arc_challenge" / "test.jsonl.xz", ARC)
    path = tmp_path / "arc_challenge" / "test.jsonl.xz"
    path.write_bytes(path.read_bytes()[:-20])
    os.mkfifo(tmp_path / "pipe.jsonl")
    write(tmp_path / "sciq" / "train.jsonl", [SCIQ])  # never evaluated
    (tmp_path / "map.yaml").write_text("arc_easy: {test: pipe.jsonl}\npiqa: {test: nowhere.jsonl}")
    wrong = {"arc_challenge": r"test\.jsonl\.xz", "arc_easy": r"arc_easy\.test", "piqa": r"piqa\.test"}
    for name, message in (wrong | {"sciq": r"sciq/test\.jsonl"}).items():
        with pytest.raises(InputError, match=message):
            open_task(manager, name, 0, TaskData(tmp_path))
    with pytest.raises(InputError, match="--task-data"):
        TaskData(tmp_path / "nowhere")
    with pytest.raises(InputError, match="--task-data DIR"):
        open_task(manager, "arc_easy", 0, None)  # the hub cannot be reached


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "map.yaml"),
        ("- a", "map.yaml"),
        ("arc_easy: easy.jsonl", "arc_easy must"),
        ("arc_easy: {fewshot: tset}", "arc_easy.fewshot"),
    ],
)
def test_a_bad_map_is_refused(text, message, tmp_path):
    (tmp_path / "map.yaml").write_text(text)
    with pytest.raises(InputError, match=message):
        TaskData(tmp_path)
