"""adaponder demo: prepares data, pretrains a small model, scores it and samples from it; nothing is downloaded."""

from __future__ import annotations

import math
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from adaponder.checkpoints.shipped import SAMPLE, full_name
from adaponder.commands.evaluate import scored
from adaponder.commands.generate import Generated, continue_prompts, show
from adaponder.commands.puzzle import puzzle
from adaponder.commands.recipes import show_recipe
from adaponder.commands.shared import Json, NarrowOpening, Overrides, Reading, folder, open_subject
from adaponder.terminal import by_depth, console, legend, line, table, write_json

if TYPE_CHECKING:
    from adaponder.recipes import Recipe
    from adaponder.training.loop import Trainer

PROMPT = "def __init__(self"


def demo(
    *,
    out: Annotated[Path, folder("The run folder; running the command again resumes.")] = Path("runs/demo"),
    overrides: Overrides = None,
    json: Json = None,
) -> dict[str, Any]:
    """Pretrain a small AdaPonderLM on the Python standard library and show what it learned, in minutes and offline."""
    from adaponder.files import replace_file
    from adaponder.recipes import load_recipe
    from adaponder.training.run import open_finished, train

    recipe = load_recipe("cpu/demo", overrides or ())
    console.rule("1  pretrain AdaPonderLM on the Python standard library")
    show_recipe("cpu/demo", recipe, overrides or ())
    out.parent.mkdir(parents=True, exist_ok=True)
    data = out.parent.parent / "data"
    outcome = train(recipe, out=out, resume="auto", data=data)
    if outcome.final is None:
        console.print(f"stopped at step {outcome.step}; run the same command to resume")
        return {"step": outcome.step}

    console.rule("2  what it learned")
    trainer = outcome.trainer or open_finished(recipe, out, data=data)
    result = assess(recipe, trainer)
    show_assessment(result, recipe)

    console.rule("3  what it writes, each token coloured by how often it was read")
    show(_generate(str(outcome.final), max_new_tokens=80, temperature=0.8), colours=True, stats=True)

    console.rule("4  for comparison, the model that ships with AdaPonder: adaponder generate sample")
    result |= {"beside": compare_with_sample(outcome.final)}

    console.rule("5  where the needed depth is known: adaponder puzzle")
    result |= {"puzzles": puzzle(seed=5)["by_need"]}
    replace_file(out / "README.md", _readme(out, trainer.sampler.shards.folder, result).encode())
    console.print(line("\nThe run is in ", (out, "bold"), "; its README lists what to try next."))
    write_json(json, result)
    return result


def assess(recipe: Recipe, trainer: Trainer) -> dict[str, Any]:
    """Returns validation losses of the model at its own and at fixed depths, and of unigram and uniform predictions."""
    import numpy as np

    from adaponder.policies import FixedDepth
    from adaponder.training.validation import whole_windows

    tokens = recipe.train.eval_tokens
    learned = trainer.evaluate(tokens)
    forced = [
        trainer.evaluate(tokens, policy=FixedDepth(depth))["validation_loss"]
        for depth in range(1, trainer.model.config.iterations + 1)
    ]
    shards, validation, length = trainer.sampler.shards, trainer.validation, recipe.data.sequence
    assert validation is not None  # trainer.evaluate has read it
    scored_tokens = whole_windows(validation, tokens, length=length) * length
    # Frequencies of the training split, with add-one smoothing.
    counts = np.bincount(shards.read(0, shards.tokens), minlength=shards.vocab_size) + 1.0
    unigram = float(-np.log(counts / counts.sum())[validation.read(1, scored_tokens)].mean())
    baselines = {"unigram": unigram, "uniform": math.log(trainer.model.config.vocab_size)}
    return learned | {"forced": forced, "tokens": scored_tokens} | baselines


def compare_with_sample(trained: Path) -> list[dict[str, Any]]:
    """Prints text of the shipped checkpoint ``sample``; prints and returns its held-out loss and ``trained``'s."""
    from adaponder.evaluation.scoring import ScoringOptions

    sample = full_name(SAMPLE)
    (text,) = _generate(sample, max_new_tokens=60, temperature=0.8)
    console.print(by_depth(text.pieces, text.depths, text.deepest))
    console.print(legend(text.deepest))
    rows, cells, reading = [], [], Reading()
    for name, checkpoint in (("just trained", str(trained)), ("sample", sample)):
        subject = open_subject(checkpoint)
        held_out, windows = reading.text(subject, sample), reading.windows(subject)
        result = scored(subject, held_out, windows, "its own depths", ScoringOptions(), reading.batch_size).summary
        parameters, size = subject.model.num_parameters(), int(held_out.utf8_bytes.sum())
        measured = {"bits_per_byte": result.bits_per_byte, "depth": result.depth}
        rows.append({"model": name, "parameters": parameters, "bytes": size} | measured)
        cells.append((name, f"{parameters:,}", f"{result.bits_per_byte:.3f}", f"{result.depth:.2f}"))
    title = f"\nOn {rows[0]['bytes']:,} bytes of Python that neither was trained on"
    console.print(table(title, ("", "parameters", "bits/byte", "mean depth"), cells))
    return rows


def _generate(checkpoint: str, **settings: Any) -> list[Generated]:
    model, _, tokenizer = NarrowOpening().generator(checkpoint)
    return continue_prompts(model, tokenizer, [PROMPT], settings={"top_p": 0.95, **settings})


def show_assessment(result: dict[str, Any], recipe: Recipe) -> None:
    """Prints the result of :func:`assess`: a table of losses, and a table of the share of tokens at each depth."""
    rows = [
        ("before training (uniform)", f"{result['uniform']:.3f}", ""),
        ("token frequencies alone", f"{result['unigram']:.3f}", ""),
        ("AdaPonder, its own depths", f"{result['validation_loss']:.3f}", f"{result['validation_depth']:.2f}"),
    ]
    rows += [
        (f"the same checkpoint, every token read {depth}x", f"{loss:.3f}", f"{depth:.2f}")
        for depth, loss in enumerate(result["forced"], 1)
    ]
    title = f"Validation loss (nats per token, its first {result['tokens']:,} tokens)"
    console.print(table(title, ("", "loss", "mean depth"), rows))
    halted = [0.0, *result["validation_halted"], 1.0]  # cumulative shares after 0, 1, … K iterations
    rows = [(f"{depth}x", f"{halted[depth] - halted[depth - 1]:.1%}") for depth in range(1, len(halted))]
    console.print(table("\nHow often tokens were read", ("read", "share of all tokens"), rows))


def _readme(out: Path, data: Path, result: dict[str, Any]) -> str:
    """Returns the README of the run's folder: its result, its files and the commands to try next."""
    run, shards = shlex.quote(str(out)), shlex.quote(str(data))
    return f"""# A run of `adaponder demo`

Validation loss {result["validation_loss"]:.3f} at mean depth {result["validation_depth"]:.2f} over the first
{result["tokens"]:,} tokens of validation (token frequencies alone: {result["unigram"]:.3f});
`adaponder eval` scores all of them.

`final/` holds the model, `checkpoints/` states to resume from, `metrics.jsonl` and `tensorboard/` the curves.

To try next (`. .venv/bin/activate` puts `adaponder` on the path):

```
adaponder eval {run} --data {shards} --depths 1,2,3,4
adaponder analyze {run} --data {shards} --out {run}/analysis
adaponder policies {run} --data {shards} --budgets 2,3 --out {run}/policies
adaponder calibrate {run} --data {shards} --budget 2.5
adaponder generate {run} --prompt "import " --profile budget-2.5
adaponder inspect {run}
tensorboard --logdir {run}/tensorboard
adaponder train {run}/recipe.yaml --set train.steps=2000 --set train.ponder_start=800 --set train.ponder_full=960
```
"""
