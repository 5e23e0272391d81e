"""Commands that say what a checkpoint is worth and what it costs."""

from __future__ import annotations

from pathlib import Path

from adaponder.cli.app import app
from adaponder.cli.parsing import refuse
from adaponder.commands.options import AnalyzeOptions, CalibrateOptions, CompareOptions, EvalOptions, PoliciesOptions
from adaponder.errors import InputError


@app.taking(EvalOptions, "eval")
def evaluate(options: EvalOptions) -> None:
    """Loss, perplexity and bits per byte on a text, or scores on tasks; and what they cost.

    [dim]adaponder eval runs/demo --data stdlib --depths 1,2,3,4[/]

    [dim]adaponder eval runs/demo --tasks lambada_openai,arc_easy,sciq --task-data evaluation-sets/[/]
    """
    on_text = options.data is not None
    if on_text == bool(options.tasks or options.suite is not None):
        raise InputError("--data: say which text to score; or which --tasks, or --suite paper; one of them")
    if on_text:
        refuse("--data", fewshot=options.fewshot, limit=options.limit, task_data=options.task_data)
        from adaponder.commands import evaluate as command

        command.run(options)
        return
    refuse(
        "--tasks",
        depths=options.depths,
        dense=options.dense,
        window=options.window,
        stride=options.stride,
        max_tokens=options.max_tokens,
    )
    from adaponder.commands import tasks as task_command

    task_command.run(options)


@app.taking(CompareOptions)
def compare(options: CompareOptions) -> None:
    """Two checkpoints, or one at two budgets, on the same tokens: the paired difference of their losses.

    [dim]adaponder compare runs/demo runs/demo --profile-b budget-2.5 --data data/stdlib-train-bpe-2048[/]
    """
    from adaponder.commands import evaluate as command

    command.compare(options)


@app.taking(PoliciesOptions)
def policies(options: PoliciesOptions) -> None:
    """The policy lab: who should decide depth? Each tuned to the same depth on one half, measured on the other.

    [dim]adaponder policies runs/demo --data data/stdlib-train-bpe-2048 --budgets 2,3 --out lab/[/]
    """
    from adaponder.commands import policies as command

    if options.checkpoint.endswith(".json"):
        refuse(
            options.checkpoint,
            data=options.data,
            budgets=options.budgets,
            rates=options.rates,
            max_tokens=options.max_tokens,
        )
        command.redraw(Path(options.checkpoint), out=options.out or Path(options.checkpoint).parent)
        return
    command.run(options)


@app.taking(CalibrateOptions)
def calibrate(options: CalibrateOptions) -> None:
    """The budget dial: find thresholds for a mean depth, verify them, and store them as a profile.

    [dim]adaponder calibrate runs/demo --budget 3.2 --data data/stdlib-train-bpe-2048[/]

    [dim]adaponder generate runs/demo --prompt "def " --profile budget-3.2[/]
    """
    from adaponder.commands import calibrate as command

    if options.listed:
        command.list_profiles(options.checkpoint, json=options.json)
        return
    if options.checkpoint.endswith(".json"):
        refuse(
            options.checkpoint,
            data=options.data,
            budget=options.budget,
            frontier=options.frontier,
            max_tokens=options.max_tokens,
        )
        command.redraw(Path(options.checkpoint), out=options.out or Path(options.checkpoint).parent)
        return
    if options.data is not None:
        if not options.frontier:
            refuse("--budget without --frontier", out=options.out)
        elif options.rule != "gate":
            raise InputError(
                f"--rule {options.rule}: the frontier is the learned gate's; leave --rule or --frontier out"
            )
    command.run(options)


@app.taking(AnalyzeOptions)
def analyze(options: AnalyzeOptions) -> None:
    """Write down every token, and draw the paper's analysis from that: figures, tables, one report.html.

    [dim]adaponder analyze runs/demo --data data/stdlib-train-bpe-2048 --out analysis/[/]
    """
    from adaponder.commands import analyze as command

    command.run(options)
