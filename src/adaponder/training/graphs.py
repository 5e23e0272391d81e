"""Runs the forward and backward of training steps as CUDA graphs, each started by a single call of the host.

A graph needs constant shapes. In compact execution each pass computes a constant number of rows, a few more than the
latest step needed. After the forward, the host compares this number with the number of active tokens; if more tokens
were active, the forward is computed again without a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from adaponder.errors import TrainingError
from adaponder.modeling import AdaPonderForCausalLM

# Computes the model's output, an AdaPonderOutput, for tensor arguments and an ``execution``.
Forward = Callable[[dict[str, Tensor], Any], Any]
# The number of rows of a pass is a multiple of a batch's tokens divided by STEPS.
STEPS = 32
# The maximum number of graphs to keep; they differ in their numbers of rows.
_MOST = 16


class Recorded(NamedTuple):
    """The graphs of a forward and its backward, which read ``inputs``, write ``output`` and add to each ``grad``."""

    inputs: dict[str, Tensor]
    output: Any
    forward: Callable[[], None]
    backward: Callable[[], None]


class StepGraphs:
    """Runs forward and backward eagerly at first, then as CUDA graphs, which share a memory pool.

    ``patience`` is the number of eager calls with equal settings before a capture. In compact execution it must be at
    least 1, because the first call counts the rows of each pass.
    """

    def __init__(self, model: AdaPonderForCausalLM, execution: str, *, patience: int = 16):
        self.model, self.execution, self.patience = model, execution, patience
        self.settings: Any = None
        self.limits: tuple[int, ...] | None = None
        self._forget()

    def _forget(self) -> None:
        self.calls = 0
        self.graphs: dict[Hashable, Recorded] = {}
        self.grads: dict[Tensor, Tensor] = {}
        self.pool: Any = None

    def run(self, settings: Any, inputs: dict[str, Tensor], forward: Forward, *, share: int = 1) -> Any:
        """Runs ``forward``, adds the gradients of ``loss / share`` and returns the output, detached.

        Calls with equal ``settings`` must pass functions ``forward`` that compute the same, because a graph of an
        earlier call may run instead. The next call may overwrite the output.
        """
        if settings != self.settings:
            self.settings = settings
            self._forget()
        self.calls += 1
        execution = self.limits or self.execution
        recorded = self.graphs.get(execution)
        if recorded is None:
            output = forward(inputs, execution)
        else:
            for name, buffer in recorded.inputs.items():
                buffer.copy_(inputs[name], non_blocking=True)
            recorded.forward()
            output = recorded.output
        counts = self._counts(output)
        fits = self.limits is None or all(n <= most for n, most in zip(counts, self.limits, strict=True))
        if not fits:
            recorded, output = None, None  # frees the activations of the forward
            output = forward(inputs, self.execution)
            counts = self._counts(output)
        if recorded is None:
            output = add_gradients(output, share)
        else:
            self._hold_gradients()
            recorded.backward()
        if recorded is None and fits and self.calls > self.patience:
            self._capture(execution, inputs, forward, share)
        if self.execution == "compact":
            self.limits = next_limits(self.limits, counts, output.depth.numel())
        return output

    def _counts(self, output: Any) -> list[int]:
        """Returns the number of active tokens in each pass after the first; an empty list in dense execution."""
        if self.execution != "compact":
            return []
        later = torch.arange(1, self.model.method.passes(self.model.config.iterations), device=output.depth.device)
        return (output.depth[..., None] > later).sum((0, 1)).tolist()

    def _capture(self, execution: Any, inputs: dict[str, Tensor], forward: Forward, share: int) -> None:
        """Captures the step that has just run eagerly as CUDA graphs of its forward and backward (of ``loss / share``).

        Capturing only records kernels, so no gradient is added twice.
        """
        if len(self.graphs) == _MOST:
            self.graphs, self.pool = {}, None  # a memory pool is freed with its last graph
        buffers = {name: value.to(self.model.device, copy=True) for name, value in inputs.items()}
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                self.grads.setdefault(parameter, parameter.grad)
        self._hold_gradients()
        try:
            replay_forward, output = self._record(lambda: forward(buffers, execution))
            # A backward runs on the streams of its forward, so the division by ``share`` must be captured too.
            replay_backward, output = self._record(partial(add_gradients, output, share))
        except RuntimeError as error:
            raise TrainingError(f"train.cuda_graphs must be false: this step cannot be captured ({error})") from error
        self.graphs[execution] = Recorded(buffers, output, replay_forward, replay_backward)

    def _record(self, function: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """Captures a call; returns a function that replays it, and the result that each replay overwrites."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            result = function()
        self.pool = graph.pool()
        return graph.replay, result

    def _hold_gradients(self) -> None:
        """Makes each ``grad`` the buffer to which the graphs add; its value is kept, and ``None`` becomes zeros."""
        cleared = [buffer for parameter, buffer in self.grads.items() if parameter.grad is None]
        if cleared:
            torch._foreach_zero_(cleared)
        for parameter, buffer in self.grads.items():
            if parameter.grad is not None and parameter.grad is not buffer:
                buffer.copy_(parameter.grad)
            parameter.grad = buffer


def next_limits(limits: Sequence[int] | None, counts: Sequence[int], tokens: int) -> tuple[int, ...]:
    """Returns the rows per pass for the next step: ``counts`` rounded up to multiples of ``tokens / STEPS``.

    A larger limit of the last step is lowered only to one multiple above, so that small changes need no new graph.
    """
    step = -(-tokens // STEPS)
    needed = [min(tokens, -(-count // step) * step) for count in counts]
    return tuple(max(need, min(limit, need + step)) for need, limit in zip(needed, limits or needed, strict=True))


def add_gradients(output: Any, share: int) -> Any:
    """Adds the gradients of ``loss / share`` to the parameters; returns the output, detached."""
    (output.loss / share).backward()
    return tree_map_only(Tensor, Tensor.detach, output)
