"""Captures calls as CUDA graphs, for tests that compare replays with plain calls."""

from collections.abc import Callable
from typing import Any

import torch


def captured(function: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
    """Captures a call, after one that compiles its kernels; returns what replays it, and its result."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = function()
    return graph.replay, result
