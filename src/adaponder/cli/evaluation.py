"""Commands that say what a checkpoint is worth and what it costs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from adaponder.cli.app import (
    Checkpoint,
    Device,
    Dtype,
    Json,
    MaxIterations,
    PolicyText,
    Profile,
    Seed,
    Tau,
    Tokenizer,
    app,
)
from adaponder.cli.values import above, decimals, folder, names, numbers, one_of, policy_from, refuse
from adaponder.errors import InputError

Data = Annotated[
    str,
    typer.Option(metavar="TEXT", help="A folder made by prepare, text or .jsonl (packed too), .parquet, stdlib."),
]
Split = Annotated[
    str,
    typer.Option(
        metavar="NAME", help="Of a prepared folder: train or validation.", callback=one_of("train", "validation")
    ),
]
Window = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, help="Tokens per window; default: the backbone's positions, at most 2048."),
]
Stride = Annotated[
    int | None, typer.Option(metavar="N", min=1, help="Sliding windows that move on by this many; default: disjoint.")
]
AcrossDocuments = Annotated[
    bool, typer.Option("--across-documents/--by-document", help="May tokens attend to the documents before theirs?")
]
MaxTokens = Annotated[int | None, typer.Option(metavar="N", min=1, help="Only the first so many tokens of the text.")]
BatchSize = Annotated[int, typer.Option(metavar="N", min=1, help="Windows at a time; results do not depend on it.")]


RULES = ("gate", "uniform", "geometric", "entropy", "kl", "change", "random")


@app.command("eval")
def evaluate(
    checkpoint: Checkpoint,
    data: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="A folder made by prepare, text or .jsonl (packed too), .parquet, stdlib."),
    ] = None,
    tasks: Annotated[
        str | None, typer.Option(metavar="a,b,…", help="Tasks of lm-evaluation-harness instead of a text.")
    ] = None,
    suite: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="paper: its nine tasks at 0 and 5 shots, against Pythia.", callback=one_of("paper")
        ),
    ] = None,
    fewshot: Annotated[
        str | None, typer.Option(metavar="0,5", help="Tasks: examples before each item; default 0, or the suite's.")
    ] = None,
    task_data: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Tasks from DIR/TASK/SPLIT.jsonl or .jsonl.xz, not from the hub.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Tasks: only the first so many items of each.")
    ] = None,
    split: Split = "validation",
    window: Window = None,
    stride: Stride = None,
    across_documents: AcrossDocuments = True,
    max_tokens: MaxTokens = None,
    depths: Annotated[
        str | None, typer.Option(metavar="1,2,…", help="Also with every token read equally often.")
    ] = None,
    dense: Annotated[bool, typer.Option("--dense", help="Compute halted tokens too, and mask.")] = False,
    check_tokens: Annotated[
        int, typer.Option(metavar="N", min=0, help="Compare skipping with dense on so many tokens; 0: do not.")
    ] = 2048,
    policy: PolicyText = None,
    tau: Tau = None,
    profile: Profile = None,
    max_iterations: MaxIterations = None,
    batch_size: BatchSize = 8,
    tokenizer: Tokenizer = None,
    seed: Seed = 0,
    device: Device = "cpu",
    dtype: Dtype = "auto",
    json: Json = None,
) -> None:
    """Loss, perplexity and bits per byte on a text, or scores on tasks; and what they cost.

    [dim]adaponder eval runs/demo --data stdlib --depths 1,2,3,4[/]

    [dim]adaponder eval runs/demo --tasks lambada_openai,arc_easy,sciq --task-data evaluation-sets/[/]
    """
    if (data is None) == (tasks is None and suite is None):
        raise InputError("--data: say which text to score; or which --tasks, or --suite paper; one of them")

    if data is None:
        refuse("--tasks", depths=depths, dense=dense, window=window, stride=stride, max_tokens=max_tokens)
        from adaponder.commands import tasks as task_command

        task_command.run(
            checkpoint,
            tasks=names("--tasks", tasks),
            fewshot=numbers("--fewshot", fewshot, least=0, most=1000),
            suite=suite,
            task_data=task_data,
            policy=policy_from("--policy", policy),
            tau=tau,
            profile=profile,
            max_iterations=max_iterations,
            batch_size=batch_size,
            limit=limit,
            tokenizer=tokenizer,
            seed=seed,
            device=device,
            dtype=dtype,
            json=json,
        )
        return
    refuse("--data", fewshot=fewshot, limit=limit, task_data=task_data)
    from adaponder.commands import evaluate as command

    command.run(
        checkpoint,
        data=data,
        split=split,
        window=window,
        stride=stride,
        across_documents=across_documents,
        max_tokens=max_tokens,
        depths=numbers("--depths", depths),
        policy=policy_from("--policy", policy),
        tau=tau,
        profile=profile,
        max_iterations=max_iterations,
        dense=dense,
        check_tokens=check_tokens,
        batch_size=batch_size,
        tokenizer=tokenizer,
        seed=seed,
        device=device,
        dtype=dtype,
        json=json,
    )


@app.command()
def compare(
    first: Annotated[str, typer.Argument(metavar="A", help="A checkpoint: folder or hub name.")],
    second: Annotated[str, typer.Argument(metavar="B", help="Another, with the same tokenizer.")],
    data: Data,
    split: Split = "validation",
    window: Window = None,
    stride: Stride = None,
    across_documents: AcrossDocuments = True,
    max_tokens: MaxTokens = None,
    policy_a: Annotated[str | None, typer.Option(metavar="RULE", help="Who halts in A; as --policy of eval.")] = None,
    policy_b: Annotated[str | None, typer.Option(metavar="RULE", help="Who halts in B.")] = None,
    profile_a: Annotated[
        str | None, typer.Option(metavar="NAME", help="A's budget, as adaponder calibrate stored it.")
    ] = None,
    profile_b: Annotated[str | None, typer.Option(metavar="NAME", help="B's budget.")] = None,
    batch_size: BatchSize = 8,
    seed: Seed = 0,
    device: Device = "cpu",
    dtype: Dtype = "auto",
    json: Json = None,
) -> None:
    """Two checkpoints, or one at two budgets, on the same tokens: the paired difference of their losses.

    [dim]adaponder compare runs/demo runs/demo --profile-b budget-2.5 --data data/stdlib-train-bpe-2048[/]
    """
    from adaponder.commands import evaluate as command

    command.compare(
        first,
        second,
        policies=[policy_from("--policy-a", policy_a), policy_from("--policy-b", policy_b)],
        profiles=[profile_a, profile_b],
        data=data,
        split=split,
        window=window,
        stride=stride,
        across_documents=across_documents,
        max_tokens=max_tokens,
        batch_size=batch_size,
        seed=seed,
        device=device,
        dtype=dtype,
        json=json,
    )


@app.command()
def policies(
    checkpoint: Annotated[
        str, typer.Argument(metavar="CKPT", help="A checkpoint; or a policies.json, to draw its figures again.")
    ],
    data: Annotated[str | None, typer.Option(metavar="TEXT", help="As for eval.")] = None,
    budgets: Annotated[
        str | None, typer.Option(metavar="1.5,2.5", help="Mean depths to compare at; default: the gate's own.")
    ] = None,
    rates: Annotated[
        str | None, typer.Option(metavar="0.9,0.5", help="Rates of the geometric schedules; default 0.9,0.5.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Tables and figures go here.", callback=folder)
    ] = None,
    split: Split = "validation",
    window: Window = None,
    stride: Stride = None,
    across_documents: AcrossDocuments = True,
    max_tokens: MaxTokens = None,
    batch_size: BatchSize = 8,
    tokenizer: Tokenizer = None,
    seed: Seed = 0,
    device: Device = "cpu",
    dtype: Dtype = "auto",
    json: Json = None,
) -> None:
    """The policy lab: who should decide depth? Each tuned to the same depth on one half, measured on the other.

    [dim]adaponder policies runs/demo --data data/stdlib-train-bpe-2048 --budgets 2,3 --out lab/[/]
    """
    from adaponder.commands import policies as command

    if checkpoint.endswith(".json"):
        refuse(checkpoint, data=data, budgets=budgets, rates=rates, max_tokens=max_tokens)
        command.redraw(Path(checkpoint), out=out or Path(checkpoint).parent)
        return
    if data is None:
        raise InputError("--data: say on which text to compare them")
    command.run(
        checkpoint,
        data=data,
        rates=decimals("--rates", rates, most=1) or command.RATES,
        split=split,
        window=window,
        stride=stride,
        across_documents=across_documents,
        max_tokens=max_tokens,
        budgets=decimals("--budgets", budgets, least=1) or None,
        tokenizer=tokenizer,
        out=out,
        batch_size=batch_size,
        seed=seed,
        device=device,
        dtype=dtype,
        json=json,
    )


@app.command()
def calibrate(
    checkpoint: Annotated[
        str, typer.Argument(metavar="CKPT", help="A checkpoint; or a frontier.json, to draw its figure again.")
    ],
    data: Annotated[
        str | None, typer.Option(metavar="TEXT", help="As for eval: one half finds the thresholds, the other tests.")
    ] = None,
    budget: Annotated[float | None, typer.Option(metavar="X", min=1, help="The mean depth that is wanted.")] = None,
    name: Annotated[str | None, typer.Option(metavar="NAME", help="Of the profile; default budget-N.")] = None,
    rule: Annotated[
        str, typer.Option(metavar="NAME", help=f"What is thresholded: {', '.join(RULES)}.", callback=one_of(*RULES))
    ] = "gate",
    frontier: Annotated[bool, typer.Option("--frontier", help="Loss at every budget from 1 to K.")] = False,
    step: Annotated[float, typer.Option(metavar="X", help="Of the frontier.", callback=above(0))] = 0.25,
    replace: Annotated[bool, typer.Option("--replace", help="Replace a profile of the same name.")] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Table and figure of the frontier go here.", callback=folder)
    ] = None,
    show: Annotated[bool, typer.Option("--list", help="List the profiles that there are.")] = False,
    split: Split = "validation",
    window: Window = None,
    stride: Stride = None,
    across_documents: AcrossDocuments = True,
    max_tokens: MaxTokens = None,
    batch_size: BatchSize = 8,
    tokenizer: Tokenizer = None,
    seed: Seed = 0,
    device: Device = "cpu",
    dtype: Dtype = "auto",
    json: Json = None,
) -> None:
    """The budget dial: find thresholds for a mean depth, verify them, and store them as a profile.

    [dim]adaponder calibrate runs/demo --budget 3.2 --data data/stdlib-train-bpe-2048[/]

    [dim]adaponder generate runs/demo --prompt "def " --profile budget-3.2[/]
    """
    from adaponder.commands import calibrate as command

    if show:
        command.list_profiles(checkpoint, json=json)
        return
    if checkpoint.endswith(".json"):
        refuse(checkpoint, data=data, budget=budget, frontier=frontier, max_tokens=max_tokens)
        command.redraw(Path(checkpoint), out=out or Path(checkpoint).parent)
        return
    if data is None:
        raise InputError("--data: say on which text to calibrate")
    if not frontier:
        refuse("--budget without --frontier", out=out)
    elif rule != "gate":
        raise InputError(f"--rule {rule}: the frontier is the learned gate's; leave --rule or --frontier out")
    command.run(
        checkpoint,
        data=data,
        budget=budget,
        name=name,
        rule=rule,
        frontier=frontier,
        step=step,
        replace=replace,
        split=split,
        window=window,
        stride=stride,
        across_documents=across_documents,
        max_tokens=max_tokens,
        tokenizer=tokenizer,
        out=out,
        batch_size=batch_size,
        seed=seed,
        device=device,
        dtype=dtype,
        json=json,
    )


@app.command()
def analyze(
    checkpoint: Annotated[
        str, typer.Argument(metavar="CKPT", help="A checkpoint; or a trace.parquet, to draw its figures again.")
    ],
    data: Annotated[str | None, typer.Option(metavar="TEXT", help="As for eval.")] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Trace, figures, tables and report go here.", callback=folder)
    ] = None,
    only: Annotated[str | None, typer.Option(metavar="a,b", help="Only these figures: halting, gates, grid, …")] = None,
    split: Split = "validation",
    window: Window = None,
    stride: Stride = None,
    across_documents: AcrossDocuments = True,
    max_tokens: MaxTokens = None,
    policy: PolicyText = None,
    tau: Tau = None,
    profile: Profile = None,
    max_iterations: MaxIterations = None,
    batch_size: BatchSize = 8,
    tokenizer: Tokenizer = None,
    seed: Seed = 0,
    device: Device = "cpu",
    dtype: Dtype = "auto",
    json: Json = None,
) -> None:
    """Write down every token, and draw the paper's analysis from that: figures, tables, one report.html.

    [dim]adaponder analyze runs/demo --data data/stdlib-train-bpe-2048 --out analysis/[/]
    """
    from adaponder.commands import analyze as command

    command.run(
        checkpoint,
        data=data,
        out=out,
        split=split,
        window=window,
        stride=stride,
        across_documents=across_documents,
        max_tokens=max_tokens,
        policy=policy_from("--policy", policy),
        tau=tau,
        profile=profile,
        max_iterations=max_iterations,
        only=names("--only", only),
        tokenizer=tokenizer,
        batch_size=batch_size,
        seed=seed,
        device=device,
        dtype=dtype,
        json=json,
    )
