"""Runs training in several processes, on one or several machines; a single process needs no process group."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from adaponder.backbones.families import decoder_layers
from adaponder.devices import as_device
from adaponder.halting import bottom_k_mean, pool_count
from adaponder.modeling import AdaPonderForCausalLM


@dataclass(frozen=True)
class World:
    """The rank of this process, the number of processes (``size``), and this process's device."""

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """Returns the sum over all processes, in every process."""
        if self.size > 1:
            values = values.clone()
            dist.all_reduce(values)
        return values

    def mean(self, values: Tensor) -> Tensor:
        """Returns the mean over all processes, in every process."""
        return values if self.size == 1 else self.sum(values) / self.size

    def gather(self, values: Tensor) -> list[Tensor]:
        """Returns the ``values`` of all processes by rank, in every process. All must have the same shape."""
        if self.size == 1:
            return [values]
        local = values.to(self.device)
        gathered = [torch.empty_like(local) for _ in range(self.size)]
        dist.all_gather(gathered, local)
        return [tensor.to(values.device) for tensor in gathered]

    def any(self, flag: bool) -> bool:
        """Returns, in every process, whether ``flag`` is true in at least one process."""
        return flag if self.size == 1 else bool(self.sum(torch.tensor(float(flag), device=self.device)) > 0)

    def wait(self) -> None:
        if self.size > 1:
            dist.barrier()


@contextmanager
def join(device: str) -> Iterator[World]:
    """Context manager that yields this process's :class:`World`; leaves the process group when the block ends.

    Joins the process group that torchrun describes in the environment; without torchrun, there is one process.
    """
    size, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    target = as_device(device)
    if target.type == "cuda":
        target = as_device(f"cuda:{os.environ.get('LOCAL_RANK', target.index or 0)}")
        torch.cuda.set_device(target)
    if size == 1:
        yield World(device=target)
        return
    dist.init_process_group("nccl" if target.type == "cuda" else "gloo")
    try:
        yield World(rank, size, target)
    finally:
        dist.destroy_process_group()


def local_share() -> tuple[int, int]:
    """Returns (rank, number of processes) on this machine, as set by torchrun; (0, 1) without torchrun."""
    if not {"LOCAL_RANK", "LOCAL_WORLD_SIZE"} <= os.environ.keys():
        return 0, 1
    return int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])


def wrap(model: AdaPonderForCausalLM, world: World, *, parallel: str) -> nn.Module:
    """Returns the model replicated (DDP) or sharded (FSDP) over the processes; unchanged for a single process."""
    if world.size > 1 and parallel == "fsdp":
        from torch.distributed.fsdp import fully_shard

        # One FSDP unit per decoder layer; gates, embedding and head are in the root unit, gathered during a step.
        for layer in decoder_layers(model.backbone, model.config.num_hidden_layers):
            fully_shard(layer)
        fully_shard(model)
    if world.size > 1 and parallel == "ddp":
        devices = [world.device] if world.device.type == "cuda" else None
        return nn.parallel.DistributedDataParallel(model, device_ids=devices)
    return model


def accumulating(called: nn.Module, *, last: bool) -> Any:
    """Returns a context manager in which backward averages gradients over processes only if ``last`` is true."""
    if isinstance(called, nn.parallel.DistributedDataParallel) and not last:
        return called.no_sync()
    if hasattr(called, "set_requires_gradient_sync"):
        called.set_requires_gradient_sync(last)
    return nullcontext()


def global_bottom_k_mean(world: World) -> Any:
    """Returns a ``bottom_k_mean`` that ranks the gates of all processes together.

    In each process it returns the sum of the process's own gates that are among the lowest, divided by the number of
    lowest gates in all processes and multiplied by the number of processes, because gradients are averaged over them.
    """

    def mean(values: Tensor, fraction: float) -> Tensor:
        if world.size == 1:
            return bottom_k_mean(values, fraction)
        flat = values.flatten()
        sizes = torch.zeros(world.size, dtype=torch.long, device=flat.device)
        sizes[world.rank] = flat.numel()
        sizes = world.sum(sizes).tolist()
        gathered = [flat.new_zeros(size) for size in sizes]
        dist.all_gather(gathered, flat.detach().contiguous())
        count = pool_count(fraction, sum(sizes))
        if count == 0:
            return flat.new_zeros(())
        lowest = torch.topk(torch.cat(gathered), count, largest=False, sorted=False).indices - sum(sizes[: world.rank])
        local = lowest[(lowest >= 0) & (lowest < flat.numel())]
        return flat[local].sum() * world.size / count

    return mean
