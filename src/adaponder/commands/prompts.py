"""Prompts from the command line, a file or standard input."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from adaponder.commands.options import GenerateOptions
from adaponder.errors import InputError, shown

STANDARD_INPUT = "-"


def prompts_of(options: GenerateOptions) -> list[str]:
    """Every prompt that the options name, in their order; standard input if they name none and it is piped."""
    texts: Sequence[str] = (options.prompt,) if isinstance(options.prompt, str) else options.prompt
    prompts = [_standard_input("--prompt -") if text == STANDARD_INPUT else text for text in texts]
    if options.prompt_file is not None:
        prompts += _from_file(options.prompt_file)
    if not texts and options.prompt_file is None:
        if sys.stdin is None or sys.stdin.isatty():
            raise InputError("--prompt: say what to go on from; or --prompt-file, --interactive, or text piped in")
        prompts = [_standard_input("--prompt")]
    if "" in prompts:
        raise InputError("--prompt is empty: give at least one token")
    return prompts


def _from_file(path: Path) -> list[str]:
    said = f"--prompt-file {path}"
    if str(path) == STANDARD_INPUT:
        text = _standard_input(said)
    else:
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise InputError(f"{said}: it is not UTF-8 text ({error.reason} at byte {error.start})") from None
        except (OSError, ValueError) as error:
            raise InputError(f"{said}: it cannot be read: {getattr(error, 'strerror', None) or error}") from None
    # As files have lines: str.splitlines would also break at form feeds and other separators within a prompt.
    lines = enumerate(text.split("\n"), start=1)
    kept = [(number, line.removesuffix("\r")) for number, line in lines if line.strip()]
    if not kept:
        raise InputError(f"{said}: there is no prompt in it; one prompt per line is needed")
    if path.suffix != ".jsonl":
        return [line for _, line in kept]
    return [_from_json(line, f"{said}, line {number}") for number, line in kept]


def _from_json(line: str, said: str) -> str:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        raise InputError(f'{said}: {shown(line)} is no JSON; each line is an object, as {{"prompt": "text"}}') from None
    prompt = record.get("prompt") if isinstance(record, dict) else None
    if not isinstance(prompt, str) or not prompt:
        raise InputError(f'{said}: the field prompt must be a text that is not empty, as in {{"prompt": "text"}}')
    return prompt


def _standard_input(said: str) -> str:
    """All of standard input, without the line break at its end."""
    try:
        text = sys.stdin.read()
    except (OSError, ValueError) as error:  # closed, or bytes that are no text
        raise InputError(f"{said}: standard input cannot be read: {error}") from None
    text = text.removesuffix("\n").removesuffix("\r")
    if not text:
        raise InputError(f"{said}: standard input is empty; give a prompt")
    return text
