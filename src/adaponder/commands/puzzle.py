"""adaponder puzzle: tests a checkpoint trained on hops puzzles with new puzzles; colours words by depth."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from rich.text import Text

from adaponder.checkpoints.shipped import HOPS, full_name
from adaponder.commands.shared import Json, arg, opt
from adaponder.errors import InputError
from adaponder.terminal import by_depth, console, depth_style, legend, line, table, write_json

if TYPE_CHECKING:
    import numpy as np

    from adaponder.data.puzzles import Hops
    from adaponder.modeling import AdaPonderForCausalLM

# Puzzles per batch, and steps of a puzzle per printed line.
_BATCH, _STEPS_PER_LINE = 64, 7


def puzzle(
    checkpoint: Annotated[str, arg("Trained on hops; default: the shipped one.", "CKPT")] = full_name(HOPS),
    *,
    seed: Annotated[int | None, opt("Seed of the puzzles; default: random.", "N", min=0, max=2**31 - 1)] = None,
    puzzles: Annotated[int, opt("How many puzzles; the first is shown.", "N", min=1, max=10_000)] = 64,
    json: Json = None,
) -> dict[str, Any]:
    """Run a checkpoint on puzzles whose needed depth is known: easy words take one iteration, hard ones more.

    [dim]adaponder puzzle --seed 5[/]
    """
    from adaponder.conversion.open import load
    from adaponder.data.puzzles import SYMBOLS
    from adaponder.data.tokenizers import load_tokenizer, tokenizer_hash
    from adaponder.evaluation.text import open_vocabulary

    model, folder = load(checkpoint)
    if open_vocabulary(str(folder)).hash != tokenizer_hash(load_tokenizer(SYMBOLS)[0]):
        raise InputError(f"{checkpoint} was not trained on puzzles: its tokens are not {SYMBOLS}")
    if seed is None:
        seed = random.SystemRandom().randrange(1, 2**31)
    read = read_puzzles(model.eval(), replace(hops_of(folder), seed=seed, documents=puzzles))
    result: dict[str, Any] = {"checkpoint": checkpoint, "seed": seed, "by_need": by_need(read)}
    show(read, result["by_need"], deepest=model.config.iterations)
    console.print(f"seed {seed}")
    write_json(json, result)
    return result


def hops_of(folder: Path) -> Hops:
    """Returns the settings of the hops puzzles that a checkpoint was trained on, or the defaults if they are unknown.

    The settings are in the checkpoint's training state or in the manifest of its data. Raises if the data is another
    kind of puzzle, which the tokenizer does not reveal because all kinds have the same tokens.
    """
    from adaponder.data.manifest import MANIFEST, Manifest
    from adaponder.data.puzzles import Hops, is_generated, settings_of
    from adaponder.files import read_json
    from adaponder.training.checkpoint import STATE

    if not (folder / STATE).is_file():
        return Hops()
    source = read_json(folder / STATE)["recipe"]["data"]["source"]
    inputs = [source]
    if (Path(source) / MANIFEST).is_file():
        inputs = [entry["input"] for entry in Manifest.load(Path(source)).fingerprint["inputs"]]
    puzzles = [settings_of(name) for name in inputs if is_generated(name)] or [Hops()]
    for settings in puzzles:
        if isinstance(settings, Hops):
            return settings
    raise InputError(f"{folder} was trained on {', '.join(inputs)}: adaponder puzzle shows only hops")


class PuzzleResults(NamedTuple):
    """The words of puzzles, and what a model predicts at each word: arrays ``[puzzles, words]``.

    Attributes:
        predicted: the id that the model predicts for the next word.
        depth: the depth at which the model predicts it.
        predicted_at_1: the id that the model predicts at depth 1.
        need: the number of hops if the next word is the answer to a question, else 0.
        correct: the id of that answer, else 0.
        by_elimination: whether that answer also follows by elimination, else false.
    """

    words: list[list[str]]
    predicted: np.ndarray
    depth: np.ndarray
    predicted_at_1: np.ndarray
    need: np.ndarray
    correct: np.ndarray
    by_elimination: np.ndarray


def read_puzzles(model: AdaPonderForCausalLM, settings: Hops) -> PuzzleResults:
    """Runs the model on the puzzles in batches; the correct answers are computed from the puzzles' words."""
    import numpy as np
    import torch

    from adaponder.data.puzzles import END_ID, documents, ids_of, questions
    from adaponder.evaluation.scoring import at_depth

    words = list(documents(settings))
    ids = torch.from_numpy(np.stack([ids_of(document) for document in words])).to(model.device)
    need, correct, by_elimination = np.zeros((3, *ids.shape), np.int64)
    for row, document in enumerate(words):
        for question in questions(document):
            need[row, question.place - 1] = question.needed
            correct[row, question.place - 1] = ids_of([question.answer])[0]
            by_elimination[row, question.place - 1] = question.by_elimination

    def predict(**how: Any) -> tuple[np.ndarray, np.ndarray]:
        outputs = [model(batch, **how) for batch in ids.split(_BATCH)]
        predicted = torch.cat([output.logits[..., :END_ID].argmax(-1) for output in outputs])
        return predicted.cpu().numpy(), torch.cat([output.depth for output in outputs]).cpu().numpy()

    with torch.inference_mode():
        predicted, depth = predict()
        predicted_at_1, _ = predict(**at_depth(model, 1))
    return PuzzleResults(words, predicted, depth, predicted_at_1, need, correct, by_elimination.astype(bool))


def by_need(read: PuzzleResults) -> list[dict[str, Any]]:
    """Returns a row per number of hops: questions, share of right answers, mean depth, and the share right at depth 1.

    The last row has no number of hops: it counts the last question of each puzzle, whose answer follows by elimination.
    """
    import numpy as np

    needs = np.unique(read.need[read.need > 0]).tolist()
    groups = [(need, (read.need == need) & ~read.by_elimination) for need in needs]
    return [
        {
            "hops": need,
            "questions": int(asked.sum()),
            "right": float((read.predicted == read.correct)[asked].mean()),
            "depth": float(read.depth[asked].mean()),
            "right_once": float((read.predicted_at_1 == read.correct)[asked].mean()),
        }
        for need, asked in [*groups, (None, read.by_elimination)]
        if asked.any()
    ]


def show(read: PuzzleResults, rows: list[dict[str, Any]], *, deepest: int) -> None:
    """Prints the first puzzle, each word coloured by its depth, and the table ``rows`` of all puzzles."""
    console.print("Steps lead from letter to letter; a question asks for the letter at the end of a chain of steps.")
    for text in ("", _steps(read, deepest), "", *_questions(read, deepest), legend(deepest)):
        console.print(text)
    cells = [
        (f"{row['hops'] or 'the last'}", f"{row['right']:.0%}", f"{row['depth']:.2f}", f"{row['right_once']:.0%}")
        for row in rows
    ]
    title = f"\n{sum(row['questions'] for row in rows)} questions of {len(read.words)} puzzles"
    console.print(table(title, ("hops", "right", "mean depth", "right if read once"), cells))
    console.print("The last question of each puzzle can be answered by elimination.", style="dim")


def _steps(read: PuzzleResults, deepest: int) -> Text:
    """Returns the steps of the first puzzle, every word coloured by its depth."""
    from adaponder.data.puzzles import BAR, STOP

    words = read.words[0][: read.words[0].index(BAR)]
    breaks = range(3 * _STEPS_PER_LINE - 1, len(words), 3 * _STEPS_PER_LINE)
    pieces = [f"{word} " if word != STOP else ".\n" if place in breaks else ".  " for place, word in enumerate(words)]
    return by_depth(pieces, read.depth[0, : len(words)].tolist(), deepest)


def _questions(read: PuzzleResults, deepest: int) -> list[Text]:
    """Returns the questions of the first puzzle, fewest hops first, with answer, chain and depth."""
    import numpy as np

    from adaponder.data.puzzles import BAR, words_of

    words, lines = read.words[0], []
    next_letter = {words[place]: words[place + 1] for place in range(0, words.index(BAR), 3)}
    for place in sorted(np.flatnonzero(read.need[0]).tolist(), key=lambda place: read.need[0, place]):
        chain = [words[place]]
        while chain[-1] in next_letter:
            chain.append(next_letter[chain[-1]])
        depth, answer = int(read.depth[0, place]), words_of(read.predicted[0, place : place + 1])[0]
        verdict = ("right", "green") if answer == chain[-1] else (f"wrong, it is {chain[-1]}", "red")
        times = ("once", "twice")[depth - 1] if depth < 3 else f"{depth} times"
        lines.append(
            line(
                (f" {words[place]} ", depth_style(depth, deepest)),
                f" read {times:<8} says {answer}, ",
                verdict,
                (f"   {' '.join(chain)}", "dim"),
                ("   asked last" if read.by_elimination[0, place] else "", "dim"),
            )
        )
    return lines
