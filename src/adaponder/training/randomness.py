"""Random generators of a run, by kind of device: dropout draws from the one of the device that computes."""

from __future__ import annotations

import torch
from torch import Tensor

CPU = "cpu"


def random_state(device: torch.device) -> dict[str, str]:
    """The state of the CPU's generator and of the device's, in hexadecimal."""
    states = {CPU: torch.get_rng_state()}
    if device.type != CPU:
        states[device.type] = torch.get_device_module(device).get_rng_state(device)
    return {kind: state.numpy().tobytes().hex() for kind, state in states.items()}


def parse_random_state(saved: str | dict[str, str]) -> dict[str, Tensor]:
    """What :func:`random_state` returned, as tensors; checkpoints of 0.1.0 and before hold the CPU's alone, bare."""
    by_kind = {CPU: saved} if isinstance(saved, str) else saved
    return {kind: torch.frombuffer(bytearray.fromhex(state), dtype=torch.uint8) for kind, state in by_kind.items()}


def restore_random_state(states: dict[str, Tensor], device: torch.device) -> None:
    """Sets the CPU's generator, and the device's where its state is known."""
    torch.set_rng_state(states[CPU])
    if device.type != CPU and device.type in states:
        torch.get_device_module(device).set_rng_state(states[device.type], device)
