"""Options of the commands that say what a checkpoint is worth and what it costs."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

from adaponder.commands.options import values
from adaponder.commands.options.option import Option
from adaponder.commands.options.shared import (
    DATA,
    BatchSize,
    CheckpointOptions,
    DepthOptions,
    NamedTokenizer,
    NarrowWeights,
    OpenedModel,
    WindowOptions,
)
from adaponder.devices import WEIGHTS

if TYPE_CHECKING:
    from adaponder.policies import Policy

RULES = ("gate", "uniform", "geometric", "entropy", "kl", "change", "confidence", "similarity", "random")


@dataclass(frozen=True, kw_only=True)
class _ForcedDepths:
    """Depths beside the checkpoint's own, and how skipping is checked."""

    depths: Annotated[
        Sequence[int],
        Option(metavar="1,2,…", help="Also with every token read equally often.", read=values.numbers()),
    ] = ()
    dense: Annotated[bool, Option(flags=("--dense",), help="Compute halted tokens too, and mask.")] = False
    check_tokens: Annotated[
        int, Option(metavar="N", min=0, help="Compare skipping with dense on so many tokens; 0: do not.")
    ] = 2048


@dataclass(frozen=True, kw_only=True)
class EvalOptions(WindowOptions, _ForcedDepths, DepthOptions, BatchSize, NarrowWeights, CheckpointOptions):
    """``adaponder eval``: on a text (``data``), or on tasks of lm-eval (``tasks`` or ``suite``)."""

    data: Annotated[str | None, Option(metavar="TEXT", help=DATA)] = None
    tasks: Annotated[
        Sequence[str],
        Option(metavar="a,b,…", help="Tasks of lm-evaluation-harness instead of a text.", read=values.names),
    ] = ()
    suite: Annotated[
        str | None,
        Option(
            metavar="NAME",
            help="paper: its nine tasks at 0 and 5 shots, against Pythia.",
            check=values.one_of("paper"),
        ),
    ] = None
    fewshot: Annotated[
        Sequence[int],
        Option(
            metavar="0,5",
            help="Tasks: examples before each item; default 0, or the suite's.",
            read=values.numbers(least=0, most=1000),
        ),
    ] = ()
    task_data: Annotated[
        Path | None, Option(metavar="DIR", help="Tasks from DIR/TASK/SPLIT.jsonl or .jsonl.xz, not from the hub.")
    ] = None
    limit: Annotated[int | None, Option(metavar="N", min=1, help="Tasks: only the first so many items of each.")] = None


class Side(NamedTuple):
    """What is asked of one of two checkpoints: who decides depth, and narrower weights."""

    depth: DepthOptions
    weights: str | None


@dataclass(frozen=True, kw_only=True)
class _Sides:
    """Who decides depth in each of two checkpoints, and with which weights they compute."""

    policy_a: Annotated[
        "Policy | None",
        Option(
            metavar="RULE", help="Who halts in A; as --policy of eval: gate:0.1 is another tau.", read=values.policy
        ),
    ] = None
    policy_b: Annotated["Policy | None", Option(metavar="RULE", help="Who halts in B.", read=values.policy)] = None
    profile_a: Annotated[str | None, Option(metavar="NAME", help="A's budget, as adaponder calibrate stored it.")] = (
        None
    )
    profile_b: Annotated[str | None, Option(metavar="NAME", help="B's budget.")] = None
    max_iterations_a: Annotated[
        int | None, Option(metavar="N", min=1, help="Read no token more often than this in A.")
    ] = None
    max_iterations_b: Annotated[int | None, Option(metavar="N", min=1, help="The same in B.")] = None
    weights_a: Annotated[
        str | None,
        Option(metavar="NAME", help="Narrower weights of A, as --weights of eval.", check=values.one_of(*WEIGHTS)),
    ] = None
    weights_b: Annotated[
        str | None, Option(metavar="NAME", help="Narrower weights of B.", check=values.one_of(*WEIGHTS))
    ] = None

    def side(self, letter: str) -> Side:
        """What is asked of the checkpoint ``a`` or ``b``."""
        named = {name: getattr(self, f"{name}_{letter}") for name in ("policy", "profile", "max_iterations")}
        return Side(DepthOptions(**named), getattr(self, f"weights_{letter}"))


@dataclass(frozen=True, kw_only=True)
class CompareOptions(WindowOptions, _Sides, BatchSize, NamedTokenizer, OpenedModel):
    """``adaponder compare``."""

    first: Annotated[str, Option(argument=True, metavar="A", help="A checkpoint: folder or hub name.")]
    second: Annotated[str, Option(argument=True, metavar="B", help="Another, with the same tokenizer.")]
    data: Annotated[str, Option(metavar="TEXT", help=DATA)]


@dataclass(frozen=True, kw_only=True)
class PoliciesOptions(WindowOptions, BatchSize, CheckpointOptions):
    """``adaponder policies``."""

    checkpoint: Annotated[
        str,
        Option(argument=True, metavar="CKPT", help="A checkpoint; or a policies.json, to draw its figures again."),
    ]
    data: Annotated[str | None, Option(metavar="TEXT", help="As for eval.")] = None
    budgets: Annotated[
        Sequence[float],
        Option(
            metavar="1.5,2.5",
            help="Mean depths to compare at; default: the gate's own.",
            read=values.decimals(least=1),
        ),
    ] = ()
    rates: Annotated[
        Sequence[float],
        Option(
            metavar="0.9,0.5",
            help="Rates of the geometric schedules; default 0.9,0.5.",
            read=values.decimals(most=1),
        ),
    ] = ()
    out: Annotated[Path | None, Option(metavar="DIR", help="Tables and figures go here.", check=values.folder)] = None


@dataclass(frozen=True, kw_only=True)
class CalibrateOptions(WindowOptions, BatchSize, CheckpointOptions):
    """``adaponder calibrate``."""

    checkpoint: Annotated[
        str,
        Option(argument=True, metavar="CKPT", help="A checkpoint; or a frontier.json, to draw its figure again."),
    ]
    data: Annotated[
        str | None,
        Option(metavar="TEXT", help="As for eval: one half finds the thresholds, the other tests."),
    ] = None
    budget: Annotated[float | None, Option(metavar="X", min=1, help="The mean depth that is wanted.")] = None
    name: Annotated[str | None, Option(metavar="NAME", help="Of the profile; default budget-N.")] = None
    rule: Annotated[
        str,
        Option(metavar="NAME", help=f"What is thresholded: {', '.join(RULES)}.", check=values.one_of(*RULES)),
    ] = "gate"
    frontier: Annotated[bool, Option(flags=("--frontier",), help="Loss at every budget from 1 to K.")] = False
    step: Annotated[float, Option(metavar="X", help="Of the frontier.", check=values.above(0))] = 0.25
    replace: Annotated[bool, Option(flags=("--replace",), help="Replace a profile of the same name.")] = False
    out: Annotated[
        Path | None, Option(metavar="DIR", help="Table and figure of the frontier go here.", check=values.folder)
    ] = None
    listed: Annotated[bool, Option(flags=("--list",), help="List the profiles that there are.")] = False


@dataclass(frozen=True, kw_only=True)
class AnalyzeOptions(WindowOptions, DepthOptions, BatchSize, CheckpointOptions):
    """``adaponder analyze``."""

    checkpoint: Annotated[
        str,
        Option(argument=True, metavar="CKPT", help="A checkpoint; or a trace.parquet, to draw its figures again."),
    ]
    data: Annotated[str | None, Option(metavar="TEXT", help="As for eval.")] = None
    out: Annotated[
        Path | None, Option(metavar="DIR", help="Trace, figures, tables and report go here.", check=values.folder)
    ] = None
    only: Annotated[
        Sequence[str], Option(metavar="a,b", help="Only these figures: halting, gates, grid, …", read=values.names)
    ] = ()
