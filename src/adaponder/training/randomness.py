"""Random generators of a run, by process and kind of device: dropout draws from that of the device that computes."""

from __future__ import annotations

import torch
from torch import Tensor

from adaponder.training.distributed import World

CPU = "cpu"


def random_states(world: World) -> list[dict[str, str]]:
    """Each process's states of the CPU's generator and of its device's, in hexadecimal; all processes must call."""
    states = {CPU: torch.get_rng_state()}
    if world.device.type != CPU:
        states[world.device.type] = torch.get_device_module(world.device).get_rng_state(world.device)
    gathered = {kind: world.gather(state) for kind, state in states.items()}
    return [
        {kind: by_rank[rank].numpy().tobytes().hex() for kind, by_rank in gathered.items()}
        for rank in range(world.size)
    ]


def parse_random_states(saved: str | dict[str, str] | list[dict[str, str]]) -> list[dict[str, Tensor]]:
    """What :func:`random_states` returned, as tensors.

    Older checkpoints hold the leading process's alone, without the list; the oldest its CPU's alone, bare.
    """
    if not isinstance(saved, list):
        saved = [{CPU: saved} if isinstance(saved, str) else saved]
    return [
        {kind: torch.frombuffer(bytearray.fromhex(state), dtype=torch.uint8) for kind, state in by_kind.items()}
        for by_kind in saved
    ]


def restore_random_state(states: dict[str, Tensor], device: torch.device) -> None:
    """Sets the CPU's generator, and the device's where its state is known."""
    torch.set_rng_state(states[CPU])
    if device.type != CPU and device.type in states:
        torch.get_device_module(device).set_rng_state(states[device.type], device)
