"""adaponder generate: text from a checkpoint, each token with the depth it was read at."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from adaponder.commands.options import GenerateOptions
from adaponder.commands.subject import choose_policy, open_tokenizer
from adaponder.conversion.open import load
from adaponder.errors import InputError
from adaponder.evaluation.meter import COLUMNS, Meter, Spent
from adaponder.modeling import AdaPonderForCausalLM
from adaponder.policies import Policy
from adaponder.terminal import by_depth, console, legend, table, write_json


@dataclass(frozen=True)
class Generated:
    """Prompt and continuation as pieces of text, with each piece's depth; the last token was never read: 0."""

    pieces: list[str]
    depths: list[int]
    prompt: int
    deepest: int
    prefill: Spent
    decode: Spent

    @property
    def mean_depth(self) -> float:
        read = [depth for depth in self.depths if depth]
        return sum(read) / len(read)

    def as_dict(self) -> dict[str, Any]:
        return {
            "prompt": "".join(self.pieces[: self.prompt]),
            "text": "".join(self.pieces[self.prompt :]),
            "tokens": self.pieces,
            "depths": self.depths,
            "mean_depth": self.mean_depth,
            "prefill": self.prefill.as_dict(),
            "decode": self.decode.as_dict(),
        }


def run(options: GenerateOptions) -> Generated:
    with console.status(f"loading {options.checkpoint} …"):
        model, folder = load(options.checkpoint, dtype=options.dtype, device=options.device)
        words = open_tokenizer(model, folder, options.tokenizer)
        chosen = choose_policy(model, folder, options)
    with console.status("generating …"):
        done = generate(
            model,
            words,
            options.prompt,
            policy=chosen,
            max_iterations=options.max_iterations,
            seed=options.seed,
            settings={
                "max_new_tokens": options.max_new_tokens,
                "do_sample": not options.greedy,
                **({} if options.greedy else {"temperature": options.temperature, "top_p": options.top_p}),
            },
        )
    show(done, colours=options.depth_colours)
    write_json(options.json, done.as_dict())
    return done


def generate(
    model: AdaPonderForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    *,
    policy: Policy | None,
    max_iterations: int | None,
    seed: int,
    settings: dict[str, Any],
) -> Generated:
    ids = tokenizer(prompt, return_tensors="pt").input_ids.to(model.device)
    if ids.shape[1] == 0:
        raise InputError("--prompt is empty: give at least one token")
    torch.manual_seed(seed)
    asked = {} if policy is None else {"policy": policy}
    began = time.perf_counter()
    result = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        pad_token_id=tokenizer.eos_token_id if tokenizer.eos_token_id is not None else 0,
        return_dict_in_generate=True,
        seed=seed,
        max_iterations=max_iterations,
        **asked,
        **settings,
    )
    seconds = time.perf_counter() - began
    tokens = result.sequences[0].tolist()
    depths = result.past_key_values.depth[0].tolist()
    prefill, decode = _cost(model, depths, ids.shape[1], policy=policy, max_iterations=max_iterations)
    return Generated(
        pieces=pieces(tokenizer, tokens),
        depths=depths + [0] * (len(tokens) - len(depths)),
        prompt=ids.shape[1],
        deepest=max_iterations or model.config.iterations,
        prefill=prefill,
        # The first reading of the prompt is in there too: what a user waits for.
        decode=replace(decode, seconds=seconds),
    )


def _cost(
    model: AdaPonderForCausalLM, depths: list[int], prompt: int, *, policy: Policy | None, max_iterations: int | None
) -> tuple[Spent, Spent]:
    """What reading the prompt cost, and what each token after it did, at the length its attention really had."""
    meters = [Meter(model.config, dtype=model.dtype, device=model.device) for _ in range(2)]
    read = torch.tensor([depths])
    asked: dict[str, Any] = {"max_iterations": max_iterations, "logits": 1, "policy": policy}
    meters[0].add(read[:, :prompt], **asked)
    for place in range(prompt, len(depths)):
        meters[1].add(read[:, place : place + 1], past=read[:, :place], **asked)
    return meters[0].spent(), meters[1].spent()


def pieces(tokenizer: PreTrainedTokenizerBase, tokens: list[int]) -> list[str]:
    """Each token's text in context. A character spread over several tokens goes to the token that completes it."""
    found, shown = [], ""
    for end in range(1, len(tokens) + 1):
        text = str(tokenizer.decode(tokens[:end]))
        # An unfinished character decodes to U+FFFD, which the next token may turn into something else.
        text = text if end == len(tokens) else text.rstrip("\ufffd")
        found.append(text[len(shown) :] if text.startswith(shown) else "")
        shown = text if text.startswith(shown) else shown
    return found


def show(done: Generated, *, colours: bool) -> None:
    if not colours:
        console.print("".join(done.pieces))
        return
    console.print(by_depth(done.pieces, done.depths, done.deepest))
    console.print()
    console.print(legend(done.deepest))
    counts = Counter(depth for depth in done.depths if depth)
    total = sum(counts.values())
    rows = [(depth, counts[depth], f"{counts[depth] / total:.1%}") for depth in range(1, done.deepest + 1)]
    console.print(table(f"Mean depth {done.mean_depth:.2f} of {done.deepest}", ("read", "tokens", "share"), rows))
    spent = [("the prompt", *done.prefill.cells()), ("each token after it", *done.decode.cells())]
    console.print(table("\nWhat it cost", ("", *COLUMNS), spent))
