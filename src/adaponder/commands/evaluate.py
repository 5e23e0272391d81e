"""adaponder eval and adaponder compare: loss and its cost, on the same tokens for every checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from adaponder.commands import shared
from adaponder.commands import tasks as task_command
from adaponder.commands.shared import arg, opt
from adaponder.devices import WEIGHTS
from adaponder.errors import EvaluationError, InputError
from adaponder.fields import option
from adaponder.terminal import console, counted, counting, table, write_json

if TYPE_CHECKING:
    from adaponder.evaluation.scoring import Scores, ScoringOptions
    from adaponder.evaluation.summary import Difference, Summary
    from adaponder.evaluation.text import Text, Windows

_TASKS = "Tasks"


def evaluate(
    checkpoint: shared.Checkpoint,
    *,
    data: Annotated[str | None, opt(shared.DATA, "TEXT")] = None,
    depths: Annotated[str | None, opt("Score also with every token read equally often.", "1,2,…")] = None,
    dense: Annotated[bool, opt("Compute halted tokens too, and mask.", flag="--dense")] = False,
    check_tokens: Annotated[int, opt("Compare skipping with dense on this many tokens; 0: do not.", "N", min=0)] = 2048,
    json: shared.Json = None,
    tasks: Annotated[
        str | None, opt("Tasks of lm-evaluation-harness instead of a text.", "a,b,…", panel=_TASKS)
    ] = None,
    suite: Annotated[
        str | None,
        opt(
            "paper: its nine tasks at 0 and 5 shots, against Pythia.",
            "NAME",
            check=shared.one_of("paper"),
            panel=_TASKS,
        ),
    ] = None,
    fewshot: Annotated[
        str | None, opt("Examples before each item; default 0, or the suite's.", "0,5", panel=_TASKS)
    ] = None,
    task_data: Annotated[
        Path | None, opt("Read tasks from DIR/TASK/SPLIT.jsonl or .jsonl.xz, not from the hub.", "DIR", panel=_TASKS)
    ] = None,
    limit: Annotated[int | None, opt("Use only the first N items of each task.", "N", min=1, panel=_TASKS)] = None,
    split: shared.Split = "validation",
    window: shared.Window = None,
    stride: shared.Stride = None,
    across_documents: shared.AcrossDocuments = True,
    max_tokens: shared.MaxTokens = None,
    batch_size: shared.BatchSize = 8,
    policy: shared.PolicyText = None,
    tau: shared.Tau = None,
    profile: shared.Profile = None,
    max_iterations: shared.MaxIterations = None,
    weights: shared.Weights = None,
    tokenizer: shared.Tokenizer = None,
    seed: shared.Seed = 0,
    device: shared.Device = "cpu",
    dtype: shared.Dtype = "auto",
) -> dict[str, Any]:
    """Loss, perplexity and bits per byte on a text, or scores on tasks; and what they cost.

    [dim]adaponder eval runs/demo --data stdlib --depths 1,2,3,4[/]

    [dim]adaponder eval runs/demo --tasks lambada_openai,arc_easy,sciq --task-data evaluation-sets/[/]
    """
    fixed_depths, shots = shared.numbers("--depths", depths), shared.numbers("--fewshot", fewshot, least=0, most=1000)
    if (data is not None) == bool(tasks or suite is not None):
        raise InputError("give one of --data (a text to score), --tasks and --suite paper")
    halting: dict[str, Any] = {"policy": policy, "tau": tau, "profile": profile, "max_iterations": max_iterations}
    if data is None:
        shared.refuse("--tasks", depths=depths, dense=dense, window=window, stride=stride, max_tokens=max_tokens)
        return task_command.run_tasks(
            checkpoint,
            shared.names("--tasks", tasks),
            suite=suite,
            fewshot=shots,
            task_data=task_data,
            limit=limit,
            **halting,
            batch_size=batch_size,
            weights=weights,
            tokenizer=tokenizer,
            seed=seed,
            device=device,
            dtype=dtype,
            json=json,
        )
    shared.refuse("--data", fewshot=shots, limit=limit, task_data=task_data)
    subject = shared.open_subject(checkpoint, tokenizer=tokenizer, dtype=dtype, device=device)
    windows = subject.windows(window, stride, across_documents)
    how = subject.scoring(**halting, execution="dense" if dense else None, seed=seed)
    by_label = {own_label(subject, how): how} | forced(subject, fixed_depths, how)
    text = subject.text(data, split=split, max_tokens=max_tokens)
    scorings = [scored(subject, text, windows, label, setting, batch_size) for label, setting in by_label.items()]
    narrowed = None
    if weights is not None:
        narrowed = Narrowed.of(subject, weights, scorings[0], text, windows, how, batch_size)
        scorings.append(narrowed.scoring)
    console.print(described(data, text, windows))
    show_scorings(checkpoint, scorings)
    if narrowed is not None:
        console.print(f"\n{narrowed}")
    from adaponder.evaluation.summary import by_source

    sources = by_source(text, scorings[0].scores.nll, scorings[0].scores.depth, seed=seed)
    show_sources(sources)
    halts = subject.model.method.halts
    result: dict[str, Any] = {
        "checkpoint": checkpoint,
        "method": subject.model.config.method,
        "data": data,
        "split": split,
        "windows": str(windows),
        "dtype": str(subject.model.dtype).removeprefix("torch."),
        "device": str(subject.model.device),
        "seed": seed,
        "policy": own_policy(subject, how),
        "max_iterations": max_iterations,
        "execution": "dense" if dense else "compact" if halts else "dense",
        "max_tokens": max_tokens,
        "rows": [scoring.as_dict() for scoring in scorings],
        "sources": {name: summary.as_dict() for name, summary in sources.items()},
    }
    if narrowed is not None:
        result["weights"] = narrowed.as_dict()
    if halts and not dense and check_tokens:
        from adaponder.evaluation.agreement import agreement

        agreed = agreement(subject.model, text.first(check_tokens), windows, how=how, batch_size=batch_size)
        console.print(f"\n{agreed}", style=None if agreed.holds else "bold red")
        result["agreement"] = agreed.as_dict()
        write_json(json, result)
        if not agreed.holds:
            raise EvaluationError(f"{agreed}; this is a bug in adaponder: please report it; --dense is the plain way")
    write_json(json, result)
    return result


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
    from adaponder.evaluation.meter import COLUMNS

    spent = [(scoring.label, *scoring.scores.spent.cells()) for scoring in scorings]
    console.print(table("\nWhat it cost", ("", *COLUMNS), spent))


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
        subject: shared.Subject,
        weights: str,
        before: Scoring,
        text: Text,
        windows: Windows,
        how: ScoringOptions,
        batch_size: int,
    ) -> Narrowed:
        """Makes the weights of ``subject`` narrower, in place, and scores the text once more."""
        from adaponder.conversion.narrow import narrow, weight_bytes
        from adaponder.evaluation.summary import paired_difference

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
    from adaponder.evaluation.summary import FEW

    few = f" (intervals need {FEW})" if len(text.starts) < FEW else ""
    learned = "" if text.learned is None else f", {int(text.learned.sum()):,} of these tokens learned and scored"
    tokens, documents = counted(text.predictions, "token"), counted(len(text.starts), "document")
    return f"{data}: {tokens} of {documents}{few}{learned}, {windows}"


def own_label(subject: shared.Subject, how: ScoringOptions) -> str:
    """What the table calls a scoring with the options ``how``: the policy, the one depth, or "its own depths"."""
    most = how.max_iterations or subject.model.config.iterations
    if how.policy is None and not subject.model.method.halts:
        return f"depth {most}"
    who = "its own depths" if how.policy is None else str(getattr(how.policy, "spelling", "policy"))
    return who if how.max_iterations is None else f"{who}, at most {most}"


def own_policy(subject: shared.Subject, how: ScoringOptions) -> str | None:
    """The policy that decided depths, as ``--policy`` takes it; ``None`` for a method that never halts."""
    if not subject.model.method.halts:
        return None
    policy = how.policy if how.policy is not None else subject.model.method.default_policy(training=False)
    return str(getattr(policy, "spelling", policy))


def forced(subject: shared.Subject, depths: Sequence[int], how: ScoringOptions) -> dict[str, ScoringOptions]:
    """For each of ``depths``, its label and the options that give every token that depth."""
    from adaponder.evaluation.scoring import ScoringOptions
    from adaponder.policies import FixedDepth

    most = subject.model.config.iterations
    if wrong := [depth for depth in depths if not 1 <= depth <= most]:
        raise InputError(f"--depths {','.join(map(str, wrong))} must be between 1 and {most}, the model's iterations")
    halts = subject.model.method.halts
    limits: dict[int, dict[str, Any]] = {
        depth: {"policy": FixedDepth(depth)} if halts else {"max_iterations": depth} for depth in depths
    }
    return {
        f"depth {depth}": ScoringOptions(**limit, execution=how.execution, seed=how.seed)
        for depth, limit in limits.items()
    }


def scored(
    subject: shared.Subject, text: Text, windows: Windows, label: str, how: ScoringOptions, batch_size: int
) -> Scoring:
    """Scores ``text`` with the checkpoint and the options ``how``."""
    from adaponder.evaluation.scoring import score
    from adaponder.evaluation.summary import summarise

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


def compare(
    first: Annotated[str, arg("A checkpoint: folder or hub name.", "A")],
    second: Annotated[str, arg("Another, with the same tokenizer.", "B")],
    *,
    data: Annotated[str, opt(shared.DATA, "TEXT")],
    policy_a: Annotated[str | None, opt("A's policy, as --policy of eval: gate:0.1 is another tau.", "RULE")] = None,
    policy_b: Annotated[str | None, opt("B's policy.", "RULE")] = None,
    profile_a: Annotated[str | None, opt("A's budget, as adaponder calibrate stored it.", "NAME")] = None,
    profile_b: Annotated[str | None, opt("B's budget.", "NAME")] = None,
    max_iterations_a: Annotated[
        int | None, option("max_iterations", help="Read no token more often than this in A.")
    ] = None,
    max_iterations_b: Annotated[int | None, option("max_iterations", help="The same in B.")] = None,
    weights_a: Annotated[
        str | None, opt("Narrower weights of A, as --weights of eval.", "NAME", check=shared.one_of(*WEIGHTS))
    ] = None,
    weights_b: Annotated[str | None, opt("Narrower weights of B.", "NAME", check=shared.one_of(*WEIGHTS))] = None,
    json: shared.Json = None,
    split: shared.Split = "validation",
    window: shared.Window = None,
    stride: shared.Stride = None,
    across_documents: shared.AcrossDocuments = True,
    max_tokens: shared.MaxTokens = None,
    batch_size: shared.BatchSize = 8,
    tokenizer: shared.Tokenizer = None,
    seed: shared.Seed = 0,
    device: shared.Device = "cpu",
    dtype: shared.Dtype = "auto",
) -> dict[str, Any]:
    """Two checkpoints, or one at two budgets, on the same tokens: the paired difference of their losses, B minus A.

    [dim]adaponder compare runs/demo runs/demo --profile-b budget-2.5 --data data/stdlib-train-bpe-2048[/]
    """
    from adaponder.evaluation.summary import FEW, paired_difference

    weights = (weights_a, weights_b)
    subjects = [
        shared.open_subject(name, tokenizer=tokenizer, dtype=dtype, device=device, weights=narrow)
        for name, narrow in zip((first, second), weights, strict=True)
    ]
    hash_a, hash_b = (subject.vocabulary.hash for subject in subjects)
    if hash_a != hash_b:
        raise InputError(
            f"{first} and {second} have different tokenizers ({hash_a[:12]}, {hash_b[:12]}), so their tokens cannot be "
            "paired; compare the bits per byte of adaponder eval instead"
        )
    # The shorter context of the two, so that both see equally much of the text before a token.
    windows = min(
        (subject.windows(window, stride, across_documents) for subject in subjects), key=lambda cut: cut.length
    )
    halting: list[dict[str, Any]] = [
        {"policy": policy_a, "profile": profile_a, "max_iterations": max_iterations_a, "side": "-a"},
        {"policy": policy_b, "profile": profile_b, "max_iterations": max_iterations_b, "side": "-b"},
    ]
    settings = [subject.scoring(**choice, seed=seed) for subject, choice in zip(subjects, halting, strict=True)]
    text = subjects[0].text(data, split=split, max_tokens=max_tokens)
    labels = [
        f"{letter}: {own_label(subject, how)}" + ("" if narrow is None else f", {narrow} weights")
        for letter, subject, how, narrow in zip("AB", subjects, settings, weights, strict=True)
    ]
    scorings = [
        scored(subject, text, windows, label, how, batch_size)
        for subject, label, how in zip(subjects, labels, settings, strict=True)
    ]
    difference = paired_difference(text, scorings[0].scores.nll, scorings[1].scores.nll, seed=seed)
    console.print(described(data, text, windows))
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
        "data": data,
        "split": split,
        "windows": str(windows),
        "tokenizer": tokenizer,
        "weights": list(weights),
        "max_iterations": [max_iterations_a, max_iterations_b],
        "seed": seed,
        "rows": [scoring.as_dict() for scoring in scorings],
        "difference": difference.as_dict(),
    }
    write_json(json, result)
    return result
