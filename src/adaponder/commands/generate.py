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
    """A prompt and its continuation, token by token.

    Attributes:
        pieces: the text of each token.
        depths: the depth of each token; 0 for the last, which was generated but never read.
        prompt: number of tokens of the prompt, the first of ``pieces``.
        deepest: the most iterations that were allowed.
        prefill: what reading the prompt cost.
        decode: what reading the tokens after it cost; its seconds are those of the whole generation.
    """

    pieces: list[str]
    depths: list[int]
    prompt: int
    deepest: int
    prefill: Spent
    decode: Spent

    @property
    def mean_depth(self) -> float:
        """Mean depth of the tokens that were read."""
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
    """Continues ``options.prompt`` with the checkpoint, and prints text, depths and cost."""
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
    """The prompt as continued by ``model.generate``, which is also given ``settings``."""
    ids = tokenizer(prompt, return_tensors="pt").input_ids.to(model.device)
    if ids.shape[1] == 0:
        raise InputError("--prompt is empty: give at least one token")
    torch.manual_seed(seed)
    policy_argument = {} if policy is None else {"policy": policy}
    began = time.perf_counter()
    result = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        pad_token_id=tokenizer.eos_token_id if tokenizer.eos_token_id is not None else 0,
        return_dict_in_generate=True,
        seed=seed,
        max_iterations=max_iterations,
        **policy_argument,
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
        # What a user waits for: the time to read the prompt is included.
        decode=replace(decode, seconds=seconds),
    )


def _cost(
    model: AdaPonderForCausalLM, depths: list[int], prompt: int, *, policy: Policy | None, max_iterations: int | None
) -> tuple[Spent, Spent]:
    """Costs of reading the prompt, and of reading the tokens after it, each with attention to those before it."""
    meters = [Meter(model.config, dtype=model.dtype, device=model.device) for _ in range(2)]
    read = torch.tensor([depths])
    arguments: dict[str, Any] = {"max_iterations": max_iterations, "logits": 1, "policy": policy}
    meters[0].add(read[:, :prompt], **arguments)
    for slot in range(prompt, len(depths)):
        meters[1].add(read[:, slot : slot + 1], past=read[:, :slot], **arguments)
    return meters[0].spent(), meters[1].spent()


def pieces(tokenizer: PreTrainedTokenizerBase, tokens: list[int]) -> list[str]:
    """The text of each token in context; a character of several tokens belongs to the token that completes it."""
    texts, shown = [], ""
    for end in range(1, len(tokens) + 1):
        text = str(tokenizer.decode(tokens[:end]))
        # An unfinished character decodes to U+FFFD, which the next token may turn into something else.
        text = text if end == len(tokens) else text.rstrip("\ufffd")
        texts.append(text[len(shown) :] if text.startswith(shown) else "")
        shown = text if text.startswith(shown) else shown
    return texts


def show(done: Generated, *, colours: bool) -> None:
    """Prints the text; with ``colours``, tokens are coloured by depth, and depths and costs follow in tables."""
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
