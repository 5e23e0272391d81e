"""adaponder generate: prompts from everywhere, many at once, stop strings, and a loop that Ctrl-C does not end."""

import copy
import io
import json
import os
import re
import signal
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from rich.console import ColorSystem, Console
from rich.text import Text
from typer.testing import CliRunner

from adaponder import cli
from adaponder.backbones.shape import shape_of
from adaponder.commands import generate, interactive
from adaponder.errors import InputError
from adaponder.evaluation.meter import Meter
from adaponder.policies import Entropy
from adaponder.terminal import Screen, plain
from adaponder.text import TextEngine, Writing
from harness_support import reader, words

GREEDY = ("--greedy", "--max-new-tokens", "8")


def invoke(*arguments: str, typed: str | None = None):
    result = CliRunner().invoke(cli.app, ["generate", *arguments], env={"COLUMNS": "100"}, input=typed)
    assert result.exit_code == 0, f"{result.output} {result.exception!r}"
    return result.output


def texts(checkpoint, tmp_path, *arguments: str, typed: str | None = None) -> list[str]:
    invoke(checkpoint, *arguments, "--json", str(tmp_path / "out.json"), typed=typed)
    completions = json.loads((tmp_path / "out.json").read_text())["completions"]
    return [completion["prompt"] + completion["text"] for completion in completions]


def prompts_read(monkeypatch, typed: str | None = None, **options) -> list[str]:
    monkeypatch.setattr(sys, "stdin", io.StringIO(typed or ""))
    return generate.read_prompts(options.get("prompt"), options.get("prompt_file"))


def test_prompts_come_from_arguments_files_and_standard_input(monkeypatch, tmp_path):
    lines, records = tmp_path / "some.txt", tmp_path / "some.jsonl"
    lines.write_text("The river\r\n\n  the mill\x0cran\n")
    records.write_text('{"prompt": "one\\ntwo", "id": 3}\n{"prompt": "three"}\n')
    for expected, options in (
        (["a"], {"prompt": "a"}),
        (["a", "c\nd"], {"prompt": ("a", "-"), "typed": "c\nd\n"}),
        (["piped in"], {"typed": "piped in\n"}),
        (["The river", "  the mill\x0cran"], {"prompt_file": lines}),
        (["a", "one\ntwo", "three"], {"prompt": ("a",), "prompt_file": records}),
        (["c", "d"], {"prompt_file": Path("-"), "typed": "c\nd\n"}),
    ):
        assert prompts_read(monkeypatch, **options) == expected


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.jsonl", b'{"prompt": 5}', "line 1: .*the field prompt"),
        ("x.jsonl", b'{"prompt": "a"}\n{"text": "a"}', "line 2: .*the field prompt"),
        ("x.jsonl", b"\n[", "line 2: '\\['"),
        ("x.jsonl", b"[" * 100_000, "line 1"),
        ("x.txt", b"\n \n", "holds no prompt"),
        ("x.txt", b"\xff\xfe", "not UTF-8"),
        ("missing", None, "cannot be read"),
    ],
)
def test_a_file_without_prompts_is_refused_by_name_and_line(monkeypatch, tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=f"--prompt-file .*{name}.*{message}") as error:
        prompts_read(monkeypatch, prompt_file=tmp_path / name)
    assert "\n" not in str(error.value)


def test_no_prompt_at_all_is_wrong_use(monkeypatch):
    for typed, prompt in (("", None), ("\n", None), ("", "")):
        with pytest.raises(InputError, match=r"--prompt.* is empty"):
            prompts_read(monkeypatch, typed=typed, prompt=prompt)
    monkeypatch.setattr(sys, "stdin", Mock(**{"isatty.return_value": True}))
    with pytest.raises(InputError, match="--prompt is needed"):
        generate.read_prompts(None)


def test_prompts_together_are_continued_as_each_alone(checkpoint, tmp_path):
    prompts = ["The river ran", "A", "mill past the mill"]
    alone = [texts(checkpoint, tmp_path, "--prompt", prompt, *GREEDY)[0] for prompt in prompts]
    arguments = [word for prompt in prompts for word in ("--prompt", prompt)]
    assert texts(checkpoint, tmp_path, *arguments, *GREEDY, "--lanes", "2") == alone
    assert texts(checkpoint, tmp_path, "--prompt-file", "-", *GREEDY, typed="\n".join(prompts)) == alone
    assert all(text.startswith(prompt) for text, prompt in zip(alone, prompts, strict=True))


def test_samples_differ_and_follow_the_seed(checkpoint, tmp_path):
    base = ("--prompt", "The", "--samples", "3", "--max-new-tokens", "6")
    first, again = (texts(checkpoint, tmp_path, *base, "--seed", "4") for _ in range(2))
    assert first == again
    assert len(set(first)) == 3
    shown = invoke(checkpoint, *base)
    assert re.search(r"^mean depth [\d.]+ of 3, [\d.]+ MFLOP/token, [\d.]+ x vanilla, [\d,]+ tokens/s", shown, re.M)
    assert "read  1x" not in shown, "a key of colours where there are none"
    assert "What it cost" in invoke(checkpoint, *base, "--stats")


@pytest.mark.parametrize("expansion", [0, 7])
def test_tokens_cost_together_what_each_costs_after_those_before_it(monkeypatch, expansion):
    """Covers mor, which drops halted tokens, and compressed keys, which each pass decompresses one token at a time."""
    model = reader("mor")
    shape = replace(shape_of(model.config), expansion=expansion)
    depths = [1, 3, 2, 2, 1, 3, 1, 1, 3, 2, 1, 3]
    adds, add = [], Meter.add
    monkeypatch.setattr(Meter, "add", lambda self, *parts, **how: (adds.append(parts), add(self, *parts, **how)))
    rule = Entropy(1.0)
    _, decode = generate._cost(model, depths, 3, shape, policy=rule)
    assert len(adds) == 1 + (9 if expansion else 1)
    each = Meter(model.config, dtype=model.dtype, device=model.device, shape=shape)
    for slot in range(3, len(depths)):
        each.add(torch.tensor([depths[slot : slot + 1]]), past=torch.tensor([depths[:slot]]), logits=1, policy=rule)
    assert decode == each.spent()


def test_a_stop_string_ends_the_text_before_it(checkpoint, tmp_path):
    (whole,) = texts(checkpoint, tmp_path, "--prompt", "The river", *GREEDY)
    added = whole.removeprefix("The river")
    stop = added[3:6]
    (text,) = texts(checkpoint, tmp_path, "--prompt", "The river", *GREEDY, "--stop", "nowhere", "--stop", stop)
    assert text == "The river" + added[: added.index(stop)]
    completion = json.loads((tmp_path / "out.json").read_text())
    assert completion["finish_reason"] == "stop"
    assert len(completion["tokens"]) == len(completion["depths"])


def screen_after(sent: str) -> list[str]:
    """Returns the lines that a terminal shows; obeys cursor moves and erased lines."""
    lines, row, column = [""], 0, 0
    for moved, letter, other in re.findall(r"\x1b\[([?0-9;]*)([A-Za-z])|(.|\n)", sent):
        if letter == "A":
            row -= int(moved or 1)
        elif letter == "K":
            lines[row] = ""
        elif other == "\r":
            column = 0
        elif other == "\n":
            row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
        elif other:
            lines[row] = lines[row][:column].ljust(column) + other + lines[row][column + 1 :]
            column += 1
    return lines


def test_one_prompt_is_shown_as_it_grows(monkeypatch, checkpoint):
    terminal = Screen()
    terminal._color_system = ColorSystem.TRUECOLOR
    terminal.file, terminal._force_terminal, terminal.is_interactive, terminal.width = io.StringIO(), True, True, 40
    for module in ("commands.generate", "commands.interactive", "terminal"):
        monkeypatch.setattr(f"adaponder.{module}.console", terminal)
    monkeypatch.setattr(interactive, "_REFRESH", 0.0)
    (done,) = generate.generate(checkpoint, prompt=["The river ran"], greedy=True, max_new_tokens=40)
    sent = terminal.file.getvalue()
    speeds = [int(tokens) for tokens in re.findall(r"(\d+) tokens, [\d.,]+ tokens/s, mean depth", sent)]
    assert speeds[0] < 5
    assert speeds == sorted(speeds)
    text = Text(plain("".join(done.pieces))).wrap(Console(width=40), 40)
    assert len(text) > 1
    shown = [line.rstrip() for line in screen_after(sent)]
    assert shown[: len(text)] == [line.plain.rstrip() for line in text], "the text stays, and nothing else of it"
    assert "tokens/s, mean depth" not in "".join(shown)
    assert shown[len(text) + 1].startswith("read  1x  2x  3x   mean depth")


def conversation(checkpoint, *lines: str) -> str:
    return invoke(checkpoint, "--interactive", *GREEDY, typed="".join(f"{line}\n" for line in lines))


def test_a_conversation_continues_prompts_and_obeys_commands(checkpoint, tmp_path):
    (whole,) = texts(checkpoint, tmp_path, "--prompt", "The river ran", *GREEDY)
    shown = conversation(checkpoint, "The river ran", "", "/max 2", "The river ran", "/quit now", "never read")
    assert plain(whole).rstrip() in shown
    assert "8 tokens, " in shown
    assert "2 tokens, " in shown
    assert "never read" not in shown
    shown = conversation(checkpoint, "/help", "/policy fixed:1", "A", "/tau 0.5", "/temperature 0.7", "/settings")
    assert "mean depth 1.00" in shown
    assert "/temperature X" in shown
    assert "fixed:1" in shown
    assert "temperature 0.7" in shown


_WRONG = """
/nothing | / | /tau 2 | /policy wild:1 | /policy ranked-uniform:0.5 | /policy fixed:99 | /max | /max 1.5 |
/max 999999999999 | /temperature nan | /top-p 0 | /seed x | /seed -1 | /iterations 99 | /profile none
"""
WRONG = [line.strip() for line in _WRONG.split("|")]


def test_a_wrong_command_is_named_and_changes_nothing(checkpoint):
    shown = conversation(checkpoint, *WRONG, "A", "/settings")
    errors = shown.split("error: ")[1:]
    assert len(errors) == len(WRONG)
    assert all(error.startswith(line) for line, error in zip(WRONG, errors, strict=True))
    assert "8 tokens, " in shown
    assert "depth: the model's own rule, at most 3; temperature 0, top-p 1, top-k 0; max 8" in shown


def test_ctrl_c_ends_the_text_and_not_the_program(monkeypatch, checkpoint):
    show = interactive.LiveText.show

    def interrupted(self, event):
        if len(event.writing.tokens) == 3 and event.writing.finish_reason is None:
            os.kill(os.getpid(), signal.SIGINT)
        show(self, event)

    monkeypatch.setattr(interactive.LiveText, "show", interrupted)
    before = signal.getsignal(signal.SIGINT)
    shown = conversation(checkpoint, "The river ran", "/max 2", "A")
    assert "stopped; 3 tokens, " in shown or "stopped; 4 tokens, " in shown
    assert "2 tokens, " in shown
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_ctrl_c_ends_a_step_that_takes_long():
    before = signal.getsignal(signal.SIGINT)
    with interactive.ctrl_c_noted() as interrupted:
        signal.raise_signal(signal.SIGINT)
        assert interrupted()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_shows_and_writes_what_was_generated(monkeypatch, checkpoint, tmp_path):
    step, signals = TextEngine.step, [signal.SIGINT]

    def interrupted(self):
        if signals and any(writing.finish_reason for writings in self._writings.values() for writing in writings):
            signal.raise_signal(signals.pop())
        return step(self)

    monkeypatch.setattr(TextEngine, "step", interrupted)
    out = tmp_path / "out.json"
    with pytest.raises(KeyboardInterrupt):
        generate.generate(checkpoint, prompt=["a", "b"], samples=2, lanes=1, max_new_tokens=5, greedy=True, json=out)
    completions = json.loads(out.read_text())["completions"]
    assert [completion["finish_reason"] for completion in completions] == ["length"] + ["cancelled"] * 3
    assert completions[0]["text"]


TEMPLATE = (
    "{% for m in messages %}{% if m.content == 'refuse' %}{{ raise_exception('not that') }}{% endif %}"
    "<{{ m.role[0] }}>{{ m.content }}{% endfor %}<a>"
)


@pytest.fixture(scope="module")
def chatting(tmp_path_factory):
    """Saves the same model with a tokenizer that has a chat template."""
    folder = tmp_path_factory.mktemp("chat") / "ada"
    reader().save_pretrained(folder)
    tokenizer = copy.deepcopy(words())  # which others share
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return str(folder)


def test_a_conversation_remembers_what_both_said_until_it_begins_anew(chatting, checkpoint, tmp_path):
    first, alone = texts(chatting, tmp_path, "--chat", "--prompt", "The river", "--prompt", "ran", *GREEDY)
    assert [first] == texts(checkpoint, tmp_path, "--prompt", "<u>The river<a>", *GREEDY)
    (second,) = texts(checkpoint, tmp_path, "--prompt", f"{first}<u>ran<a>", *GREEDY)
    first, second, alone = (plain(whole.rpartition("<a>")[2]).strip() for whole in (first, second, alone))
    assert second != alone, "the template's turns before it are read"
    lines = ("The river", "refuse", "ran", "/new", "ran")
    shown = invoke(chatting, "--interactive", "--chat", *GREEDY, typed="".join(f"{line}\n" for line in lines))
    answers = [answer.partition("8 tokens, ")[0] for answer in re.split("\n?> ", shown)[1:]]
    assert first in answers[0]
    assert "the chat template refuses this: not that" in shown
    assert second in answers[2], "a refused line is not remembered"
    assert alone in answers[4]


def test_a_turn_ends_where_its_words_do_and_a_full_conversation_says_what_to_do(chatting, monkeypatch):
    monkeypatch.setattr(Writing, "text", property(lambda self: "an answer\n\n"))
    shown = invoke(chatting, "--interactive", "--chat", *GREEDY, typed="The river\n/max 90\nran\n")
    assert "; /new begins another conversation, /max asks for fewer tokens" in " ".join(shown.split())
    asked = []
    monkeypatch.setattr(interactive, "chat_ids", lambda tokenizer, said: asked.append(said) or [1, 2])
    invoke(chatting, "--interactive", "--chat", *GREEDY, typed="The river\nran\n")
    assert asked[-1][1] == {"role": "assistant", "content": "an answer"}


def test_without_a_template_or_a_conversation_it_says_what_to_do(checkpoint):
    for more in (("--prompt", "A"), ("--interactive",)):
        result = CliRunner().invoke(cli.app, ["generate", checkpoint, "--chat", *more], input="A\n")
        assert isinstance(result.exception, InputError)
        assert "--chat: the tokenizer has no chat template; leave --chat out" in str(result.exception)
    assert "error: /new needs --chat" in conversation(checkpoint, "/new")
