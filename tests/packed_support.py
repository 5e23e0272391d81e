"""Batches whose active rows are packed, another number of them in every pass."""

import torch

from adaponder.policies import ForcedDepths
from support import ids

# Another number of rows in every pass, another in every batch, and a batch in which a sequence has none.
DEPTHS = [torch.tensor([[4, 1, 3, 2, 4, 1], [2, 2, 4, 1, 1, 3]]), torch.tensor([[1] * 6, [4, 3, 3, 4, 2, 4]])]
PADDED = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0]])


def loss_and_gradients(model, **asked) -> list[torch.Tensor]:
    """Returns the loss of a fixed batch and every gradient."""
    model.zero_grad()
    loss = model(ids(), **asked).loss
    loss.backward()
    return [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None)]


def assert_same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    """Asserts equality up to the rounding of float64."""
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-11)


def packed_results(model, given, trains):
    found = []
    for depth in DEPTHS:
        asked = {"policy": ForcedDepths(depth), "execution": "compact", "targets": ids(2, 6, seed=1), **given}
        with torch.set_grad_enabled(trains):
            loss = model(ids(2, 6), **asked, output_logits=False).loss
        found.append(loss.detach())
        if trains:
            loss.backward()
            found += [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
            model.zero_grad()
    return found
