"""adaponder generate --interactive: reads prompts in a loop; streams continuations or, with --chat, answers."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, InitVar, dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, get_args

from rich.console import Group
from rich.live import Live
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from adaponder.commands.shared import Depth
from adaponder.errors import AdaPonderError, InputError
from adaponder.fields import REQUEST_FIELDS, check
from adaponder.inference.engine import Engine
from adaponder.inference.outputs import Token
from adaponder.inference.request import Request, check_request
from adaponder.modeling import AdaPonderForCausalLM
from adaponder.terminal import console, counted, depth_style, errors, legend, line, table
from adaponder.text import TextEngine, TextEvent, Writing, chat_ids, pieces

# The commands with which a line may begin, and what each sets or does.
COMMANDS = {
    "/policy RULE": "the policy, as --policy: /policy fixed:2; alone: the model's own rule",
    "/tau X": "another threshold for the learned gate; alone: the model's own rule",
    "/profile NAME": "a profile stored by adaponder calibrate",
    "/iterations N": "maximum depth of each token; alone: the model's own",
    "/temperature X": "sampling temperature; 0 always takes the most likely token",
    "/top-p X": "sample from the most likely tokens with this total probability",
    "/top-k N": "sample from the N most likely tokens; 0: from all",
    "/max N": "maximum number of tokens to generate",
    "/seed N": "random seed; it grows by one with each prompt",
    "/new": "with --chat: begin another conversation",
    "/settings": "show the settings",
    "/help": "show this",
    "/quit": "leave (as Ctrl-D); Ctrl-C only stops the current text",
}
# The fields of a request that are numbers, by the command that sets each.
_NUMBERS = {name: name.replace("-", "_") for name in ("temperature", "top-p", "top-k", "seed")}
_NUMBERS |= {"iterations": "max_iterations", "max": "max_new_tokens"}
_REFRESH = 0.08  # seconds between two updates of the screen


class LiveText:
    """Context manager that shows a text as it is generated, above a line with the speed, which is removed at the end.

    A token is coloured by its depth, which is known when the next token arrives, so text is shown one token late.
    """

    def __init__(self, deepest: int, *, colours: bool = True):
        self.deepest, self.colours = deepest, colours
        self.line = Text()
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._began = self._shown = time.perf_counter()
        self._writing: Writing | None = None
        self._waiting: list[tuple[int, str]] = []  # token index and text of tokens whose depth is not known yet

    def __enter__(self) -> LiveText:
        self._began = time.perf_counter()
        self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._writing is not None:
            self._move(self._writing.tokens, all_tokens=True)
        self._live.update(Text(), refresh=True)
        self._live.stop()
        console.print(self.line)

    def say(self, text: str, style: str = "") -> None:
        """Adds text that was not generated, such as the prompt."""
        self.line.append(text, style=style)
        self._print_full_lines()

    def show(self, event: TextEvent) -> None:
        """Adds the new text of an event."""
        self._writing = event.writing
        self._waiting += event.pieces
        self._move(event.writing.tokens)
        if (now := time.perf_counter()) - self._shown > _REFRESH:
            self._shown = now
            self._print_full_lines()
            self._live.update(Group(self.line, Text(self.speed(), style="dim")), refresh=True)

    def speed(self) -> str:
        """Returns a line with the number of tokens, the tokens per second and the mean depth."""
        tokens = [] if self._writing is None else self._writing.tokens
        seconds = time.perf_counter() - self._began
        depth = sum(token.depth for token in tokens) / max(1, len(tokens))
        return f"{counted(len(tokens), 'token')}, {len(tokens) / seconds:,.1f} tokens/s, mean depth {depth:.2f}"

    def _move(self, tokens: list[Token], *, all_tokens: bool = False) -> None:
        """Moves the text of tokens whose depth is known to ``line``; with ``all_tokens``, the text of all tokens."""
        while self._waiting and (all_tokens or self._waiting[0][0] + 1 < len(tokens)):
            number, text = self._waiting.pop(0)
            depth = tokens[number + 1].depth if number + 1 < len(tokens) else 0
            self.line.append(text, style=depth_style(depth, self.deepest) if self.colours else "")

    def _print_full_lines(self) -> None:
        """Wraps the text at the width of the window and prints all lines but the last."""
        lines = self.line.wrap(console, console.width)
        if len(lines) > 1:
            for line in lines[:-1]:
                console.print(line)
            self.line = lines[-1]


@contextmanager
def ctrl_c_noted() -> Iterator[Callable[[], bool]]:
    """Context manager that yields a function, which returns whether Ctrl-C was pressed.

    The first Ctrl-C raises nothing, so that the engine's step completes; the second raises ``KeyboardInterrupt``.
    """
    pressed = threading.Event()
    if threading.current_thread() is not threading.main_thread():  # only the main thread can handle signals
        yield pressed.is_set
        return

    def note(number: int, frame: FrameType | None) -> None:
        if pressed.is_set():
            raise KeyboardInterrupt
        pressed.set()

    previous = signal.signal(signal.SIGINT, note)
    try:
        yield pressed.is_set
    finally:
        signal.signal(signal.SIGINT, previous)


@dataclass(eq=False)
class Conversation:
    """Reads lines and runs them: commands, which begin with a slash, and prompts to continue or, in a chat, to answer.

    ``settings`` are the fields of the next request, including the policy; ``messages`` is, with ``chat``, the
    conversation so far.
    """

    model: AdaPonderForCausalLM
    tokenizer: PreTrainedTokenizerBase
    folder: Path
    settings: dict[str, Any]
    _: KW_ONLY
    chat: bool = False
    stops: Sequence[str] = ()
    colours: bool = True
    drafts: InitVar[int | None] = None
    messages: list[dict[str, str]] = field(default_factory=list, init=False)

    def __post_init__(self, drafts: int | None) -> None:
        self.engine = TextEngine(Engine(self.model, lanes=1, drafts=drafts), self.tokenizer)

    @property
    def deepest(self) -> int:
        """Returns the maximum depth of the next request."""
        return self.settings["max_iterations"] or self.model.config.iterations

    def run(self) -> None:
        """Reads lines until the end of the input or ``/quit``."""
        if self.chat:
            chat_ids(self.tokenizer, [_user("?")])  # raises now if the tokenizer has no template
        response = "answered" if self.chat else "continued"
        console.print(line(f"Text is {response}. ", ("/help", "bold"), " lists the other commands."))
        if self.colours and console.in_colour:
            console.print(legend(self.deepest))
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
        """Runs a command or a prompt. An error is printed and changes nothing."""
        try:
            if text.startswith("/"):
                self.obey(*text[1:].split(None, 1))
            else:
                self.write(text)
        except AdaPonderError as error:
            errors.print(line(("error:", "bold red"), " ", str(error)), soft_wrap=True)

    def write(self, prompt: str) -> None:
        """Continues the prompt and shows the text as it is generated; Ctrl-C stops it."""
        messages = [*self.messages, _user(prompt)]
        (writing,) = self._submit(chat_ids(self.tokenizer, messages) if self.chat else prompt)
        live = LiveText(self.deepest, colours=self.colours)
        with live:
            if not self.chat:
                live.say("".join(pieces(self.tokenizer, writing.request.prompt)), style="bold")
            with ctrl_c_noted() as interrupted:
                self.engine.finish(live.show, until=interrupted)
        reason = {"stop": "ended by itself; ", "cancelled": "stopped; "}.get(writing.finish_reason or "", "")
        console.print(reason + live.speed(), style="dim")
        self.settings = self.settings | {"seed": self.settings["seed"] + 1}
        if self.chat:
            # The template adds the line break after a turn.
            self.messages = [*messages, {"role": "assistant", "content": writing.text.rstrip()}]

    def _submit(self, prompt: str | list[int]) -> list[Writing]:
        try:
            return self.engine.submit(prompt, stops=self.stops, **self.settings)
        except InputError as error:
            if not self.messages:
                raise
            raise InputError(f"{error}; /new begins another conversation, /max asks for fewer tokens") from None

    def obey(self, command: str = "", value: str = "") -> None:
        """Runs a command; raises and changes nothing if it is invalid."""
        value = value.strip()
        if command == "help":
            console.print(table("", ("command", ""), COMMANDS.items()))
        elif command == "new":
            if not self.chat:
                raise InputError("/new needs --chat; without it every prompt begins anew")
            self.messages = []
            console.print("A new conversation.", style="dim")
        else:
            if command != "settings":
                self._change(command, value)
            self.show_settings()

    def _change(self, command: str, value: str) -> None:
        """Changes a setting; raises and changes nothing if the engine would refuse requests with the new value."""
        engine, iterations = self.engine.engine, self.model.config.iterations
        try:
            settings = self.settings | self._changes(command, value)
            request = Request(prompt=[0], **settings)
            check_request(request, self.model, positions=engine.tokens, iterations=iterations, eos_ids=engine.eos_ids)
        except InputError as error:
            raise InputError(f"/{command} {value}: {error}") from None
        self.settings = settings

    def _changes(self, command: str, value: str) -> dict[str, Any]:
        """Returns the fields of a request that a command changes."""
        if command in ("policy", "tau", "profile"):
            rule: dict[str, Any] = {command: value or None}
            if command == "tau" and value:
                rule["tau"] = _number("tau", value)
            return {"policy": Depth(**rule).choose(self.model, self.folder)}
        if command not in _NUMBERS:
            raise InputError("there is no such command; /help lists all commands")
        name = _NUMBERS[command]
        if not value and name == "max_iterations":
            return {name: None}
        if name == "seed" and value.startswith("-"):
            raise InputError(f"seed={value} must be at least 0")
        return {name: _number(name, value)}

    def show_settings(self) -> None:
        """Prints the settings of the next prompt."""
        settings = self.settings
        depth = "the model's own rule" if settings["policy"] is None else settings["policy"].as_line()
        console.print(
            f"depth: {depth}, at most {self.deepest}; temperature {settings['temperature']:g}, "
            f"top-p {settings['top_p']:g}, top-k {settings['top_k']}; max {settings['max_new_tokens']}, "
            f"seed {settings['seed']}",
            style="dim",
        )


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _number(name: str, text: str) -> Any:
    """Parses the value of a request field and checks its range."""
    kind = float if float in (REQUEST_FIELDS[name].type, *get_args(REQUEST_FIELDS[name].type)) else int
    try:
        return check(name, kind(text))
    except ValueError as error:
        raise error if isinstance(error, InputError) else InputError(f"{name}={text} must be a number") from None
