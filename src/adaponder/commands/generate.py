"""adaponder generate: text from a checkpoint, each token with the depth it was read at."""

from __future__ import annotations

import json as jsonlib
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from adaponder.commands import shared
from adaponder.commands.shared import opt
from adaponder.errors import InputError, shown
from adaponder.fields import REQUEST_FIELDS, option
from adaponder.terminal import by_depth, console, counting, legend, table, write_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from adaponder.backbones.shape import Shape
    from adaponder.commands.interactive import LiveText
    from adaponder.evaluation.meter import Spent
    from adaponder.inference.engine import Engine
    from adaponder.modeling import AdaPonderForCausalLM
    from adaponder.policies import Policy
    from adaponder.text import TextEvent, Writing

STANDARD_INPUT = "-"
_SAMPLING = "Sampling"


def generate(
    checkpoint: shared.Checkpoint,
    *,
    prompt: Annotated[
        list[str] | None,
        opt("What to continue; may be repeated. -, or no prompt where input is piped: all of standard input.", "TEXT"),
    ] = None,
    prompt_file: Annotated[
        Path | None,
        opt(
            "One prompt per line, empty lines left out; .jsonl: the field prompt of each line; -: lines of "
            "standard input.",
            "FILE",
        ),
    ] = None,
    chat: Annotated[
        bool,
        opt(
            "A prompt is a user's message: the tokenizer's chat template is applied; text is the answer.", flag="--chat"
        ),
    ] = False,
    interactive: Annotated[
        bool, opt("Ask for prompts, one after another; /help lists what else it takes.", flag="--interactive")
    ] = False,
    samples: Annotated[int, option("samples")] = 1,
    lanes: Annotated[int, opt("Sequences computed at a time.", "N", min=1)] = 64,
    drafts: Annotated[
        int | None,
        opt(
            "Tokens of a text, at most, that are begun before it is certain that they follow: the same text, "
            "sooner, for more computation. By default none with more than four sequences at a time.",
            "N",
            min=0,
        ),
    ] = None,
    depth_colours: Annotated[bool, opt("Colour each token by how often it was read.")] = True,
    json: shared.Json = None,
    max_new_tokens: Annotated[int, option("max_new_tokens", rich_help_panel=_SAMPLING)] = 64,
    temperature: Annotated[float, option("temperature", rich_help_panel=_SAMPLING)] = 1.0,
    top_k: Annotated[int, option("top_k", rich_help_panel=_SAMPLING)] = 0,
    top_p: Annotated[float, option("top_p", rich_help_panel=_SAMPLING)] = 1.0,
    min_p: Annotated[float, option("min_p", rich_help_panel=_SAMPLING)] = 0.0,
    repetition_penalty: Annotated[float, option("repetition_penalty", rich_help_panel=_SAMPLING)] = 1.0,
    greedy: Annotated[bool, opt("Always take the most likely token.", flag="--greedy", panel=_SAMPLING)] = False,
    stop: Annotated[
        list[str] | None, opt("End before this text, which is not shown; may be repeated.", "TEXT", panel=_SAMPLING)
    ] = None,
    seed: Annotated[int, option("seed", min=0, rich_help_panel=_SAMPLING)] = 0,
    policy: shared.PolicyText = None,
    tau: shared.Tau = None,
    profile: shared.Profile = None,
    max_iterations: shared.MaxIterations = None,
    weights: shared.Weights = None,
    tokenizer: shared.Tokenizer = None,
    device: shared.Device = "cpu",
    dtype: shared.Dtype = "auto",
) -> Any:
    """Continue prompts, each token coloured by how often it was read.

    [dim]adaponder generate runs/demo --prompt "import " --policy fixed:2[/]

    [dim]adaponder generate runs/demo --prompt-file prompts.jsonl --samples 4 --json out.json[/]

    [dim]echo "def main" | adaponder generate runs/demo --stop "return" --greedy[/]

    [dim]adaponder generate runs/demo --interactive[/]

    [dim]adaponder generate runs/chat --interactive --chat[/]
    """
    # Every parameter above that is a field of a request; the policy is chosen below.
    settings = {name: value for name, value in locals().items() if name in REQUEST_FIELDS and name != "tau"}
    if greedy:
        settings["temperature"] = 0.0
    if interactive:
        shared.refuse("--interactive", prompt=prompt, prompt_file=prompt_file, json=json, samples=samples > 1)
    prompts = [] if interactive else read_prompts(prompt, prompt_file)
    from adaponder.commands.interactive import Conversation, LiveText
    from adaponder.conversion.open import load

    depth: dict[str, Any] = {"policy": shared.read_policy(policy), "tau": tau, "profile": profile}
    with console.status(f"loading {checkpoint} …"):
        model, folder = load(checkpoint, dtype=dtype, device=device, weights=weights)
        words = shared.open_tokenizer(model, folder, tokenizer)
        chosen = shared.choose_policy(model, folder, **depth, max_iterations=max_iterations)
    if interactive:
        del settings["samples"]
        conversation = Conversation(
            model,
            words,
            folder,
            settings | {"policy": chosen},
            chat=chat,
            stops=stop or (),
            colours=depth_colours,
            drafts=drafts,
        )
        conversation.run()
        return []
    streams = console.is_terminal and len(prompts) == samples == 1
    began = time.perf_counter()
    done = continue_prompts(
        model,
        words,
        prompts,
        settings=settings | {"policy": chosen},
        chat=chat,
        stops=stop or (),
        lanes=lanes,
        drafts=drafts,
        live=LiveText(max_iterations or model.config.iterations, colours=depth_colours) if streams else None,
    )
    show(done, colours=depth_colours, text=not streams)
    write_json(json, as_result(done, time.perf_counter() - began))
    return done


# --- prompts -------------------------------------------------------------------------------------------------------


def read_prompts(prompt: Sequence[str] | str | None, prompt_file: Path | None = None) -> list[str]:
    """Returns the prompts of both options in their order; standard input if there are none and it is piped."""
    texts = (prompt,) if isinstance(prompt, str) else tuple(prompt or ())
    prompts = [_standard_input("--prompt -") if text == STANDARD_INPUT else text for text in texts]
    if prompt_file is not None:
        prompts += _from_file(prompt_file)
    if not texts and prompt_file is None:
        if sys.stdin is None or sys.stdin.isatty():
            raise InputError("--prompt is needed; or --prompt-file, --interactive, or text on standard input")
        prompts = [_standard_input("--prompt")]
    if "" in prompts:
        raise InputError("--prompt is empty: give at least one token")
    return prompts


def _from_file(path: Path) -> list[str]:
    option = f"--prompt-file {path}"
    if str(path) == STANDARD_INPUT:
        text = _standard_input(option)
    else:
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise InputError(f"{option} is not UTF-8 text ({error.reason} at byte {error.start})") from None
        except (OSError, ValueError) as error:
            raise InputError(f"{option} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    # As files have lines: str.splitlines would also break at form feeds and other separators within a prompt.
    lines = enumerate(text.split("\n"), start=1)
    numbered = [(number, line.removesuffix("\r")) for number, line in lines if line.strip()]
    if not numbered:
        raise InputError(f"{option} holds no prompt; write one prompt per line")
    if path.suffix != ".jsonl":
        return [line for _, line in numbered]
    return [_from_json(line, f"{option}, line {number}") for number, line in numbered]


def _from_json(line: str, option: str) -> str:
    try:
        record = jsonlib.loads(line)
    except (ValueError, RecursionError):
        raise InputError(
            f'{option}: {shown(line)} is not JSON; each line must be an object, as {{"prompt": "text"}}'
        ) from None
    prompt = record.get("prompt") if isinstance(record, dict) else None
    if not isinstance(prompt, str) or not prompt:
        raise InputError(f'{option}: the field prompt must be a non-empty text, as in {{"prompt": "text"}}')
    return prompt


def _standard_input(option: str) -> str:
    """All of standard input, without the line break at its end."""
    try:
        text = sys.stdin.read()
    except (OSError, ValueError) as error:  # closed, or bytes that are no text
        raise InputError(f"{option}: standard input cannot be read: {error}") from None
    text = text.removesuffix("\n").removesuffix("\r")
    if not text:
        raise InputError(f"{option}: standard input is empty; give a prompt")
    return text


# --- generation ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Generated:
    """A prompt and its continuation, token by token.

    Attributes:
        pieces: the text of each token.
        depths: the depth of each token; 0 for the last, which was generated but never read.
        prompt: number of tokens of the prompt, the first of ``pieces``.
        deepest: the most iterations that were allowed.
        finish_reason: ``stop``, ``length`` or ``cancelled``.
        prefill: what reading the prompt cost.
        decode: what reading the tokens after it cost; its seconds are those of the whole generation.
        dropped_rows: rows of drafts that did not follow, which no cost counts.
    """

    pieces: list[str]
    depths: list[int]
    prompt: int
    deepest: int
    finish_reason: str
    prefill: Spent
    decode: Spent
    dropped_rows: int = 0

    @property
    def mean_depth(self) -> float:
        """Mean depth of the tokens that were read."""
        read = [depth for depth in self.depths if depth]
        return sum(read) / max(1, len(read))

    def as_dict(self) -> dict[str, Any]:
        return {
            "prompt": "".join(self.pieces[: self.prompt]),
            "text": "".join(self.pieces[self.prompt :]),
            "tokens": self.pieces,
            "depths": self.depths,
            "mean_depth": self.mean_depth,
            "finish_reason": self.finish_reason,
            "prefill": self.prefill.as_dict(),
            "decode": self.decode.as_dict(),
            "dropped_rows": self.dropped_rows,
        }


def continue_prompts(
    model: AdaPonderForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    *,
    settings: dict[str, Any],
    chat: bool = False,
    stops: Sequence[str] = (),
    lanes: int = 64,
    drafts: int | None = None,
    live: LiveText | None = None,
) -> list[Generated]:
    """Continues the prompts with the engine; ``settings`` are fields of a request, ``samples`` among them.

    With ``chat`` a prompt is a user's message. ``live`` shows the one text while it grows.
    """
    from adaponder.backbones.shape import shape_of
    from adaponder.text import TextEngine, pieces

    ids = [_ids(tokenizer, prompt, chat=chat) for prompt in prompts]
    engine = TextEngine(_engine(model, ids, settings, lanes, drafts), tokenizer)
    writings = [writing for one in ids for writing in engine.submit(one, stops=stops, **settings)]
    began, seconds = time.perf_counter(), {}

    def note(event: TextEvent) -> None:
        if event.done:
            seconds[id(event.writing)] = time.perf_counter() - began

    if live is not None:
        with live:
            live.say("".join(pieces(tokenizer, ids[0])), style="bold")
            engine.finish(lambda event: (note(event), live.show(event)))
    else:
        with counting("generating", len(writings)) as advance:
            engine.finish(lambda event: (note(event), advance(int(event.done))))
    shape = shape_of(model.config)
    return [as_generated(model, tokenizer, writing, shape, seconds[id(writing)]) for writing in writings]


def as_generated(
    model: AdaPonderForCausalLM, tokenizer: PreTrainedTokenizerBase, writing: Writing, shape: Shape, seconds: float
) -> Generated:
    """A finished writing with its prompt and its cost; ``seconds`` are what a user waits for, the prompt included."""
    from adaponder.text import pieces

    request = writing.request
    depths, prompt = writing.depths, len(request.prompt)
    policy: Any = request.policy
    read = [depth for depth in depths if depth]
    prefill, decode = _cost(model, read, prompt, shape=shape, policy=policy, max_iterations=request.max_iterations)
    return Generated(
        pieces=[*pieces(tokenizer, request.prompt), *writing.pieces],
        depths=depths,
        prompt=prompt,
        deepest=request.max_iterations or model.config.iterations,
        finish_reason=writing.finish_reason or "cancelled",
        prefill=prefill,
        decode=replace(decode, seconds=seconds),
        dropped_rows=writing.dropped_rows,
    )


def as_result(done: Sequence[Generated], seconds: float) -> dict[str, Any]:
    """What ``--json`` holds: every completion; of a single one its fields beside."""
    made = sum(len(one.pieces) - one.prompt for one in done)
    whole = {"seconds": seconds, "new_tokens": made, "tokens_per_second": made / seconds}
    return whole | {"completions": [one.as_dict() for one in done]} | (done[0].as_dict() if len(done) == 1 else {})


def _ids(tokenizer: PreTrainedTokenizerBase, prompt: str, *, chat: bool) -> list[int]:
    from adaponder.text import chat_ids, encode

    if chat:
        return chat_ids(tokenizer, [{"role": "user", "content": prompt}])
    try:
        return encode(tokenizer, prompt)
    except InputError:
        raise InputError("--prompt is empty: give at least one token") from None


def _engine(
    model: AdaPonderForCausalLM,
    prompts: Sequence[Sequence[int]],
    settings: dict[str, Any],
    lanes: int,
    drafts: int | None,
) -> Engine:
    """An engine with room for these prompts and no more than they need."""
    from adaponder.inference.engine import Engine

    longest = max(map(len, prompts)) + settings["max_new_tokens"]
    positions = model.config.max_position_embeddings
    samples = len(prompts) * settings.get("samples", 1)
    return Engine(
        model,
        lanes=min(lanes, samples),
        tokens=longest if positions is None else min(longest, positions),
        max_iterations=settings.get("max_iterations"),
        drafts=drafts,
    )


def _cost(
    model: AdaPonderForCausalLM,
    depths: list[int],
    prompt: int,
    *,
    shape: Shape,
    policy: Policy | None,
    max_iterations: int | None,
) -> tuple[Spent, Spent]:
    """Costs of reading the prompt, and of reading the tokens after it, each in passes of its own."""
    import torch

    from adaponder.evaluation.meter import Meter

    prefill, decode = (Meter(model.config, dtype=model.dtype, device=model.device, shape=shape) for _ in range(2))
    read = torch.tensor([depths])
    arguments: dict[str, Any] = {"max_iterations": max_iterations, "policy": policy}
    prefill.add(read[:, :prompt], logits=1, **arguments)
    # Token by token, counting takes as long as generating; only where each pass unfolds the keys anew is it needed.
    together = 1 if shape.expansion else max(1, len(depths) - prompt)
    for first in range(prompt, len(depths), together):
        tokens = read[:, first : first + together]
        decode.add(tokens, past=read[:, :first], logits=tokens.shape[1], **arguments)
    return prefill.spent(), decode.spent()


def show(done: Sequence[Generated], *, colours: bool, text: bool = True) -> None:
    """Prints the texts; with ``colours``, tokens are coloured by depth, and depths and costs follow in tables."""
    for number, one in enumerate(done, start=1):
        if text:
            if len(done) > 1:
                console.rule(f"{number} of {len(done)}")
            whole = by_depth(one.pieces, one.depths, one.deepest) if colours else "".join(one.pieces)
            console.print(whole)
    if not colours:
        return
    from adaponder.evaluation.meter import COLUMNS

    deepest = max(one.deepest for one in done)
    console.print()
    console.print(legend(deepest))
    counts = Counter(depth for one in done for depth in one.depths if depth)
    total = counts.total()
    mean = sum(depth * count for depth, count in counts.items()) / max(1, total)
    rows = [(depth, counts[depth], f"{counts[depth] / max(1, total):.1%}") for depth in range(1, deepest + 1)]
    console.print(table(f"Mean depth {mean:.2f} of {deepest}", ("read", "tokens", "share"), rows))
    prefill, decode = _together([one.prefill for one in done]), _together([one.decode for one in done])
    spent = [("the prompt" if len(done) == 1 else "the prompts", *prefill.cells())]
    console.print(table("\nWhat it cost", ("", *COLUMNS), [*spent, ("each token after it", *decode.cells())]))
    if dropped := sum(one.dropped_rows for one in done):
        read = sum(depth for one in done for depth in one.depths[one.prompt :])
        rows = "1 row" if dropped == 1 else f"{dropped} rows"
        console.print(
            f"Not counted: {rows} of drafted tokens that were not kept ({dropped / max(1, read):.0%} of the rows of "
            f"the tokens after the prompt), and memory for {deepest} rows of each of those, whatever its depth; "
            "--drafts 0 saves both"
        )


def _together(costs: Sequence[Spent]) -> Spent:
    """The sum of costs that were spent at the same time: their seconds are the longest."""
    cost = sum((one.cost for one in costs[1:]), costs[0].cost)
    histogram = tuple(map(sum, zip(*(one.histogram for one in costs), strict=True)))
    seconds = max(one.seconds for one in costs)
    return replace(costs[0], cost=cost, histogram=histogram, seconds=seconds)
