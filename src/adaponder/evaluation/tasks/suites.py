"""Defines suites: published benchmark tables (tasks, shots, metric) with their scores, for comparison.

The paper's table is "Zero-shot and five-shot performance (accuracy, %) on downstream tasks". Its metric is inferred to
be lm-eval's ``acc`` for every task: the caption says accuracy, and 40.4 for Pythia-1.4B on HellaSwag is the model's
``acc``; ``acc_norm``, normalised by the length of the ending, is more than ten points higher.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import mean
from typing import Any

from adaponder.config import AdaPonderConfig


@dataclass(frozen=True)
class Reference:
    """Published ``scores`` of one backbone: for each number of shots, a percentage per task, in the suite's order.

    ``shape`` is (hidden size, layers, heads, MLP width).
    """

    name: str
    source: str
    shape: tuple[int, int, int, int]
    scores: Mapping[int, tuple[float, ...]]


@dataclass(frozen=True)
class Suite:
    """A published table: tasks in the table's order, numbers of shots, metric, and published scores."""

    name: str
    tasks: tuple[str, ...]
    shots: tuple[int, ...]
    metric: str
    references: tuple[Reference, ...]

    def matched(self, config: AdaPonderConfig) -> Reference | None:
        """Returns the reference with this backbone's family, hidden size, layers, heads and MLP width, or ``None``."""
        backbone: Any = config.backbone_config
        if backbone.model_type != "gpt_neox":
            return None
        names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
        shape = tuple(getattr(backbone, name) for name in names)
        return next((row for row in self.references if row.shape == shape), None)

    def compare(self, scores: Mapping[str, float], shots: int, reference: Reference | None) -> Comparison:
        """Compares ``scores`` (percent by task) with the published scores of these tasks at this number of shots."""
        theirs = {}
        if reference is not None and shots in reference.scores:
            theirs = dict(zip(self.tasks, reference.scores[shots], strict=True))
        return Comparison(shots, dict(scores), {task: theirs[task] for task in scores if task in theirs})


@dataclass(frozen=True)
class Comparison:
    """Our scores and the reference's, in percent by task; ``theirs`` is empty if nothing was published to compare."""

    shots: int
    ours: dict[str, float]
    theirs: dict[str, float]

    @property
    def average(self) -> float:
        return mean(self.ours.values())

    @property
    def reference_average(self) -> float | None:
        return mean(self.theirs.values()) if self.theirs else None

    @property
    def difference(self) -> float | None:
        """Returns our average minus the reference's, the paper's delta acc; ``None`` without a reference."""
        return None if self.reference_average is None else self.average - self.reference_average

    def as_dict(self) -> dict[str, Any]:
        averages = ("average", "reference_average", "difference")
        return vars(self) | {name: getattr(self, name) for name in averages}


_SOURCE = "AdaPonderLM (2026), table of downstream tasks: released checkpoint (300B tokens), evaluated by its authors"

# Zero-shot and five-shot scores, by name and shape.
_SCORES = {
    ("Pythia-410M", (1024, 24, 16, 4096)): (
        (51.4, 52.2, 36.4, 21.4, 53.8, 66.9, 33.7, 81.5, 30.9),
        (43.9, 54.7, 32.8, 22.3, 53.4, 68.0, 33.8, 88.9, 30.4),
    ),
    ("Pythia-1.4B", (2048, 24, 16, 8192)): (
        (61.6, 60.4, 49.7, 25.9, 57.5, 70.8, 40.4, 86.4, 34.1),
        (54.5, 63.1, 44.5, 28.8, 57.1, 71.0, 40.5, 92.4, 34.6),
    ),
    ("Pythia-2.8B", (2560, 32, 32, 10240)): (
        (64.6, 64.4, 54.3, 29.5, 60.2, 73.8, 45.4, 88.5, 34.9),
        (59.0, 67.0, 50.7, 31.0, 61.1, 74.4, 45.3, 93.7, 35.9),
    ),
    ("Pythia-6.9B", (4096, 32, 32, 16384)): (
        (67.2, 67.3, 55.9, 31.4, 61.0, 75.2, 48.1, 89.3, 36.9),
        (62.5, 69.6, 54.8, 35.6, 62.9, 76.6, 48.0, 94.6, 36.7),
    ),
}

_TASKS = "lambada_openai arc_easy lambada_standard arc_challenge winogrande piqa hellaswag sciq race"

PAPER = Suite(
    name="paper",
    tasks=tuple(_TASKS.split()),
    shots=(0, 5),
    metric="acc",
    references=tuple(
        Reference(name, _SOURCE, shape, dict(zip((0, 5), scores, strict=True)))
        for (name, shape), scores in _SCORES.items()
    ),
)
