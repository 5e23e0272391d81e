"""Encodes prompts: texts with the tokenizer, conversations with its chat template, which runs in a subprocess."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from adaponder.errors import InputError, in_one_line, panics_as_errors

Message = dict[str, str]


class TemplateRenderer:
    """Renders chat templates in a subprocess, started when needed and restarted after a template exceeded a limit.

    A template may use one second of processor time and ``mebibytes`` MiB, and write ``characters``. The subprocess
    ends when its standard input is closed, at the latest when this process ends.
    """

    def __init__(self, *, mebibytes: int = 64, characters: int = 1_000_000) -> None:
        self._limits = [str(mebibytes), str(characters)]
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._owner = 0

    def render(self, messages: Sequence[Message], **request: Any) -> tuple[str, list[tuple[int, int]]]:
        """Returns the text and the marked spans of ``render_jinja_template([messages], **request)``.

        Spans are (first, last + 1) characters. Raises :class:`InputError` if the template fails.
        """
        with self._lock:
            process = self._started()
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                # default=str: messages may hold values that JSON does not know, such as dates.
                process.stdin.write(json.dumps({"conversations": [list(messages)], **request}, default=str) + "\n")
                process.stdin.flush()
                line = process.stdout.readline()
            except OSError:
                line = ""
            answer: dict[str, Any] = json.loads(line) if line else self._ended(process)
        if "limit" in answer:
            raise InputError(f"the chat template needs more than {answer['limit']}")
        if "error" in answer:
            raise InputError(f"the chat template refuses this: {in_one_line(InputError(answer['error']))}")
        return answer["text"], [(first, last) for first, last in answer["spans"]]

    def _ended(self, process: subprocess.Popen[str]) -> dict[str, str]:
        """Closes the pipes of a process that has ended and returns why it ended."""
        self._process = None
        with suppress(OSError), process:  # the pipe is broken, with the rest of the request in its buffer
            pass
        status = process.wait()
        if status == -signal.SIGPROF:
            return {"limit": "1 s of processor time"}
        return {"error": f"its process ended with status {status}"}

    def _started(self) -> subprocess.Popen[str]:
        """Returns the running subprocess, started if necessary; after a fork, the child starts its own."""
        if self._process is None or self._process.poll() is not None or self._owner != os.getpid():
            command = [sys.executable, "-P", str(Path(__file__).with_name("renderer.py")), *self._limits]
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
            self._process, self._owner = subprocess.Popen(command, text=True, encoding="utf-8", **pipes), os.getpid()
        return self._process


_renderer = TemplateRenderer()


def encode(tokenizer: PreTrainedTokenizerBase, prompt: str | Sequence[int], *, special: bool = True) -> list[int]:
    """Returns the token ids of a prompt, text or ids; raises if there are none. ``special`` adds special tokens."""
    if isinstance(prompt, str):
        try:
            prompt.encode()
        except UnicodeEncodeError as error:  # surrogates stand for the undecodable bytes of an argument or a pipe
            raise InputError(f"prompt is not UTF-8 text (at character {error.start})") from None
    with panics_as_errors("prompt: the tokenizer cannot encode it"):
        ids = list(tokenizer(prompt, add_special_tokens=special).input_ids) if isinstance(prompt, str) else list(prompt)
    if not ids:
        raise InputError("prompt is empty; give at least one token")
    return ids


def has_template(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Returns whether the tokenizer has a chat template."""
    return bool(getattr(tokenizer, "chat_template", None))


def chat_text(
    field: str, tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], *, answers: bool = True
) -> str:
    """Returns the prompt for the assistant's next turn or, without ``answers``, for continuing the last message.

    Raises :class:`InputError` naming ``field`` if the tokenizer has no template, or if the template fails or needs more
    than a second of processor time, 64 MiB or a million characters.
    """
    if not has_template(tokenizer):
        raise InputError(
            f"{field}: the tokenizer has no chat template; leave {field} out, or train on conversations that "
            "adaponder prepare --chat wrote"
        )
    try:
        text, _ = _renderer.render(
            messages,
            chat_template=tokenizer.get_chat_template(),
            add_generation_prompt=answers,
            continue_final_message=not answers,
            **tokenizer.special_tokens_map,
        )
    except (InputError, ValueError) as problem:  # ValueError: several templates, none of them the default
        raise InputError(f"{field}: {in_one_line(problem)}") from None
    return text


def chat_ids(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> list[int]:
    """Encodes :func:`chat_text` without adding special tokens, since the template has them; errors name ``--chat``."""
    return encode(tokenizer, chat_text("--chat", tokenizer, messages), special=False)
