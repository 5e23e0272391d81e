"""The record of a benchmark: begun once the operations' tests have passed, and written as figures come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from adaponder.bench.checks import require_tests
from adaponder.bench.record import about, checkout, commit_of, conditions, record_path
from adaponder.commands.options import BenchOptions
from adaponder.devices import as_device
from adaponder.errors import InputError
from adaponder.recipes import Recipe
from adaponder.terminal import console, line, write_json


def checked(options: BenchOptions) -> torch.device:
    """The device to measure on; raises if an option that all benchmarks share is wrong."""
    if options.repeats < 1:
        raise InputError(f"--repeats {options.repeats}: at least one repetition is needed")
    if options.warmup < 0:
        raise InputError(f"--warmup {options.warmup}: must not be negative")
    return as_device(options.device)


@dataclass(frozen=True)
class Record:
    """A record in the making: ``known`` before the first figure, ``metrics`` so far, and the ``path`` to write."""

    options: BenchOptions
    path: Path | None
    known: dict[str, Any]
    metrics: dict[str, Any] = field(default_factory=dict)

    @property
    def hardware(self) -> dict[str, Any]:
        return self.known["hardware"]

    def keep(self, metrics: dict[str, Any]) -> None:
        """Adds metrics and writes all so far to ``--json``, so that an interruption loses none."""
        self.metrics.update(metrics)
        write_json(self.options.json, self.known | {"complete": False, "metrics": self.metrics})

    def finish(self) -> dict[str, Any]:
        """Returns the complete record, written to ``path`` and ``--json`` if there are any."""
        ceilings = (
            f"{self.hardware['matmul_flops'] / 1e12:.3g} TFLOP/s of matmul, "
            f"{self.hardware['copy_bytes'] / 1e9:.4g} GB/s of copy"
        )
        console.print(f"\n{self.hardware['device']}: {ceilings}; medians of {self.options.repeats}", style="dim")
        whole = self.known | {"complete": True, "metrics": self.metrics}
        if self.path is not None:
            write_json(self.path, whole)
            console.print(line("the record is ", (self.path.relative_to(checkout()), "bold")))
        write_json(self.options.json, whole)
        return whole


def begin(
    options: BenchOptions,
    name: str,
    device: torch.device,
    settings: dict[str, Any],
    recipe: Recipe | None = None,
    overrides: Sequence[str] = (),
) -> Record:
    """A record without metrics, named ``command`` or ``command-variety``, after the operations' tests have passed."""
    # A record stands for the whole comparison: a part of it must not take its place.
    path = record_path(name, device, recipe) if options.record and not options.only else None
    commit = commit_of(options.commit, needed=options.record)
    if recipe is not None:
        console.print(line((recipe.name, "bold"), f"  {recipe.fingerprint}  {recipe.about}"))
    if options.record and options.only:
        console.print("--only: a part is measured, and no record is kept; --json PATH keeps the figures")
    if options.trust:
        console.print("--trust: the operations are not tested first", style="yellow")
    else:
        console.print("testing the operations …")
        if not require_tests(device):
            console.print("  these sources have passed already")
    console.print("measuring what the device can do at best …")
    told = (
        settings
        | {"warmup": options.warmup, "repeats": options.repeats}
        | ({"only": list(options.only)} if options.only else {})
    )
    known = {
        "command": f"bench {name.partition('-')[0]}",
        "tested": not options.trust,
        **conditions(device, commit=commit),
    }
    known |= {
        "recipe": None if recipe is None else about(recipe, overrides),
        "seed": (options.seed or 0) if recipe is None else recipe.train.seed,
        "settings": told,
    }
    return Record(options, path, known)
