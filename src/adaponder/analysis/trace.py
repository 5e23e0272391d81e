"""Makes, writes and reads traces: tables with one row per prediction of a text, from which all figures are drawn."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from adaponder.backbones.shape import shape_of
from adaponder.errors import InputError
from adaponder.evaluation.meter import Spent, deciding_flops
from adaponder.evaluation.scoring import ScoringOptions, gate_thresholds, score_portions
from adaponder.evaluation.text import Text, Windows
from adaponder.files import open_plain, parse_json, replacing
from adaponder.journal import Journal
from adaponder.methods.cost import cost_of
from adaponder.modeling import AdaPonderForCausalLM
from adaponder.policies import FixedDepth
from adaponder.text.spelling import token_texts
from adaponder.version import __version__

NAME = "trace.parquet"
_KEY = b"adaponder.trace"
_ROWS = 65_536
_LIBRARIES = ("torch", "transformers", "numpy", "pyarrow")
_WORDS = ("token", "target", "source")
# Columns of every trace: positions and ids of token and target, the token's frequency, whether the target is learned,
# depth and loss.
_WHOLE = ("document", "position", "window_position", "token_id", "target_id", "count", "rank")
FIXED: dict[str, Any] = dict.fromkeys(_WHOLE, np.int32) | {"learned": np.bool_, "depth": np.int8, "nll": np.float64}


@dataclass(frozen=True)
class Kind:
    """The facts that decide which figures can be drawn; known before the text is scored.

    ``deepest`` is K or ``--max-iterations``; ``gates`` is the number of columns ``gate_1`` …, 0 without gates.
    """

    method: str
    deepest: int
    halts: bool
    gates: int


@dataclass(frozen=True)
class About(Kind):
    """Description of a trace: checkpoint, K (``iterations``), policy, text, cost, versions.

    Attributes:
        tau: thresholds of the learned gate; ``None`` for other policies.
        utf8_bytes: size of the text; 0 if the tokenizer does not know some of it.
        spent: cost of scoring by the meter (without gates that only the trace evaluates).
    """

    checkpoint: str
    iterations: int
    tau: tuple[float, ...] | None
    policy: str
    data: str
    windows: str
    window: int
    utf8_bytes: int
    seed: int
    dtype: str
    device: str
    spent: dict[str, Any]
    versions: dict[str, str]


@dataclass(frozen=True, eq=False)
class Trace:
    """A trace: the table and its description.

    Columns: ``token`` and ``target`` are the texts of a token and of the next token; ``depth`` is the token's number of
    iterations and ``nll`` the loss of its prediction (nats). ``nll_i``, ``entropy_i`` and ``gate_i`` are the loss, the
    entropy and the gate after i iterations; once the token has halted, loss and entropy are constant. ``full_nll_i`` is
    the loss after i iterations if every token has full depth, so ``full_nll_1`` is the loss at depth 1. ``count`` is
    the token's number of occurrences in this text, ``rank`` its rank by count (1: most frequent). ``learned`` is false
    for targets that training does not learn (turns other than the assistant's, the given part of puzzles).
    """

    frame: pd.DataFrame
    about: About

    def __len__(self) -> int:
        return len(self.frame)

    def __getitem__(self, column: str) -> np.ndarray:
        return self.frame[column].to_numpy()

    def by_iteration(self, name: str) -> np.ndarray:
        """Returns the columns ``name_1``, ``name_2``, … as one array, ``[n, deepest]``; gates are ``[n, gates]``."""
        count = self.about.gates if name == "gate" else self.about.deepest
        return self.frame[[f"{name}_{i}" for i in range(1, count + 1)]].to_numpy(np.float64)

    @property
    def scored(self) -> Trace:
        """Returns the trace of the predictions included in mean losses: all, unless only some tokens are learned."""
        learned = self["learned"]
        return self if learned.all() else Trace(self.frame.loc[learned], self.about)

    @property
    def loss(self) -> float:
        return float(self.scored["nll"].mean())


def columns_of(about: About) -> list[str]:
    """Returns the names of the columns of a trace."""
    numbered = [f"{name}_{i}" for name in ("nll", "full_nll", "entropy") for i in range(1, about.deepest + 1)]
    return [*FIXED, *_WORDS, *numbered, *(f"gate_{i}" for i in range(1, about.gates + 1))]


def kind_of(model: AdaPonderForCausalLM, how: ScoringOptions) -> Kind:
    """Returns the kind of trace that scoring this model with ``how`` gives."""
    deepest, method = how.max_iterations or model.config.iterations, model.method
    return Kind(model.config.method, deepest, method.halts, method.gates_asked(deepest))


def planned_scorings(model: AdaPonderForCausalLM, how: ScoringOptions) -> list[ScoringOptions]:
    """Returns the options of each scoring of the text that a trace needs.

    A method that halts is scored with ``how`` and once more at full depth. A method that never halts gives the loss of
    every depth in one scoring, unless one pass does all iterations (pause): it is then scored once for each depth.
    """
    deepest = kind_of(model, how).deepest
    if model.method.halts:
        return [how, replace(how, policy=FixedDepth(deepest))]
    if model.method.passes(deepest) == deepest:
        return [how]
    return [replace(how, max_iterations=depth) for depth in range(1, deepest + 1)]


def make_trace(
    model: AdaPonderForCausalLM,
    text: Text,
    windows: Windows,
    *,
    checkpoint: str,
    data: str,
    how: ScoringOptions | None = None,
    batch_size: int = 8,
    journal: Journal | None = None,
    advance: Callable[[int], None] = lambda predictions: None,
) -> Trace:
    """Scores ``text``, except portions that ``journal`` holds, and returns its trace; ``advance`` reports progress."""
    how = how or ScoringOptions()
    planned = planned_scorings(model, how)
    shared: dict[str, Any] = {"batch_size": batch_size, "journal": journal, "advance": advance}
    runs = [
        score_portions(model, text, windows, how=options, name=f"reading {number} of {len(planned)}", **shared)
        for number, options in enumerate(planned, 1)
    ]
    scores = runs[0] if model.method.halts else runs[-1]
    blocks = {"nll": scores.nll_by_iteration, "full_nll": runs[-1].nll_by_iteration, "entropy": scores.entropy}
    if len(runs) > 1 and not model.method.halts:
        blocks["nll"] = blocks["full_nll"] = np.stack([run.nll for run in runs], axis=1)
        blocks["entropy"] = np.concatenate([run.entropy for run in runs if run.entropy is not None], axis=1)
    columns = {
        f"{name}_{i}": values.astype(np.float32)
        for name, block in (blocks | {"gate": scores.gates}).items()
        if block is not None
        for i, values in enumerate(block.T, 1)
    }
    frame = _columns_of_text(text, windows).assign(depth=scores.depth, nll=scores.nll).astype(FIXED)
    kind, policy = kind_of(model, how), how.policy or model.method.default_policy(training=False)
    about = About(
        checkpoint=checkpoint,
        **vars(kind),
        iterations=model.config.iterations,
        tau=gate_thresholds(model, how.policy, kind.deepest - 1),
        policy=str(getattr(policy, "spelling", policy)),
        data=data,
        windows=str(windows),
        window=windows.length,
        utf8_bytes=0 if text.unknown.any() else int(text.utf8_bytes.sum()),
        seed=how.seed,
        dtype=str(model.dtype).removeprefix("torch."),
        device=str(model.device),
        spent=_spent(model, scores.spent, how),
        versions={"adaponder": __version__} | {name: version(name) for name in _LIBRARIES},
    )
    frame = pd.concat([frame, pd.DataFrame(columns)], axis=1).reindex(columns=columns_of(about))
    return check(Trace(frame, about), "the trace")


def _spent(model: AdaPonderForCausalLM, spent: Spent, how: ScoringOptions) -> dict[str, Any]:
    """Returns the meter's numbers without the FLOPs of halted tokens' gates, which only a trace evaluates.

    Tokens per second are left out: most of the time went into the logits of each iteration, which only a trace needs.
    """
    depths = torch.repeat_interleave(torch.arange(1, model.config.iterations + 1), torch.tensor(spent.histogram))
    needed = cost_of(depths[None], model.config, max_iterations=how.max_iterations, every_gate=how.execution == "dense")
    active = [sum(spent.histogram[i:]) for i in range(spent.deepest - 1)]
    deciding = deciding_flops(how.policy, active, shape_of(model.config))
    spent = replace(spent, cost=replace(spent.cost, gates=needed.gates + deciding))
    return {key: value for key, value in spent.as_dict().items() if key not in ("tokens_per_second", "seconds")}


def _columns_of_text(text: Text, windows: Windows) -> pd.DataFrame:
    """Returns the columns of a trace that need no model: tokens, positions, sources, frequencies."""
    ids, codes, counts = np.unique(text.stream, return_inverse=True, return_counts=True)
    # The last token is predicted, but predicts nothing.
    counts[codes[-1]] -= 1
    ranks = np.empty(len(ids), np.int64)
    ranks[np.argsort(-counts, kind="stable")] = np.arange(1, len(ids) + 1)
    # Two ids may have the same text, but categories must differ.
    words, spelled = np.unique(np.array(token_texts(text.vocabulary.tokenizer, ids), object), return_inverse=True)
    pieces = pd.Categorical.from_codes(spelled[codes], categories=pd.Index(words, dtype=object))
    starts = windows.starts(text.predictions)
    index = np.arange(text.predictions)
    # A prediction is scored in the first window that contains it.
    window = np.searchsorted(np.minimum(starts + windows.length, text.predictions), index, side="right")
    return pd.DataFrame(
        {
            "document": text.document,
            "position": text.position,
            "window_position": index - starts[window],
            "token_id": text.stream[:-1],
            "target_id": text.stream[1:],
            "token": pieces[:-1],
            "target": pieces[1:],
            "source": pd.Categorical(text.sources).take(text.document),
            "count": counts[codes[:-1]],
            "rank": ranks[codes[:-1]],
            "learned": text.counted,
        }
    )


def write_trace(trace: Trace, path: Path) -> None:
    """Writes the trace as Parquet, atomically."""
    table = pa.Table.from_pandas(trace.frame, preserve_index=False)
    about = json.dumps(asdict(trace.about)).encode()
    table = table.replace_schema_metadata({**(table.schema.metadata or {}), _KEY: about})
    with replacing(path) as temporary:
        pq.write_table(table, temporary, compression="zstd", row_group_size=_ROWS)


def read_trace(path: Path) -> Trace:
    """Reads a trace from a Parquet file and checks it."""
    try:
        with open_plain(path, InputError) as file:
            table = pq.read_table(file, read_dictionary=list(_WORDS))
    except (OSError, pa.ArrowException) as error:
        raise InputError(f"{path} is not a readable Parquet file ({error})") from None
    description = (table.schema.metadata or {}).get(_KEY)
    if description is None:
        raise InputError(f"{path} is not a trace; adaponder analyze CKPT --data … --out DIR writes one")
    about = parse_json(description, path, InputError)
    if differing := set(about) ^ {field.name for field in fields(About)}:
        raise InputError(
            f"{path} was written by another version ({', '.join(sorted(differing))}); trace the checkpoint again"
        )
    about["tau"] = None if about["tau"] is None else tuple(about["tau"])
    return check(Trace(table.to_pandas(), About(**about)), str(path))


def check(trace: Trace, where: str) -> Trace:
    """Returns ``trace``; raises if columns are missing or values are impossible."""
    if missing := [name for name in columns_of(trace.about) if name not in trace.frame]:
        raise InputError(f"{where}: columns {', '.join(missing)} are missing; trace the checkpoint again")
    if len(trace) == 0:
        raise InputError(f"{where} has no predictions")
    if not trace["learned"].any():
        raise InputError(f"{where} has no learned tokens, so there is nothing to score")
    depth = trace["depth"]
    if depth.min() < 1 or depth.max() > trace.about.deepest:
        raise InputError(f"{where}: depths from {depth.min()} to {depth.max()} must be from 1 to {trace.about.deepest}")
    for name in ("nll", *(f"full_nll_{i}" for i in range(1, trace.about.deepest + 1))):
        if bad := int((~np.isfinite(trace[name])).sum()):
            raise InputError(f"{where}: {name} is not finite for {bad:,} predictions: the model diverged or overflowed")
    return trace
