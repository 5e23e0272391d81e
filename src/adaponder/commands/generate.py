"""adaponder generate: generates text from a checkpoint and shows the depth of each token."""

from __future__ import annotations

import json as jsonlib
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from operator import add
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.text import Text

from adaponder.commands import shared
from adaponder.commands.shared import opt
from adaponder.errors import InputError, shown
from adaponder.fields import REQUEST_FIELDS, option
from adaponder.terminal import by_depth, console, counted, counting, legend, table, write_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from adaponder.backbones.shape import Shape
    from adaponder.commands.interactive import LiveText
    from adaponder.evaluation.meter import Spent
    from adaponder.modeling import AdaPonderForCausalLM
    from adaponder.text import TextEvent

STANDARD_INPUT = "-"
_prompts, _output, _speed = (partial(opt, panel=panel) for panel in ("Prompts", "Output", "Speed"))
_sampling = partial(option, rich_help_panel="Sampling")
_PROMPT = "Text to continue; may be repeated. -: standard input, which is also read if it is piped alone."
_FILE = "A prompt per line; .jsonl: the field prompt of each line; -: standard input."
_CHAT = "Prompts are a user's messages, in the tokenizer's chat template."
_LOOP = "Read prompts in a loop; /help lists the commands."
_DRAFTS = "Draft at most N tokens ahead; changes speed only. Default: on for up to four lanes."
_STATS = "Show tables of depths and costs."
_TEMPERATURE = "0 always takes the most likely token; default 1."


@shared.command
def generate(
    checkpoint: shared.Checkpoint,
    *,
    prompt: Annotated[list[str] | None, _prompts(_PROMPT, "TEXT")] = None,
    prompt_file: Annotated[Path | None, _prompts(_FILE, "FILE")] = None,
    chat: Annotated[bool, _prompts(_CHAT, flag="--chat")] = False,
    interactive: Annotated[bool, _prompts(_LOOP, flag="--interactive")] = False,
    depth_colours: Annotated[bool, _output("Colour tokens by depth.")] = True,
    stats: Annotated[bool, _output(_STATS, flag="--stats")] = False,
    json: shared.Json = None,
    max_new_tokens: Annotated[int, _sampling("max_new_tokens")] = 64,
    samples: Annotated[int, _sampling("samples")] = 1,
    temperature: Annotated[float | None, _sampling("temperature", help=_TEMPERATURE)] = None,
    top_k: Annotated[int, _sampling("top_k")] = 0,
    top_p: Annotated[float, _sampling("top_p")] = 1.0,
    min_p: Annotated[float, _sampling("min_p")] = 0.0,
    repetition_penalty: Annotated[float, _sampling("repetition_penalty")] = 1.0,
    greedy: Annotated[bool, opt("Same as --temperature 0.", flag="--greedy", panel="Sampling")] = False,
    stop: Annotated[list[str] | None, opt("End before this text; may be repeated.", "TEXT", panel="Sampling")] = None,
    seed: Annotated[int, _sampling("seed", min=0)] = 0,
    depth: shared.Depth,
    lanes: Annotated[int, _speed("Sequences decoded at the same time.", "N", min=1)] = 64,
    drafts: Annotated[int | None, _speed(_DRAFTS, "N", min=0)] = None,
    opening: shared.NarrowOpening,
) -> Any:
    """Continue prompts, each token coloured by its depth, the number of its iterations.

    [dim]adaponder generate runs/demo --prompt "import " --policy fixed:2[/]
    [dim]adaponder generate runs/demo --prompt-file prompts.jsonl --samples 4 --json out.json[/]
    [dim]echo "def main" | adaponder generate runs/demo --stop "return" --greedy[/]
    [dim]adaponder generate runs/chat --interactive --chat[/]
    """
    if greedy:
        shared.refuse("--greedy", temperature=temperature)
    temperature = 0.0 if greedy else 1.0 if temperature is None else temperature
    # The parameters above that are fields of a request.
    settings: dict[str, Any] = {name: value for name, value in locals().items() if name in REQUEST_FIELDS}
    settings["max_iterations"] = depth.max_iterations
    if interactive:
        shared.refuse("--interactive", prompt=prompt, prompt_file=prompt_file, json=json, samples=samples > 1)
    prompts = [] if interactive else read_prompts(prompt, prompt_file)
    from adaponder.commands.interactive import Conversation, LiveText, ctrl_c_noted

    model, folder, tokenizer = opening.generator(checkpoint)
    settings["policy"] = depth.choose(model, folder)
    stops = stop or ()
    if interactive:
        del settings["samples"]
        Conversation(
            model, tokenizer, folder, settings, chat=chat, stops=stops, colours=depth_colours, drafts=drafts
        ).run()
        return []
    streams = console.is_terminal and len(prompts) == samples == 1
    live = LiveText(depth.max_iterations or model.config.iterations, colours=depth_colours) if streams else None
    began = time.perf_counter()
    engine: dict[str, Any] = {"settings": settings, "chat": chat, "stops": stops, "lanes": lanes, "drafts": drafts}
    with ctrl_c_noted() as interrupted:
        completions = continue_prompts(model, tokenizer, prompts, live=live, until=interrupted, **engine)
    show(completions, colours=depth_colours, text=not streams, stats=stats)
    seconds = time.perf_counter() - began
    new_tokens = sum(len(completion.pieces) - completion.prompt for completion in completions)
    result = {"seconds": seconds, "new_tokens": new_tokens, "tokens_per_second": new_tokens / seconds}
    values = [completion.as_dict() for completion in completions]
    # The fields of a single completion are also at the top level.
    write_json(json, result | {"completions": values} | (values[0] if len(values) == 1 else {}))
    if interrupted():
        raise KeyboardInterrupt  # what was generated has been shown and written
    return completions


def read_prompts(prompt: Sequence[str] | str | None, prompt_file: Path | None = None) -> list[str]:
    """Returns the prompts of ``--prompt``, then of ``--prompt-file``; without either, piped standard input."""
    texts = (prompt,) if isinstance(prompt, str) else tuple(prompt or ())
    prompts = [_read(STANDARD_INPUT, "--prompt -") if text == STANDARD_INPUT else text for text in texts]
    if prompt_file is not None:
        prompts += _from_file(prompt_file)
    if not texts and prompt_file is None:
        if sys.stdin is None or sys.stdin.isatty():
            raise InputError("--prompt is needed; or --prompt-file, --interactive, or text on standard input")
        prompts = [_read(STANDARD_INPUT, "--prompt")]
    if "" in prompts:
        raise InputError("--prompt is empty: give at least one token")
    return prompts


def _from_file(path: Path) -> list[str]:
    option = f"--prompt-file {path}"
    text = _read(str(path), option)
    # str.splitlines would also split at form feeds and other separators within a prompt.
    lines = enumerate(text.split("\n"), start=1)
    numbered = [(number, line.removesuffix("\r")) for number, line in lines if line.strip()]
    if not numbered:
        raise InputError(f"{option} holds no prompt; write one prompt per line")
    if path.suffix != ".jsonl":
        return [line for _, line in numbered]
    return [_from_json(line, f"{option}, line {number}") for number, line in numbered]


def _read(source: str, option: str) -> str:
    """Returns the text of a file, or of standard input (``-``) without its trailing line break."""
    try:
        if source != STANDARD_INPUT:
            return Path(source).read_text(encoding="utf-8")
        text = sys.stdin.read().removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        raise InputError(f"{option} is not UTF-8 text ({error.reason} at byte {error.start})") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{option} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if not text:
        raise InputError(f"{option}: standard input is empty; give a prompt")
    return text


def _from_json(line: str, option: str) -> str:
    try:
        prompt = jsonlib.loads(line)["prompt"]
    except (ValueError, RecursionError, LookupError, TypeError):
        prompt = None
    if not isinstance(prompt, str) or not prompt:
        raise InputError(f'{option}: {shown(line)} must be JSON with the field prompt, as in {{"prompt": "text"}}')
    return prompt


@dataclass(frozen=True)
class Generated:
    """A prompt and its continuation: the text and depth of each token, and the cost.

    Attributes:
        depths: depth of each token; 0 for tokens that were never fed to the model, such as the last generated one.
        pieces: text of each token.
        prompt: number of prompt tokens, which come first in ``pieces`` and ``depths``.
        deepest: the maximum depth that was allowed.
        decode: cost of the generated tokens; its seconds include the prefill.
        dropped_rows: rows computed for rejected drafts; no cost includes them.
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
        """Returns the mean depth of the tokens that were fed to the model."""
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
    until: Callable[[], bool] = lambda: False,
) -> list[Generated]:
    """Continues the prompts with the engine.

    ``settings`` are fields of a request, such as ``samples``. With ``chat`` each prompt is a user's message. ``live``
    shows the text of a single prompt as it is generated. Once ``until`` returns true, generation stops.
    """
    from adaponder.inference.engine import Engine
    from adaponder.text import TextEngine, chat_ids, encode, pieces

    ids = [
        chat_ids(tokenizer, [{"role": "user", "content": prompt}]) if chat else encode(tokenizer, prompt)
        for prompt in prompts
    ]
    # An engine that is no larger than these prompts need.
    longest, positions = max(map(len, ids)) + settings["max_new_tokens"], model.config.max_position_embeddings
    engine = Engine(
        model,
        lanes=min(lanes, len(prompts) * settings.get("samples", 1)),
        tokens=longest if positions is None else min(longest, positions),
        max_iterations=settings.get("max_iterations"),
        drafts=drafts,
    )
    text_engine = TextEngine(engine, tokenizer)
    writings = [writing for tokens in ids for writing in text_engine.submit(tokens, stops=stops, **settings)]
    began, seconds = time.perf_counter(), {}

    def note(event: TextEvent) -> None:
        if event.done:
            seconds[id(event.writing)] = time.perf_counter() - began

    if live is not None:
        with live:
            live.say("".join(pieces(tokenizer, ids[0])), style="bold")
            text_engine.finish(lambda event: (note(event), live.show(event)), until=until)
    else:
        with counting("generating", len(writings)) as advance:
            text_engine.finish(lambda event: (note(event), advance(int(event.done))), until=until)
    shape = engine.runner.backbone_shape
    completions = []
    for writing in writings:
        request, read = writing.request, [depth for depth in writing.depths if depth]
        rule = {"policy": request.policy, "max_iterations": request.max_iterations}
        prefill, decode = _cost(model, read, len(request.prompt), shape, **rule)
        texts = [*pieces(tokenizer, request.prompt), *writing.pieces]
        completions.append(
            Generated(
                pieces=texts,
                depths=writing.depths + [0] * (len(texts) - len(writing.depths)),
                prompt=len(request.prompt),
                deepest=request.max_iterations or model.config.iterations,
                finish_reason=writing.finish_reason or "cancelled",
                prefill=prefill,
                decode=replace(decode, seconds=seconds[id(writing)]),
                dropped_rows=writing.dropped_rows,
            )
        )
    return completions


def _cost(
    model: AdaPonderForCausalLM, depths: list[int], prompt: int, shape: Shape, **rule: Any
) -> tuple[Spent, Spent]:
    """Returns the costs of the prompt and of the tokens after it; ``rule``: further arguments of :meth:`Meter.add`."""
    import torch

    from adaponder.evaluation.meter import Meter

    prefill, decode = (Meter(model.config, dtype=model.dtype, device=model.device, shape=shape) for _ in range(2))
    read = torch.tensor([depths], dtype=torch.long)
    prefill.add(read[:, :prompt], logits=1, **rule)
    # Counting token by token is as slow as generating; it is needed only if each pass expands all cached keys again.
    chunk = 1 if shape.expansion else max(1, len(depths) - prompt)
    for first in range(prompt, len(depths), chunk):
        tokens = read[:, first : first + chunk]
        decode.add(tokens, past=read[:, :first], logits=tokens.shape[1], **rule)
    return prefill.spent(), decode.spent()


def show(completions: Sequence[Generated], *, colours: bool, text: bool = True, stats: bool = False) -> None:
    """Prints the texts; with ``colours``, coloured by depth and with a line of cost; with ``stats``, also tables."""
    for number, completion in enumerate(completions if text else (), start=1):
        if len(completions) > 1:
            console.rule(f"{number} of {len(completions)}")
        pieces, depths, deepest = completion.pieces, completion.depths, completion.deepest
        console.print(by_depth(pieces, depths, deepest) if colours else "".join(pieces))
    if not (colours or stats):
        return
    from adaponder.evaluation.meter import COLUMNS

    deepest = max(completion.deepest for completion in completions)
    prefill = _total([completion.prefill for completion in completions])
    decode = _total([completion.decode for completion in completions])
    depth, flops, ratio, _, speed = decode.cells()
    key = [legend(deepest), "  "] if colours and console.in_colour else []
    more = "" if stats else "; --stats shows more"
    cost = f"mean depth {depth} of {deepest}, {flops} MFLOP/token, {ratio} x vanilla, {speed} tokens/s{more}"
    console.print(Text.assemble("\n", *key, (cost, "dim")), soft_wrap=True)
    if not stats:
        return
    counts = Counter(depth for completion in completions for depth in completion.depths if depth)
    total = max(1, counts.total())
    mean = sum(depth * count for depth, count in counts.items()) / total
    rows = [(depth, counts[depth], f"{counts[depth] / total:.1%}") for depth in range(1, deepest + 1)]
    console.print(table(f"\nMean depth {mean:.2f} of {deepest}", ("read", "tokens", "share"), rows))
    spent = [("the prompt" if len(completions) == 1 else "the prompts", *prefill.cells())]
    console.print(table("\nWhat it cost", ("", *COLUMNS), [*spent, ("each token after it", *decode.cells())]))
    if dropped := sum(completion.dropped_rows for completion in completions):
        read = sum(depth for completion in completions for depth in completion.depths[completion.prompt :])
        console.print(
            f"Not counted: {counted(dropped, 'row')} of rejected drafts ({dropped / max(1, read):.0%} of the rows of "
            f"the tokens after the prompt), and memory for {deepest} rows per draft; --drafts 0 saves both"
        )


def _total(costs: Sequence[Spent]) -> Spent:
    """Returns the sum of the costs of concurrent completions, with the seconds of the slowest completion."""
    return replace(reduce(add, costs), seconds=max(spent.seconds for spent in costs), scored=None)
