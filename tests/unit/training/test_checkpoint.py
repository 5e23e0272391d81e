"""A resumed run draws what an unbroken one would have drawn, from the generator of the device that it computes on."""

import json
from types import SimpleNamespace

import pytest
import torch

from adaponder.training.checkpoint import random_states, restore_random_state
from adaponder.training.distributed import World


def draws_again(device: torch.device, draw) -> None:
    saved = json.loads(json.dumps(random_states(World(device=device))))
    first = (torch.rand(3).tolist(), draw().tolist())
    assert (torch.rand(3).tolist(), draw().tolist()) != first
    (state,) = saved
    restore_random_state(state, device)
    assert (torch.rand(3).tolist(), draw().tolist()) == first


def test_a_device_has_a_generator_of_its_own_which_draws_again_what_it_drew(monkeypatch):
    device, generator, devices = torch.device("cuda", 1), torch.Generator().manual_seed(7), []
    module = SimpleNamespace(
        get_rng_state=lambda which: devices.append(which) or generator.get_state(),
        set_rng_state=lambda state, which: devices.append(which) or generator.set_state(state),
    )
    monkeypatch.setattr(torch, "get_device_module", {device: module}.__getitem__)
    draws_again(device, lambda: torch.rand(2, generator=generator))
    assert devices == [device, device]


@pytest.mark.gpu
def test_a_gpu_draws_again_what_it_drew():
    device = torch.device("cuda", torch.cuda.current_device())
    draws_again(device, lambda: torch.rand(2, device=device))


def test_a_state_without_the_device_restores_the_cpu_alone():
    (state,) = random_states(World())
    first = torch.rand(3).tolist()
    restore_random_state(state, torch.device("cuda"))
    assert torch.rand(3).tolist() == first
