"""One process or several, on one machine or several: a lone process is a world of one without a process group."""

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
from adaponder.errors import ConfigError
from adaponder.halting import bottom_k_mean, pool_count
from adaponder.modeling import AdaPonderForCausalLM


@dataclass(frozen=True)
class World:
    """The number of this process (``rank``), how many there are (``size``), and its device."""

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def share(self, total: int, name: str) -> int:
        """How many of the ``total`` windows of ``name`` are this process's."""
        if total % self.size:
            raise ConfigError(f"{name}={total} cannot be shared evenly by {self.size} processes")
        return total // self.size

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all processes, on each."""
        if self.size > 1:
            values = values.clone()
            dist.all_reduce(values)
        return values

    def mean(self, values: Tensor) -> Tensor:
        """The mean over all processes, on each."""
        return values if self.size == 1 else self.sum(values) / self.size

    def gather(self, values: Tensor) -> list[Tensor]:
        """The values of every process, which must have the same shape, on each, and on the device they came from."""
        if self.size == 1:
            return [values]
        mine = values.to(self.device)
        everyone = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(everyone, mine)
        return [each.to(values.device) for each in everyone]

    def any(self, flag: bool) -> bool:
        """Whether ``flag`` is true in any process; the same answer in all."""
        return bool(self.sum(torch.tensor(float(flag), device=self.device)) > 0)

    def wait(self) -> None:
        if self.size > 1:
            dist.barrier()


@contextmanager
def join(device: str) -> Iterator[World]:
    """The world that ``torchrun`` describes in the environment, or a world of one."""
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
    """(number of this process, processes) on this machine, as torchrun says; (0, 1) where it does not."""
    if not {"LOCAL_RANK", "LOCAL_WORLD_SIZE"} <= os.environ.keys():
        return 0, 1
    return int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])


def wrap(model: AdaPonderForCausalLM, world: World, *, parallel: str) -> nn.Module:
    """The model as it is called in training: replicated or sharded where there are several processes."""
    if world.size > 1 and parallel == "fsdp":
        from torch.distributed.fsdp import fully_shard

        # One unit per decoder layer; gates, embedding and head belong to the root, which stays gathered for a step.
        for layer in decoder_layers(model.backbone, model.config.num_hidden_layers):
            fully_shard(layer)
        fully_shard(model)
    if world.size > 1 and parallel == "ddp":
        return nn.parallel.DistributedDataParallel(
            model, device_ids=[world.device] if world.device.type == "cuda" else None, find_unused_parameters=False
        )
    return model


def accumulating(called: nn.Module, *, last: bool) -> Any:
    """A context in which gradients stay local to the process, except in the last micro-step."""
    if isinstance(called, nn.parallel.DistributedDataParallel) and not last:
        return called.no_sync()
    if hasattr(called, "set_requires_gradient_sync"):
        called.set_requires_gradient_sync(last)
    return nullcontext()


def global_bottom_k_mean(world: World) -> Any:
    """A bottom-K mean over the gates of all processes: what one process with all windows would compute.

    Each process returns its own part of the mean, times the number of processes, because gradients are averaged.
    """

    def mean(values: Tensor, fraction: float) -> Tensor:
        if world.size == 1:
            return bottom_k_mean(values, fraction)
        flat = values.flatten()
        sizes = torch.zeros(world.size, dtype=torch.long, device=flat.device)
        sizes[world.rank] = flat.numel()
        sizes = world.sum(sizes).tolist()
        everyone = [flat.new_zeros(size) for size in sizes]
        dist.all_gather(everyone, flat.detach().contiguous())
        count = pool_count(fraction, sum(sizes))
        if count == 0:
            return flat.new_zeros(())
        chosen = torch.topk(torch.cat(everyone), count, largest=False, sorted=False).indices - sum(sizes[: world.rank])
        mine = chosen[(chosen >= 0) & (chosen < flat.numel())]
        return flat[mine].sum() * world.size / count

    return mean
