"""adaponder eval on text, and adaponder compare: loss and what it cost, on the same tokens for every checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from adaponder.commands.options import CompareOptions, EvalOptions
from adaponder.commands.options.shared import CheckpointOptions
from adaponder.commands.subject import Subject, open_subject
from adaponder.conversion.narrow import narrow, weight_bytes
from adaponder.errors import EvaluationError, InputError
from adaponder.evaluation.agreement import agreement
from adaponder.evaluation.meter import COLUMNS
from adaponder.evaluation.scoring import Scores, ScoringOptions, score
from adaponder.evaluation.summary import FEW, Difference, Summary, by_source, paired_difference, summarise
from adaponder.evaluation.text import Text, Windows
from adaponder.policies import FixedDepth
from adaponder.terminal import console, counted, counting, table, write_json


@dataclass(frozen=True)
class Scoring:
    """The text scored once: by one checkpoint, at the depths that ``label`` names."""

    label: str
    scores: Scores
    summary: Summary
    embedding_scale: float

    def cells(self) -> tuple[str, ...]:
        """One line of the table, as text."""
        summary = self.summary
        spread = "" if summary.interval is None else f"{summary.interval.low:.3f} … {summary.interval.high:.3f}"
        bits = "" if summary.bits_per_byte is None else f"{summary.bits_per_byte:.4f}"
        return (self.label, f"{summary.loss:.4f}", spread, f"{summary.perplexity:,.2f}", bits)

    def as_dict(self) -> dict[str, Any]:
        own = {"label": self.label, "embedding_scale": self.embedding_scale}
        return own | self.summary.as_dict() | {"cost": self.scores.spent.as_dict()}


def show_scorings(title: str, scorings: list[Scoring], *, several_models: bool = False) -> None:
    """Prints a table of losses and a table of costs; with ``several_models``, also how each scales embeddings."""
    head, cells = ["", "loss", "95 %", "perplexity", "bits/byte"], [list(scoring.cells()) for scoring in scorings]
    if several_models:
        head.append("emb. scale")
        cells = [[*line, f"{scoring.embedding_scale:g}"] for line, scoring in zip(cells, scorings, strict=True)]
    console.print(table(title, head, cells))
    spent = [(scoring.label, *scoring.scores.spent.cells()) for scoring in scorings]
    console.print(table("\nWhat it cost", ("", *COLUMNS), spent))


def run(options: EvalOptions) -> dict[str, Any]:
    """Scores the text ``options.data`` at the checkpoint's own depths, and at each of ``options.depths``.

    Returns what ``--json`` writes.
    """
    if options.data is None:
        raise InputError("--data: say which text to score")
    subject = open_subject(options)
    windows = subject.windows(options)
    how = subject.scoring(options, execution="dense" if options.dense else None, seed=options.seed)
    by_label = {own_label(subject, how): how} | forced(subject, options.depths, how)
    text = subject.text(options.data, options)
    scorings = [scored(subject, text, windows, label, one, options.batch_size) for label, one in by_label.items()]
    narrowed = None
    if options.weights is not None:
        narrowed = Narrowed.of(subject, options.weights, scorings[0], text, windows, how, options.batch_size)
        scorings.append(narrowed.scoring)
    console.print(described(options.data, text, windows))
    show_scorings(options.checkpoint, scorings)
    if narrowed is not None:
        console.print(f"\n{narrowed}")
    parts = by_source(text, scorings[0].scores.nll, scorings[0].scores.depth, seed=options.seed)
    show_sources(parts)
    result: dict[str, Any] = {
        "checkpoint": options.checkpoint,
        "method": subject.model.config.method,
        "data": options.data,
        "split": options.split,
        "windows": str(windows),
        "dtype": str(subject.model.dtype).removeprefix("torch."),
        "device": str(subject.model.device),
        "seed": options.seed,
        "policy": own_policy(subject, how),
        "max_iterations": options.max_iterations,
        "execution": "dense" if options.dense else "compact" if subject.model.method.halts else "dense",
        "max_tokens": options.max_tokens,
        "rows": [scoring.as_dict() for scoring in scorings],
        "sources": {name: part.as_dict() for name, part in parts.items()},
    }
    if narrowed is not None:
        result["weights"] = narrowed.as_dict()
    if subject.model.method.halts and not options.dense and options.check_tokens:
        few = text.first(options.check_tokens)
        agreed = agreement(subject.model, few, windows, how=how, batch_size=options.batch_size)
        console.print(f"\n{agreed}", style=None if agreed.holds else "bold red")
        result["agreement"] = agreed.as_dict()
        write_json(options.json, result)
        if not agreed.holds:
            raise EvaluationError(f"{agreed}; this is a bug in adaponder: please report it; --dense is the plain way")
    write_json(options.json, result)
    return result


@dataclass(frozen=True)
class Narrowed:
    """What narrower weights change: a scoring with them beside one without, on the same tokens.

    Attributes:
        other_depth: share of the tokens that they give another depth.
        bytes_before: memory of the weights as opened.
        bytes_after: memory of the narrower weights.
    """

    weights: str
    before: Scoring
    scoring: Scoring
    difference: Difference
    other_depth: float
    bytes_before: int
    bytes_after: int

    @classmethod
    def of(
        cls,
        subject: Subject,
        weights: str,
        before: Scoring,
        text: Text,
        windows: Windows,
        how: ScoringOptions,
        batch_size: int,
    ) -> Narrowed:
        """Makes the weights of ``subject`` narrower, in place, and scores the text once more."""
        wide = weight_bytes(subject.model)
        narrow(subject.model, weights)
        after = scored(subject, text, windows, f"{before.label}, {weights} weights", how, batch_size)
        return cls(
            weights,
            before,
            after,
            paired_difference(text, before.scores.nll, after.scores.nll, seed=how.seed),
            float((before.scores.depth != after.scores.depth).mean()),
            wide,
            weight_bytes(subject.model),
        )

    def __str__(self) -> str:
        one, two = self.before.summary.depth, self.scoring.summary.depth
        spread = "" if self.difference.interval is None else f" (95 % {self.difference.interval})"
        return (
            f"{self.weights} weights: {self.difference.mean:+.4f} nats per token{spread}, mean depth {one:.3f} to "
            f"{two:.3f}, {self.other_depth:.1%} of the tokens at another depth; {self.bytes_before / 1e6:,.1f} MB of "
            f"weights become {self.bytes_after / 1e6:,.1f}"
        )

    def as_dict(self) -> dict[str, Any]:
        return {
            "weights": self.weights,
            "difference": self.difference.as_dict(),
            "depth": [self.before.summary.depth, self.scoring.summary.depth],
            "other_depth": self.other_depth,
            "bytes": [self.bytes_before, self.bytes_after],
        }


def described(data: str, text: Text, windows: Windows) -> str:
    """The sentence above the tables: numbers of tokens and documents, and the windows."""
    few = f" (intervals need {FEW})" if len(text.starts) < FEW else ""
    learned = "" if text.learned is None else f", {int(text.learned.sum()):,} of these tokens learned and scored"
    tokens, documents = counted(text.predictions, "token"), counted(len(text.starts), "document")
    return f"{data}: {tokens} of {documents}{few}{learned}, {windows}"


def own_label(subject: Subject, how: ScoringOptions) -> str:
    """What the table calls a scoring with the options ``how``: the policy, the one depth, or "its own depths"."""
    most = how.max_iterations or subject.model.config.iterations
    if how.policy is None and not subject.model.method.halts:
        return f"depth {most}"
    who = "its own depths" if how.policy is None else str(getattr(how.policy, "spelling", "policy"))
    return who if how.max_iterations is None else f"{who}, at most {most}"


def own_policy(subject: Subject, how: ScoringOptions) -> str | None:
    """The policy that decided depths, as ``--policy`` takes it; ``None`` for a method that never halts."""
    if not subject.model.method.halts:
        return None
    policy = how.policy if how.policy is not None else subject.model.method.default_policy(training=False)
    return str(getattr(policy, "spelling", policy))


def forced(subject: Subject, depths: Sequence[int], how: ScoringOptions) -> dict[str, ScoringOptions]:
    """For each of ``depths``, its label and the options that give every token that depth."""
    most = subject.model.config.iterations
    if wrong := [depth for depth in depths if not 1 <= depth <= most]:
        raise InputError(f"--depths {','.join(map(str, wrong))}: from 1 to {most}, the model's iterations")
    if subject.model.method.halts:
        return {
            f"depth {depth}": ScoringOptions(policy=FixedDepth(depth), execution=how.execution, seed=how.seed)
            for depth in depths
        }
    return {
        f"depth {depth}": ScoringOptions(max_iterations=depth, execution=how.execution, seed=how.seed)
        for depth in depths
    }


def scored(subject: Subject, text: Text, windows: Windows, label: str, how: ScoringOptions, batch_size: int) -> Scoring:
    """Scores ``text`` with the checkpoint and the options ``how``."""
    with counting(f"{subject.name}: {label}", text.predictions) as advance:
        scores = score(subject.model, text, windows, how=how, batch_size=batch_size, advance=advance)
    summary = summarise(text, scores.nll, scores.depth, seed=how.seed)
    return Scoring(label, scores, summary, subject.model.config.table_scale)


def show_sources(parts: dict[str, Summary]) -> None:
    """Prints a table with a line per source of the text; nothing if the text has no sources."""
    if not parts:
        return
    rows = [
        (
            name,
            f"{part.tokens:,}",
            f"{part.loss:.4f}",
            "" if part.interval is None else f"{part.interval.low:.3f} … {part.interval.high:.3f}",
            "" if part.bits_per_byte is None else f"{part.bits_per_byte:.4f}",
            f"{part.depth:.3f}",
        )
        for name, part in parts.items()
    ]
    console.print(table("\nBy source", ("source", "tokens", "loss", "95 %", "bits/byte", "iterations"), rows))


def compare(options: CompareOptions) -> dict[str, Any]:
    """Scores both checkpoints on the same tokens in the same windows; the difference is loss of B minus loss of A.

    Returns what ``--json`` writes.
    """
    first, second = options.first, options.second
    sides = [options.side(letter) for letter in "ab"]
    opened = {"tokenizer": options.tokenizer, "dtype": options.dtype, "device": options.device}
    subjects = [
        open_subject(CheckpointOptions(checkpoint=name, **opened), weights=side.weights)
        for name, side in zip((first, second), sides, strict=True)
    ]
    one, two = (subject.vocabulary.hash for subject in subjects)
    if one != two:
        raise InputError(
            f"{first} and {second} have different tokenizers ({one[:12]}, {two[:12]}): their tokens cannot be paired; "
            "compare the bits per byte of adaponder eval instead"
        )
    # The shorter context of the two, so that both see equally much of the text before a token.
    windows = min((one.windows(options) for one in subjects), key=_length)
    scoring_options = [
        one.scoring(side.depth, seed=options.seed, side=f"-{letter}")
        for letter, one, side in zip("ab", subjects, sides, strict=True)
    ]
    text = subjects[0].text(options.data, options)
    labels = [
        f"{letter}: {own_label(one, how)}" + ("" if side.weights is None else f", {side.weights} weights")
        for letter, one, how, side in zip("AB", subjects, scoring_options, sides, strict=True)
    ]
    scorings = [
        scored(one, text, windows, label, how, options.batch_size)
        for one, label, how in zip(subjects, labels, scoring_options, strict=True)
    ]
    difference = paired_difference(text, scorings[0].scores.nll, scorings[1].scores.nll, seed=options.seed)
    console.print(described(options.data, text, windows))
    show_scorings(f"A {first}, B {second}", scorings, several_models=True)
    if difference.interval is None:
        words = f"too few documents for an interval ({len(text.starts)} of {FEW})"
    else:
        verdict = "told apart" if difference.told_apart else "not told apart"
        words = f"95 % {difference.interval}, paired by document: {verdict} on this text"
    console.print(f"\nB - A: {difference.mean:+.4f} nats per token; {words}")
    easier, equal = difference.wins, difference.ties
    console.print(f"Of the tokens, B finds {easier:.1%} easier, {equal:.1%} equal, {1 - easier - equal:.1%} harder")
    result = {
        "data": options.data,
        "split": options.split,
        "windows": str(windows),
        "tokenizer": options.tokenizer,
        "weights": [options.weights_a, options.weights_b],
        "max_iterations": [options.max_iterations_a, options.max_iterations_b],
        "seed": options.seed,
        "rows": [scoring.as_dict() for scoring in scorings],
        "difference": difference.as_dict(),
    }
    write_json(options.json, result)
    return result


def _length(windows: Windows) -> int:
    return windows.length
