"""adaponder generate: text from a checkpoint, each token with the depth it was read at."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from adaponder.backbones.shape import Shape, shape_of
from adaponder.commands.interactive import Conversation
from adaponder.commands.live import LiveText
from adaponder.commands.options import GenerateOptions
from adaponder.commands.prompts import prompts_of
from adaponder.commands.subject import choose_policy, open_tokenizer
from adaponder.conversion.open import load
from adaponder.errors import InputError
from adaponder.evaluation.meter import COLUMNS, Meter, Spent
from adaponder.inference.engine import Engine
from adaponder.modeling import AdaPonderForCausalLM
from adaponder.policies import Policy
from adaponder.terminal import by_depth, console, counting, legend, table, write_json
from adaponder.text import TextEngine, TextEvent, Writing, chat_ids, encode, pieces


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


def run(options: GenerateOptions) -> list[Generated]:
    """Continues each prompt with the checkpoint, and prints texts, depths and cost."""
    prompts = [] if options.interactive else prompts_of(options)
    with console.status(f"loading {options.checkpoint} …"):
        model, folder = load(options.checkpoint, dtype=options.dtype, device=options.device, weights=options.weights)
        words = open_tokenizer(model, folder, options.tokenizer)
        chosen = choose_policy(model, folder, options)
    if options.interactive:
        Conversation(model, words, folder, options, chosen).run()
        return []
    settings = options.request_settings() | {"policy": chosen, "samples": options.samples}
    streams = console.is_terminal and len(prompts) == options.samples == 1
    began = time.perf_counter()
    done = generate(
        model,
        words,
        prompts,
        settings=settings,
        chat=options.chat,
        stops=options.stop,
        lanes=options.lanes,
        drafts=options.drafts,
        live=LiveText(_deepest(model, settings), colours=options.depth_colours) if streams else None,
    )
    show(done, colours=options.depth_colours, text=not streams)
    write_json(options.json, as_result(done, time.perf_counter() - began))
    return done


def generate(
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
    """The prompts as continued by the engine, each with as many samples as ``settings``, fields of a request, say.

    With ``chat`` a prompt is what a user says. ``live`` shows the one text while it grows.
    """
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


def _deepest(model: AdaPonderForCausalLM, settings: dict[str, Any]) -> int:
    return settings.get("max_iterations") or model.config.iterations


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
