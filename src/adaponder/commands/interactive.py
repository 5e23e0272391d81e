"""adaponder generate --interactive: prompt after prompt, each continued, or answered, as it is generated."""

from __future__ import annotations

import signal
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from adaponder.commands.live import LiveText
from adaponder.commands.options import GenerateOptions
from adaponder.commands.subject import choose_policy
from adaponder.errors import AdaPonderError, InputError
from adaponder.inference.engine import Engine
from adaponder.inference.request import Request, check_request
from adaponder.modeling import AdaPonderForCausalLM
from adaponder.policies import Policy, parse_policy
from adaponder.terminal import console, errors, legend, line, table
from adaponder.text import TextEngine, Writing, chat_ids, pieces

COMMANDS = {
    "/policy RULE": "who decides depth, as --policy: /policy fixed:2; alone: the model's own rule",
    "/tau X": "another threshold for the learned gate; alone: the model's own rule",
    "/profile NAME": "a budget that adaponder calibrate stored",
    "/iterations N": "read no token more often than this; alone: as often as the model may",
    "/temperature X": "of the sampling; 0: always the likeliest token",
    "/top-p X": "sample from the likeliest tokens of this total probability",
    "/top-k N": "sample from the N likeliest tokens; 0: from all",
    "/max N": "how many tokens to add",
    "/seed N": "everything random follows this; it grows by one with each prompt",
    "/new": "with --chat: begin another conversation",
    "/settings": "show what is set",
    "/help": "show this",
    "/quit": "leave, as Ctrl-D does; Ctrl-C ends a text and not the program",
}


# Options that a command sets, where its name is another.
_OPTIONS = {"iterations": "max-iterations", "max": "max-new-tokens"}
_MOST = 10**18 - 1  # of whole numbers


class Interruption:
    """Within it Ctrl-C is noted and interrupts nothing: a step of the engine is done or not begun."""

    def __init__(self) -> None:
        self.asked = False
        self._before: Any = None

    def __enter__(self) -> Interruption:
        if threading.current_thread() is threading.main_thread():  # no other can
            self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _note(self, *about: object) -> None:
        self.asked = True


class Conversation:
    """Reads lines, obeys those that begin with a slash, and continues the others, or answers them with ``--chat``."""

    def __init__(
        self,
        model: AdaPonderForCausalLM,
        tokenizer: PreTrainedTokenizerBase,
        folder: Path,
        options: GenerateOptions,
        policy: Policy | None,
    ):
        self.model, self.tokenizer, self.folder = model, tokenizer, folder
        self.options, self.policy = options, policy
        self.said: list[dict[str, str]] = []  # with --chat: all that both have said
        self.engine = TextEngine(Engine(model, lanes=1, drafts=options.drafts), tokenizer)

    def run(self) -> None:
        """Asks for prompts until there is no more input, or ``/quit``."""
        if self.options.chat:
            chat_ids(self.tokenizer, [_user("?")])  # says now what would be wrong with every line
        done = "answered" if self.options.chat else "continued"
        console.print(line(f"Text is {done}. ", ("/help", "bold"), " says what else can be typed."))
        console.print(legend(self.options.max_iterations or self.model.config.iterations))
        while True:
            try:
                text = console.input(line(("> ", "bold")))
            except KeyboardInterrupt:
                console.print()
                continue
            except EOFError:
                console.print()
                return
            if text.split()[:1] == ["/quit"]:
                return
            if text.strip():
                self.answer(text)

    def answer(self, text: str) -> None:
        """Obeys or continues one line; what is wrong with it is said, and changes nothing."""
        try:
            if text.startswith("/"):
                self.obey(*text[1:].split(None, 1))
            else:
                self.write(text)
        except AdaPonderError as error:
            errors.print(line(("error:", "bold red"), " ", str(error)), soft_wrap=True)

    def write(self, prompt: str) -> None:
        """Continues the prompt, shown as it grows; Ctrl-C ends it."""
        settings = self.options.request_settings() | {"policy": self.policy}
        asked = [*self.said, _user(prompt)]
        given = chat_ids(self.tokenizer, asked) if self.options.chat else prompt
        (writing,) = self._submit(given, settings)
        deepest = self.options.max_iterations or self.model.config.iterations
        live = LiveText(deepest, colours=self.options.depth_colours)
        with live:
            if not self.options.chat:
                live.say("".join(pieces(self.tokenizer, writing.request.prompt)), style="bold")
            with Interruption() as interruption:
                self.engine.finish(live.show, until=lambda: interruption.asked)
        ended = {"length": "", "stop": "ended by itself; ", "cancelled": "stopped; "}
        console.print(ended.get(writing.finish_reason or "", "") + live.speed(), style="dim")
        self.options = replace(self.options, seed=self.options.seed + 1)
        if self.options.chat:
            # Templates write the break after a turn themselves.
            self.said = [*asked, {"role": "assistant", "content": writing.text.rstrip()}]

    def _submit(self, given: str | list[int], settings: dict[str, Any]) -> list[Writing]:
        try:
            return self.engine.submit(given, stops=self.options.stop, **settings)
        except InputError as error:
            message = _by_command("max", str(error))
            if not self.said:
                raise InputError(message) from None
            raise InputError(f"{message}; /new begins another conversation, /max asks for fewer tokens") from None

    def obey(self, command: str = "", value: str = "") -> None:
        """Sets what a command names; raises, with nothing changed, if it cannot be."""
        if command == "help":
            console.print(table("", ("command", ""), COMMANDS.items()))
            return
        if command == "settings":
            self.show_settings()
            return
        if command == "new":
            self.begin_anew()
            return
        try:
            self._set(self._changes(command, value.strip()))
        except InputError as error:
            message = _by_command(command, str(error))
            named = message.startswith(f"/{command}")
            raise InputError(message if named else f"/{command} {value.strip()}: {message}") from None
        self.show_settings()

    def _set(self, changes: dict[str, object]) -> None:
        options = replace(self.options, **changes)
        policy = choose_policy(self.model, self.folder, options)
        self._check(Request(prompt=[0], policy=policy, **options.request_settings()))
        self.options, self.policy = options, policy

    def begin_anew(self) -> None:
        """Forgets what was said."""
        if not self.options.chat:
            raise InputError("/new: every prompt begins anew; with --chat, what was said before it is read too")
        self.said = []
        console.print("A new conversation.", style="dim")

    def _check(self, request: Request) -> None:
        """Raises if no prompt could be continued so."""
        engine, iterations = self.engine.engine, self.model.config.iterations
        check_request(request, self.model, positions=engine.tokens, iterations=iterations, eos_ids=engine.eos_ids)

    def _changes(self, command: str, value: str) -> dict[str, object]:
        """The options that a command changes."""
        depth: dict[str, object] = {"policy": None, "tau": None, "profile": None}
        if command == "policy":
            return depth | {"policy": parse_policy(value) if value else None}
        if command == "tau":
            return depth | {"tau": _number("/tau", value, 0, 1) if value else None}
        if command == "profile":
            return depth | {"profile": value or None}
        if command == "iterations":
            return {"max_iterations": _whole("/iterations", value, 1) if value else None}
        if command == "temperature":
            heat = _number("/temperature", value, 0, 100)
            return {"greedy": heat == 0, "temperature": heat or self.options.temperature}
        if command == "top-p":
            if not (share := _number("/top-p", value, 0, 1)):
                raise InputError("/top-p 0: a number above 0 is needed; /temperature 0 takes the likeliest token")
            return {"top_p": share}
        whole = {"top-k": ("top_k", 0), "max": ("max_new_tokens", 1), "seed": ("seed", 0)}
        if command in whole:
            name, least = whole[command]
            return {name: _whole(f"/{command}", value, least)}
        raise InputError(f"/{command}: there is no such command; /help lists them")

    def show_settings(self) -> None:
        """Prints what the next prompt is continued with."""
        options = self.options
        depth = "the model's own rule" if self.policy is None else self.policy.as_line()
        most = options.max_iterations or self.model.config.iterations
        heat = 0 if options.greedy else options.temperature
        console.print(
            f"depth: {depth}, at most {most}; temperature {heat:g}, top-p {options.top_p:g}, top-k {options.top_k}; "
            f"max {options.max_new_tokens}, seed {options.seed}",
            style="dim",
        )


def _user(said: str) -> dict[str, str]:
    return {"role": "user", "content": said}


def _by_command(command: str, message: str) -> str:
    """``message``, which may begin with an option or a field, beginning with the command that sets it."""
    option = _OPTIONS.get(command, command)
    for name in (f"--{option} ", f"{option.replace('-', '_')}="):
        if message.startswith(name):
            return f"/{command} {message.removeprefix(name)}"
    return message


def _number(command: str, text: str, least: float, most: float) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not least <= value <= most:
        raise InputError(f"{f'{command} {text}'.strip()}: a number from {least:g} to {most:g} is needed")
    return value


def _whole(command: str, text: str, least: int) -> int:
    if not text.isdecimal() or len(text) > 18 or not least <= int(text) <= _MOST:
        raise InputError(f"{f'{command} {text}'.strip()}: a whole number from {least} to {_MOST:,} is needed")
    return int(text)
