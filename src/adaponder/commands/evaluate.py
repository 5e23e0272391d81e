"""adaponder eval and adaponder compare: measure loss and cost, on the same tokens for every checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from adaponder.commands import shared
from adaponder.commands import tasks as task_command
from adaponder.commands.shared import arg, opt
from adaponder.devices import WEIGHTS
from adaponder.errors import EvaluationError, InputError
from adaponder.fields import option
from adaponder.terminal import console, counted, counting, spread, table, write_json

if TYPE_CHECKING:
    from adaponder.evaluation.scoring import Scores, ScoringOptions
    from adaponder.evaluation.summary import Summary
    from adaponder.evaluation.text import Text, Windows

_task = partial(opt, panel="Tasks")
_TASK_DATA = "Read tasks from DIR/TASK/SPLIT.jsonl or .jsonl.xz, not from the hub."
_PAPER = "paper: the paper's nine tasks at 0 and 5 shots, beside its scores of Pythia."


@shared.command
def evaluate(
    checkpoint: shared.Checkpoint,
    *,
    data: Annotated[str | None, opt(shared.DATA, "TEXT")] = None,
    depths: Annotated[str | None, opt("Also score with all tokens at these fixed depths.", "1,2,…")] = None,
    dense: Annotated[bool, opt("Compute halted tokens too, and mask them.", flag="--dense")] = False,
    check_tokens: Annotated[int, opt("Check skipping against dense on the first N tokens; 0: off.", "N", min=0)] = 2048,
    json: shared.Json = None,
    tasks: Annotated[str | None, _task("Tasks of lm-evaluation-harness instead of a text.", "a,b,…")] = None,
    suite: Annotated[str | None, _task(_PAPER, "NAME", check=shared.one_of("paper"))] = None,
    fewshot: Annotated[str | None, _task("Examples before each item; default 0, or the suite's.", "0,5")] = None,
    task_data: Annotated[Path | None, _task(_TASK_DATA, "DIR")] = None,
    limit: Annotated[int | None, _task("Use only the first N items of each task.", "N", min=1)] = None,
    reading: shared.Reading,
    depth: shared.Depth,
    opening: shared.NarrowOpening,
) -> dict[str, Any]:
    """Measure loss, perplexity and bits per byte on a text, or scores on tasks, and their cost.

    [dim]adaponder eval runs/demo --data stdlib --depths 1,2,3,4[/]
    [dim]adaponder eval runs/demo --tasks lambada_openai,arc_easy,sciq --task-data evaluation-sets/[/]
    """
    fixed_depths, shots = shared.listed("--depths", depths), shared.listed("--fewshot", fewshot, int, "[0, 1000]")
    if (data is not None) == bool(tasks or suite is not None):
        raise InputError("give one of --data (a text to score), --tasks and --suite paper")
    if data is None:
        unused = {"window": reading.window, "stride": reading.stride, "max_tokens": reading.max_tokens}
        shared.refuse("--tasks", depths=depths, dense=dense, **unused)
        return task_command.run_tasks(
            checkpoint,
            shared.listed("--tasks", tasks, str),
            suite=suite,
            fewshot=shots,
            task_data=task_data,
            limit=limit,
            json=json,
            batch_size=reading.batch_size,
            seed=reading.seed,
            depth=depth,
            opening=opening,
        )
    shared.refuse("--data", fewshot=shots, limit=limit, task_data=task_data)
    subject = shared.open_subject(checkpoint, opening)
    model, windows = subject.model, reading.windows(subject)
    how = depth.scoring(subject, reading.seed, execution="dense" if dense else None)
    by_label = {own_label(subject, how): how} | forced(subject, fixed_depths, how)
    text = reading.text(subject, data)
    score = partial(scored, subject, text, windows, batch_size=reading.batch_size)
    scorings = [score(label, options) for label, options in by_label.items()]
    from adaponder.evaluation.scoring import agreement
    from adaponder.evaluation.summary import by_source

    sources = by_source(text, scorings[0].scores.nll, scorings[0].scores.depth, seed=reading.seed)
    halts, policy = model.method.halts, how.policy or model.method.default_policy(training=False)
    result = shared.facts_of(checkpoint, model) | reading.facts(data, windows)
    result |= {
        "policy": str(getattr(policy, "spelling", policy)) if halts else None,
        "max_iterations": depth.max_iterations,
        "execution": "compact" if halts and not dense else "dense",
        "max_tokens": reading.max_tokens,
        "unknown_tokens": int(text.unknown.sum()),
        "sources": {name: summary.as_dict() for name, summary in sources.items()},
    }
    narrowing = ""
    if opening.weights is not None:
        narrowed, result["weights"], narrowing = narrow(
            subject, opening.weights, scorings, text, by_label.values(), score
        )
        scorings += narrowed
    result["rows"] = [scoring.as_dict() for scoring in scorings]
    console.print(described(data, text, windows))
    show_scorings(checkpoint, scorings)
    if narrowing:
        console.print(f"\n{narrowing}")
    if sources:
        show_sources(sources)
    agreed = None
    if halts and not dense and check_tokens:
        agreed = agreement(model, text.first(check_tokens), windows, how=how, batch_size=reading.batch_size)
        console.print(f"\n{agreed}", style=None if agreed.holds else "bold red")
        result["agreement"] = agreed.as_dict()
    write_json(json, result)
    if agreed is not None and not agreed.holds:
        raise EvaluationError(f"{agreed}; this is a bug in adaponder: please report it; --dense avoids it")
    if halts and how.policy is None and Path(checkpoint).is_dir():
        console.print_next("calibrate", checkpoint, "--data", data, "--budget", f"{0.75 * model.config.iterations:g}")
    return result


@dataclass(frozen=True)
class Scoring:
    """Scores of a text by one checkpoint and policy, with their label in tables."""

    label: str
    scores: Scores
    summary: Summary
    embedding_scale: float

    def as_dict(self) -> dict[str, Any]:
        about = {"label": self.label, "embedding_scale": self.embedding_scale}
        return about | self.summary.as_dict() | {"cost": self.scores.spent.as_dict()}


def loss_cells(summary: Summary) -> tuple[str, str, str]:
    """Returns the table cells of the loss, its interval, and bits per byte."""
    bits = "" if summary.bits_per_byte is None else f"{summary.bits_per_byte:.4f}"
    return f"{summary.loss:.4f}", spread(summary.interval), bits


def show_scorings(title: str, scorings: list[Scoring], *, several_models: bool = False) -> None:
    """Prints a table of losses and a table of costs; with ``several_models``, also each model's embedding scale."""
    from adaponder.evaluation.meter import COLUMNS

    rows = []
    for scoring in scorings:
        loss, interval, bits = loss_cells(scoring.summary)
        scale = f"{scoring.embedding_scale:g}" if several_models else ""
        rows.append((scoring.label, loss, interval, f"{scoring.summary.perplexity:,.2f}", bits, scale))
    console.print(table(title, ("", "loss", "95 %", "perplexity", "bits/byte", "emb. scale"), rows))
    spent = [(scoring.label, *scoring.scores.spent.cells()) for scoring in scorings]
    console.print(table("\nWhat it cost", ("", *COLUMNS), spent))


def show_sources(sources: dict[str, Summary]) -> None:
    """Prints a table of the tokens, loss and mean depth of each source."""
    rows = [
        (name, f"{summary.tokens:,}", *loss_cells(summary), f"{summary.depth:.3f}") for name, summary in sources.items()
    ]
    console.print(table("\nBy source", ("source", "tokens", "loss", "95 %", "bits/byte", "iterations"), rows))


def narrow(
    subject: shared.Subject,
    weights: str,
    scorings: Sequence[Scoring],
    text: Text,
    options: Iterable[ScoringOptions],
    score: Callable[..., Scoring],
) -> tuple[list[Scoring], dict[str, Any], str]:
    """Converts the weights of ``subject`` in place to ``weights``, such as ``int8``, and repeats the ``scorings``.

    ``options`` holds the options of each scoring; ``score(label, options)`` repeats it. Returns the new scorings, the
    changes for the JSON result, and the lines to print, one per scoring.
    """
    from adaponder.conversion.narrow import narrow, weight_bytes
    from adaponder.evaluation.summary import paired_difference

    sizes = [weight_bytes(subject.model)]
    narrow(subject.model, weights)
    sizes.append(weight_bytes(subject.model))
    repeated, differences, losses = [], {}, {}
    for before, how in zip(scorings, options, strict=True):
        after = score(f"{before.label}, {weights} weights", how)
        repeated.append(after)
        difference = paired_difference(text, before.scores.nll, after.scores.nll, seed=how.seed)
        differences[before.label] = difference.as_dict()
        interval = "" if difference.interval is None else f" (95 % {difference.interval})"
        losses[before.label] = f"{difference.mean:+.4f} nats per token{interval}"
    first, last = scorings[0], repeated[0]
    depths = [first.summary.depth, last.summary.depth]
    other_depth = float((first.scores.depth != last.scores.depth).mean())
    lines = [
        f"{weights} weights: {losses.pop(first.label)}, mean depth {depths[0]:.3f} to {depths[1]:.3f}, "
        f"{other_depth:.1%} of the tokens at another depth; {sizes[0] / 1e6:,.1f} MB of weights become "
        f"{sizes[1] / 1e6:,.1f}"
    ]
    lines += [f"{label}: {loss}" for label, loss in losses.items()]
    changes = {"weights": weights, "difference": differences.pop(first.label), "depth": depths}
    changes |= {"by_depth": differences, "other_depth": other_depth, "bytes": sizes}
    return repeated, changes, "\n".join(lines)


def described(data: str, text: Text, windows: Windows) -> str:
    """Returns the line above the tables: number of tokens, number of documents, windows."""
    from adaponder.evaluation.summary import FEW

    few = f" (intervals need {FEW})" if len(text.starts) < FEW else ""
    learned = "" if text.learned is None else f", {int(text.learned.sum()):,} of these tokens learned and scored"
    tokens, documents = counted(text.predictions, "token"), counted(len(text.starts), "document")
    count = int(text.unknown.sum())
    unknown = f", {counted(count, 'token')} unknown to the tokenizer (no bits per byte)" if count else ""
    return f"{data}: {tokens} of {documents}{few}{learned}{unknown}, {windows}"


def own_label(subject: shared.Subject, how: ScoringOptions) -> str:
    """Returns the label of a scoring in tables: its policy, "depth N", or "its own depths"."""
    most = how.max_iterations or subject.model.config.iterations
    if how.policy is None and not subject.model.method.halts:
        return f"depth {most}"
    rule = "its own depths" if how.policy is None else str(getattr(how.policy, "spelling", "policy"))
    return rule if how.max_iterations is None else f"{rule}, at most {most}"


def forced(subject: shared.Subject, depths: Sequence[int], how: ScoringOptions) -> dict[str, ScoringOptions]:
    """Maps a label such as ``depth 2`` to options that give every token this depth, for each of ``depths``."""
    from adaponder.evaluation.scoring import at_depth

    most = subject.model.config.iterations
    if wrong := [depth for depth in depths if not 1 <= depth <= most]:
        raise InputError(f"--depths {','.join(map(str, wrong))} must be between 1 and {most}, the model's iterations")
    plain = replace(how, policy=None, max_iterations=None)
    return {f"depth {depth}": replace(plain, **at_depth(subject.model, depth)) for depth in depths}


def scored(
    subject: shared.Subject, text: Text, windows: Windows, label: str, how: ScoringOptions, batch_size: int
) -> Scoring:
    """Scores ``text`` with the checkpoint and the options ``how``, with a progress bar."""
    from adaponder.evaluation.scoring import score
    from adaponder.evaluation.summary import summarise

    with counting(f"{subject.name}: {label}", text.predictions) as advance:
        scores = score(subject.model, text, windows, how=how, batch_size=batch_size, advance=advance)
    summary = summarise(text, scores.nll, scores.depth, seed=how.seed)
    return Scoring(label, scores, summary, subject.model.config.table_scale)


_Limit = Annotated[int | None, option("max_iterations", help="Maximum depth of each token.")]
_Narrow = Annotated[str | None, opt("Narrower weights, as --weights of eval.", "NAME", check=shared.one_of(*WEIGHTS))]


@shared.command
def compare(
    first: Annotated[str, arg("A checkpoint: folder or hub name.", "A")],
    second: Annotated[str, arg("Another, with the same tokenizer.", "B")],
    *,
    data: Annotated[str, opt(shared.DATA, "TEXT")],
    policy_a: Annotated[str | None, opt("A's policy, as in eval --policy, e.g. gate:0.1 (tau = 0.1).", "RULE")] = None,
    policy_b: Annotated[str | None, opt("B's policy.", "RULE")] = None,
    profile_a: Annotated[str | None, opt("A's profile, stored by adaponder calibrate.", "NAME")] = None,
    profile_b: Annotated[str | None, opt("B's profile.", "NAME")] = None,
    max_iterations_a: _Limit = None,
    max_iterations_b: _Limit = None,
    weights_a: _Narrow = None,
    weights_b: _Narrow = None,
    json: shared.Json = None,
    reading: shared.Reading,
    opening: shared.Opening,
) -> dict[str, Any]:
    """Compare two checkpoints, or one at two budgets, on the same tokens: the paired difference of losses, B minus A.

    [dim]adaponder compare runs/demo runs/demo --profile-b budget-2.5 --data data/stdlib-train-bpe-2048[/]
    """
    from adaponder.evaluation.summary import FEW, paired_difference

    subject_a = shared.open_subject(first, opening, weights=weights_a)
    subject_b = shared.open_subject(second, opening, weights=weights_b)
    hash_a, hash_b = subject_a.vocabulary.hash, subject_b.vocabulary.hash
    if hash_a != hash_b:
        raise InputError(
            f"{first} and {second} have different tokenizers ({hash_a[:12]}, {hash_b[:12]}), so their tokens cannot be "
            "paired; compare the bits per byte of adaponder eval instead"
        )
    # The shorter of the two default windows, so that every token has the same context under both checkpoints.
    windows = min(reading.windows(subject_a), reading.windows(subject_b), key=lambda windows: windows.length)
    depth_a = shared.Depth(policy=policy_a, profile=profile_a, max_iterations=max_iterations_a)
    depth_b = shared.Depth(policy=policy_b, profile=profile_b, max_iterations=max_iterations_b)
    how_a = depth_a.scoring(subject_a, reading.seed, side="-a")
    how_b = depth_b.scoring(subject_b, reading.seed, side="-b")
    text = reading.text(subject_a, data)
    scorings = []
    for letter, subject, how, weights in (("A", subject_a, how_a, weights_a), ("B", subject_b, how_b, weights_b)):
        label = f"{letter}: {own_label(subject, how)}" + ("" if weights is None else f", {weights} weights")
        scorings.append(scored(subject, text, windows, label, how, reading.batch_size))
    difference = paired_difference(text, scorings[0].scores.nll, scorings[1].scores.nll, seed=reading.seed)
    console.print(described(data, text, windows))
    show_scorings(f"A {first}, B {second}", scorings, several_models=True)
    if difference.interval is None:
        interval = f"too few documents for an interval ({len(text.starts)} of {FEW})"
    else:
        verdict = "significant" if difference.significant else "not significant"
        interval = f"95 % {difference.interval}, paired by document: {verdict} on this text"
    console.print(f"\nB - A: {difference.mean:+.4f} nats per token; {interval}")
    easier, equal = difference.wins, difference.ties
    harder = 1 - easier - equal
    console.print(f"B's loss is lower on {easier:.1%} of the tokens, equal on {equal:.1%}, higher on {harder:.1%}")
    result = reading.facts(data, windows) | {
        "tokenizer": opening.tokenizer,
        "weights": [weights_a, weights_b],
        "max_iterations": [max_iterations_a, max_iterations_b],
        "rows": [scoring.as_dict() for scoring in scorings],
        "difference": difference.as_dict(),
    }
    write_json(json, result)
    return result
