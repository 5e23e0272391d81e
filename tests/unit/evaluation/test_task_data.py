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
from harness_support import ARC, LAMBADA, write_records

HELLASWAG = [
    {
        "ind": 1,
        "activity_label": "Roof",
        "ctx_a": "A man sits.",
        "ctx_b": "he",
        "ctx": "",
        "endings": ["runs.", "sits.", "eats.", "[step] flies."],
        "label": label,
    }
    for label in ("3", "0")
]
SCIQ = [
    {
        "question": "What?",
        "support": " It is ice.",
        "distractor1": "a",
        "distractor2": "b",
        "distractor3": "c",
        "correct_answer": "ice",
    }
]
WINOGRANDE = [
    {"sentence": "The cup fit the box as the _ was small.", "option1": "cup", "option2": "box", "answer": "1"}
]
PIQA = [{"goal": "open a door", "sol1": "pull it", "sol2": "eat it", "label": 0}]
PROBLEMS = [
    {"question": "Who ran?", "answer": "B", "options": ["a", "b", "c", "d"]},
    {"question": "It is  _  .", "answer": "A", "options": ["e", "f", "g", "h"]},
]
RACE = [{"article": "Some article.", "problems": repr(PROBLEMS)}]
NINE = {
    "lambada_openai": LAMBADA,
    "lambada_standard": LAMBADA,
    "arc_easy": ARC,
    "arc_challenge": ARC,
    "winogrande": WINOGRANDE,
    "piqa": PIQA,
    "hellaswag": HELLASWAG,
    "sciq": SCIQ,
    "race": RACE,
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
    "file",
    ["arc_easy/test.jsonl", "arc_easy/test.jsonl.xz", "arc_easy/test.jsonl.gz", "arc_easy_test.jsonl.xz"],
)
def test_a_file_is_found_by_task_and_split_packed_or_not(file, manager, tmp_path):
    write(tmp_path / file, ARC)
    opened = open_task(manager, "arc_easy", 0, TaskData(tmp_path))
    assert opened.file == tmp_path / file
    assert [dict(record) for record in opened.task.task_docs] == ARC


def test_published_names_are_known(manager, tmp_path):
    write(tmp_path / "hellaswag_val.jsonl.xz", HELLASWAG)
    write(tmp_path / "lambada_test_openai.jsonl.xz", LAMBADA)
    assert open_task(manager, "hellaswag", 0, TaskData(tmp_path)).split == "validation"
    assert open_task(manager, "lambada_openai", 0, TaskData(tmp_path)).split == "test"


def test_a_map_renames_files_and_splits(manager, tmp_path):
    write(tmp_path / "data" / "a.jsonl", ARC)
    write(tmp_path / "data" / "b.jsonl", ARC[:1])
    (tmp_path / "map.yaml").write_text(yaml.safe_dump({"arc_easy": {"test": "data/a.jsonl", "train": "data/b.jsonl"}}))
    for place in (tmp_path, tmp_path / "map.yaml"):
        opened = open_task(manager, "arc_easy", 1, TaskData(place))
        assert (opened.file, opened.split, opened.examples) == (tmp_path / "data/a.jsonl", "test", "train")


def test_where_the_evaluated_split_is_missing_the_other_one_is_used_and_named(manager, tmp_path):
    write(tmp_path / "sciq" / "validation.jsonl", SCIQ)
    opened = open_task(manager, "sciq", 0, TaskData(tmp_path))
    assert opened.split == "validation"
    assert len(opened.task.eval_docs) == 1


def test_the_training_split_is_never_evaluated(manager, tmp_path):
    write(tmp_path / "sciq" / "train.jsonl", SCIQ)
    with pytest.raises(InputError, match=r"sciq/test\.jsonl"):
        open_task(manager, "sciq", 0, TaskData(tmp_path))


@pytest.mark.parametrize(("name", "records"), [("arc_easy", ARC), ("lambada_openai", LAMBADA)])
def test_examples_without_a_training_split_are_an_error_that_names_the_file(name, records, manager, tmp_path):
    write(tmp_path / name / "test.jsonl", records)
    with pytest.raises(InputError, match=rf"{name}/train\.jsonl"):
        open_task(manager, name, 5, TaskData(tmp_path))


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
    records = [
        record | {"question": f"item {n}", "activity_label": f"item {n}"} for n, record in enumerate(NINE[name] * 2)
    ]
    records = records[:3]
    write(tmp_path / name / f"{split}.jsonl", records)
    (tmp_path / "map.yaml").write_text(yaml.safe_dump({name: {"fewshot": split}}))
    opened = open_task(manager, name, len(records) - 1, TaskData(tmp_path))
    assert opened.examples == split
    opened.task.build_all_requests()
    for request in opened.task.instances:
        assert [request.args[0].count(f"item {n}") for n in range(len(records))] == [1] * len(records)


def test_arc_as_first_released_is_the_same_task(manager, tmp_path):
    released = [
        {
            "id": record["id"],
            "question": {
                "stem": record["question"],
                "choices": [
                    {"text": text, "label": label}
                    for text, label in zip(record["choices"]["text"], record["choices"]["label"], strict=True)
                ],
            },
            "answerKey": record["answerKey"],
        }
        for record in ARC
    ]
    write(tmp_path / "arc_challenge" / "test.jsonl", released)
    assert TaskData(tmp_path).read("arc_challenge", "test") == ARC


@pytest.mark.parametrize(
    "records",
    [
        [{"article": "Some article.", "problems": PROBLEMS}],
        [
            {
                "article": "Some article.",
                "questions": [p["question"] for p in PROBLEMS],
                "answers": [p["answer"] for p in PROBLEMS],
                "options": [p["options"] for p in PROBLEMS],
                "id": "x",
            }
        ],
        [{"article": "Some article.", "example_id": "x", **problem} for problem in PROBLEMS],
    ],
)
def test_race_in_its_other_layouts_is_the_same_task(records, manager, tmp_path):
    write(tmp_path / "race" / "test.jsonl", records)
    assert TaskData(tmp_path).read("race", "test") == RACE


def refusals():
    good = json.dumps(ARC[0])
    yield "not json", good + "\nnot json\n", r"test\.jsonl: line 2"
    yield "no object", "[1]\n", "line 1"
    yield "deep", good + "\n" + '{"question": ' * 100_000, "line 2"
    yield "digits", '{"question": ' + "9" * 5000 + "}", "line 1"
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


def test_a_pipe_in_place_of_records_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "map.yaml").write_text("arc_easy: {test: pipe.jsonl}")
    with pytest.raises(InputError, match=r"arc_easy\.test"):
        TaskData(tmp_path).read("arc_easy", "test")


def test_a_torn_file_is_refused_by_name(tmp_path):
    write(tmp_path / "arc_easy" / "test.jsonl.xz", ARC)
    path = tmp_path / "arc_easy" / "test.jsonl.xz"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(InputError, match=r"test\.jsonl\.xz"):
        TaskData(tmp_path).read("arc_easy", "test")


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


def test_a_map_that_names_a_missing_file_is_refused(manager, tmp_path):
    (tmp_path / "map.yaml").write_text("arc_easy: {test: nowhere.jsonl}")
    with pytest.raises(InputError, match=r"arc_easy\.test"):
        open_task(manager, "arc_easy", 0, TaskData(tmp_path))


def test_a_folder_that_is_none_is_refused(tmp_path):
    with pytest.raises(InputError, match="--task-data"):
        TaskData(tmp_path / "nowhere")


def test_without_task_data_the_hub_is_asked_and_its_silence_told(manager):
    with pytest.raises(InputError, match="--task-data DIR"):
        open_task(manager, "arc_easy", 0, None)


def test_any_task_of_lm_eval_reads_records_that_have_its_fields(tmp_path):
    manager = find_tasks(("wikitext", "triviaqa"))
    data = TaskData(write_records(tmp_path))
    assert open_task(manager, "wikitext", 0, data).task.OUTPUT_TYPE == "loglikelihood_rolling"
    assert open_task(manager, "triviaqa", 0, data).task.OUTPUT_TYPE == "generate_until"
    write(tmp_path / "triviaqa" / "validation.jsonl", [{"question": "Who?"}])
    with pytest.raises(InputError, match="record 1"):
        open_task(manager, "triviaqa", 0, data)
