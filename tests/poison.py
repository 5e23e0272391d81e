"""Memory as an operation may find it: what nobody has written is NaN, so that whatever reads it shows."""

import functools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor


@pytest.fixture(scope="module")
def poisoned() -> Iterator[None]:
    """``empty`` in all its forms returns NaN (the largest integer, where there is no NaN) for the tests of a module."""
    with torch.device("cpu"):
        torch.empty(0)  # torch lists once which functions a device context turns: the true ones, for later modules
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch, "empty_strided"), (Tensor, "new_empty")):
            patch.setattr(owner, name, _filled(getattr(owner, name)))
        yield


def _filled(make):
    @functools.wraps(make)
    def filled(*arguments, **options) -> Tensor:
        made = make(*arguments, **options)
        if made.is_floating_point():
            made.fill_(float("nan"))
        elif made.dtype != torch.bool:
            made.fill_(torch.iinfo(made.dtype).max)
        return made

    return filled
