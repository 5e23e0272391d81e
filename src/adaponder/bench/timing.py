"""Times repetitions after a warm-up; the median counts. Also measures the device's own rates."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch

_NO_MEMORY = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")


@dataclass(frozen=True)
class Timing:
    """Seconds per repetition, and the most memory that was allocated meanwhile (``None`` where it is not counted)."""

    seconds: list[float]
    peak_bytes: int | None

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """(Largest minus smallest) over the median: smaller differences between variants mean nothing."""
        return (max(self.seconds) - min(self.seconds)) / self.median


def measure(step: Callable[[], object], device: torch.device, *, warmup: int, repeats: int) -> Timing:
    """Times each of ``repeats`` steps after ``warmup`` ones, without synchronising with a GPU in between."""
    for _ in range(warmup):
        step()
    if device.type != "cuda":
        clock = [time.perf_counter()]
        for _ in range(repeats):
            step()
            clock.append(time.perf_counter())
        return Timing([after - before for before, after in pairwise(clock)], None)
    # The last warm-up may still be running, but memory is counted when it is allocated.
    torch.cuda.reset_peak_memory_stats(device)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    for mark in marks[:-1]:
        mark.record()
        step()
    marks[-1].record()
    torch.cuda.synchronize(device)
    seconds = [before.elapsed_time(after) / 1e3 for before, after in pairwise(marks)]
    return Timing(seconds, torch.cuda.max_memory_allocated(device))


def forget(device: torch.device, *, graphs: bool = True) -> None:
    """Frees the memory of what was measured before, so that every measurement starts alike.

    Compiled graphs are dropped too, unless the next model is known to fit them: the compiler counts those of all models
    together, and past its limit it would run the next model uncompiled, or compile it for shapes that vary.
    """
    if graphs:
        torch.compiler.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def out_of_memory(error: Exception) -> bool:
    """Whether an error means that memory did not suffice; libraries below torch only say so in words."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(sign in str(error) for sign in _NO_MEMORY)


def capacity(device: torch.device) -> int | None:
    """Bytes that may be allocated before memory is full; 3 % are left for what torch does not count."""
    if device.type != "cuda":
        return None
    return int(0.97 * torch.cuda.get_device_properties(device).total_memory)


def matmul_rate(device: torch.device) -> float:
    """FLOP/s of a large product of random matrices, in the precision that training uses there."""
    size, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (1024, torch.float32)
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(left)
    return 2 * size**3 / measure(lambda: torch.mm(left, right, out=out), device, warmup=3, repeats=10).median


def copy_rate(device: torch.device) -> float:
    """Bytes per second that a large copy reads and writes."""
    source = torch.empty(1 << (30 if device.type == "cuda" else 26), dtype=torch.uint8, device=device).random_(0, 256)
    target = torch.empty_like(source)
    return 2 * source.numel() / measure(lambda: target.copy_(source), device, warmup=3, repeats=10).median
