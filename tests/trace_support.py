"""Made-up traces: every prediction invented, with a known story, so that figures can be judged without a model."""

import numpy as np
import pandas as pd

from adaponder.analysis.trace import FIXED, About, Trace, columns_of

WORDS = (
    *("the", " cat", "\n", "    ", " naïve", "$x_1$", "<script>alert(1)</script>", "\x1b[31m", "中文", "\\xe2"),
    "&amp;",
)


def made_up(
    tokens: int = 1200,
    *,
    deepest: int = 4,
    documents: int = 12,
    sources: int = 3,
    halts: bool = True,
    depth: np.ndarray | None = None,
    difficulty_decides: float = 1.0,
    seed: int = 0,
    **about,
) -> Trace:
    """Returns a trace whose depth follows difficulty, its opposite, or neither, by ``difficulty_decides``."""
    draw = np.random.default_rng(seed)
    hard = draw.gamma(1.5, 2.0, tokens)
    if depth is None:
        wish = difficulty_decides * hard + draw.normal(0, 2.0, tokens)
        depth = 1 + np.searchsorted(np.quantile(wish, np.linspace(0, 1, deepest + 1)[1:-1]), wish)
    depth = np.asarray(depth) if halts else np.full(tokens, deepest)
    steps = draw.normal(0.05, 0.02, (tokens, deepest)) * hard[:, None]
    full = hard[:, None] - np.concatenate([np.zeros((tokens, 1)), np.cumsum(steps[:, 1:], axis=1)], axis=1)
    own = np.take_along_axis(full, np.minimum(np.arange(deepest), depth[:, None] - 1), axis=1)
    gates = deepest - 1 if halts else 0
    s = 1 / (1 + np.exp(-draw.normal(0, 3, (tokens, gates)) + 10 * (depth[:, None] == np.arange(1, gates + 1))))
    document = np.sort(draw.integers(documents, size=tokens))
    document = np.unique(document, return_inverse=True)[1]
    starts = np.searchsorted(document, document)
    word = draw.integers(len(WORDS), size=tokens + 1)
    counts = np.bincount(word[:-1], minlength=len(WORDS))
    frame = pd.DataFrame(
        {
            "document": document,
            "position": np.arange(tokens) - starts,
            "window_position": np.arange(tokens) % 64,
            "token_id": word[:-1],
            "target_id": word[1:],
            "count": counts[word[:-1]],
            "rank": 1 + np.argsort(np.argsort(-counts, kind="stable"), kind="stable")[word[:-1]],
            "learned": True,
            "depth": depth,
            "nll": own[:, -1],
        }
    ).astype(FIXED)
    frame["token"] = pd.Categorical.from_codes(word[:-1], WORDS)
    frame["target"] = pd.Categorical.from_codes(word[1:], WORDS)
    frame["source"] = pd.Categorical([f"source <{index % sources}>" for index in document])
    blocks = {"nll": own, "full_nll": full, "entropy": np.abs(own) + 0.1, "gate": s}
    numbered = {
        f"{name}_{i}": row for name, block in blocks.items() for i, row in enumerate(block.astype(np.float32).T, 1)
    }
    # nll_K of the run itself is the prediction's loss, to the last digit that is kept.
    frame["nll"] = own[:, -1].astype(np.float32).astype(np.float64)
    settings = {
        "checkpoint": "runs/<b>made up</b>",
        "method": "adaponder" if halts else "ponder",
        "iterations": deepest,
        "deepest": deepest,
        "halts": halts,
        "gates": gates,
        "tau": (1e-4,) * (deepest - 1) if halts else None,
        "policy": "gate:0.0001" if halts else f"fixed:{deepest}",
        "data": "invented & escaped",
        "windows": "disjoint windows of 64",
        "window": 64,
        "utf8_bytes": 4 * tokens,
        "seed": 0,
        "dtype": "float32",
        "device": "cpu",
        "spent": {"flops_per_token": 2.5e6, "flops_ratio": 2.9, "kv_bytes_per_token": 4096.0},
        "versions": {"adaponder": "0"},
    } | about
    description = About(**settings)
    frame = pd.concat([frame, pd.DataFrame(numbered)], axis=1)
    return Trace(frame.reindex(columns=columns_of(description)), description)
