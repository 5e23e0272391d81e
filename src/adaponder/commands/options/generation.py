"""Options of ``adaponder generate``."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from adaponder.commands.options import values
from adaponder.commands.options.option import Option
from adaponder.commands.options.shared import CHECKPOINT, TOKENIZER, DepthOptions, NarrowWeights, OpenedModel


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How the next token is chosen, and where the text ends."""

    max_new_tokens: Annotated[int, Option(metavar="N", min=1, help="How many tokens to add.")] = 64
    temperature: Annotated[
        float, Option(metavar="X", help="Of the sampling; 0: always the likeliest token.", check=values.from_to(0, 100))
    ] = 1.0
    top_k: Annotated[int, Option(metavar="N", min=0, help="Sample from the N likeliest tokens; 0: from all.")] = 0
    top_p: Annotated[
        float,
        Option(
            metavar="X",
            help="Sample from the likeliest tokens of this total probability.",
            check=values.above(0, most=1),
        ),
    ] = 1.0
    min_p: Annotated[
        float,
        Option(
            metavar="X", help="Sample from tokens X times as probable as the likeliest, or more.", check=values.share
        ),
    ] = 0.0
    repetition_penalty: Annotated[
        float,
        Option(
            metavar="X",
            help="Above 1: tokens that were there are less likely.",
            check=values.above(0, most=1e6),
        ),
    ] = 1.0
    greedy: Annotated[bool, Option(flags=("--greedy",), help="Always the likeliest token.")] = False
    stop: Annotated[
        Sequence[str],
        Option(several=True, metavar="TEXT", help="End before this text, which is not shown; may be repeated."),
    ] = ()


@dataclass(frozen=True, kw_only=True)
class _Showing:
    depth_colours: Annotated[bool, Option(help="Colour each token by how often it was read.")] = True
    interactive: Annotated[
        bool,
        Option(flags=("--interactive",), help="Ask for prompts, one after another; /help says what else it takes."),
    ] = False


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(SamplingOptions, DepthOptions, _Showing, NarrowWeights, OpenedModel):
    """``adaponder generate``; a ``prompt`` may be one text."""

    checkpoint: Annotated[str, CHECKPOINT]
    prompt: Annotated[
        Sequence[str] | str,
        Option(
            several=True,
            metavar="TEXT",
            help="What to go on from; may be repeated. -, or no prompt where input is piped: all of standard input.",
        ),
    ] = ()
    prompt_file: Annotated[
        Path | None,
        Option(
            metavar="FILE",
            help="One prompt per line, empty lines left out; .jsonl: the field prompt of each line; -: lines of "
            "standard input.",
        ),
    ] = None
    chat: Annotated[
        bool,
        Option(
            flags=("--chat",),
            help="A prompt is what a user says: the tokenizer's chat template writes it, and the text is the answer.",
        ),
    ] = False
    samples: Annotated[int, Option(metavar="N", min=1, help="Continuations of each prompt.")] = 1
    lanes: Annotated[int, Option(metavar="N", min=1, help="Sequences that are computed at a time.")] = 64
    drafts: Annotated[
        int | None,
        Option(
            metavar="N",
            min=0,
            help="Tokens of a text, at most, that are begun before it is certain that they follow: the same text, "
            "sooner, for more computation. By default none with more than four sequences at a time.",
        ),
    ] = None
    tokenizer: Annotated[str | None, TOKENIZER] = None

    def request_settings(self) -> dict[str, Any]:
        """The fields of :class:`adaponder.inference.request.Request` that the options set; the policy is left out."""
        names = ("max_new_tokens", "top_k", "top_p", "min_p", "repetition_penalty", "seed", "max_iterations")
        settings = {name: getattr(self, name) for name in names}
        return settings | {"temperature": 0.0 if self.greedy else self.temperature}
