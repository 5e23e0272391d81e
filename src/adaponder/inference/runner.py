"""Runs the scheduler's plans on the device: as CUDA graphs if device and policies allow it, else tick by tick."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Many
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from adaponder.backbones.shape import Shape, shape_of
from adaponder.inference.bodies import Body
from adaponder.inference.config import EngineShape
from adaponder.inference.graphs import GraphedBody, Graphs
from adaponder.inference.kv_cache import KVRows, Span
from adaponder.inference.sampler import Features, Scores
from adaponder.inference.scheduler import Plan
from adaponder.inference.sequence import Chunk, Sequence
from adaponder.inference.tick import Extras, TickRunner, to_host
from adaponder.modeling import AdaPonderForCausalLM

# Multiply-adds per CPU thread in a matrix product: about 100 microseconds of work. Threads that share a product wait
# for the slowest thread, which is short compared with this, but longer than a whole product of a small model takes.
PER_THREAD = 1_000_000
# Matrix products per layer (attention in and out, MLP up and down), and after the layers (head, expectation).
_LAYER_PRODUCTS, _HEAD_PRODUCTS = 4, 2


@dataclass
class Launch:
    """A launched plan and its results, which are on the host after :meth:`wait`.

    Attributes:
        decoding: by log column, the sequence and its ``kv`` at launch. A sequence that is preempted or finishes gets a
            new ``kv``, by which the host recognises that these results must be dropped.
        log: the log of sampled tokens, ``[ticks, n, …]`` (see :mod:`adaponder.ops.lanes`), and the ticks'
            :class:`Extras`, stacked.
        chunks: each prefilled chunk, which of its tokens continue to another iteration (bool ``[n]``), and its scores.
        failed: the exceptions raised by users' own policies, by sequence.
    """

    decoding: list[tuple[Sequence, KVRows]]
    ticks: int
    log: tuple[Tensor, Extras] | None = None
    chunks: list[tuple[Chunk, Tensor, Scores | None]] = field(default_factory=list)
    failed: dict[Sequence, Exception] = field(default_factory=dict)
    ready: Any = None

    def wait(self) -> tuple[Tensor, Extras]:
        """Waits until the results are on the host and returns :attr:`log`."""
        if self.ready is not None:
            self.ready.synchronize()
        assert self.log is not None
        return self.log


class Runner(TickRunner):
    """Launches plans over the lanes of a :class:`TickRunner`.

    Attributes:
        occupants: by lane, the ``kv`` of the sequence that the lane was set up for.
        graphs: replays ticks as CUDA graphs; ``None`` without a GPU.
        replayed: replays passes of the body as CUDA graphs, for ticks that cannot be one graph.
    """

    def __init__(self, model: AdaPonderForCausalLM, body: Body, shape: EngineShape, **options: Any):
        super().__init__(model, body, shape, **options)
        self.backbone_shape = shape_of(model.config.backbone_config)
        self.occupants: dict[int, KVRows] = {}
        self.graphs: Graphs | None = None
        self.replayed: Body | None = None
        if self.device.type == "cuda":
            self.graphs = Graphs(self, shape.burst)
            self.replayed = GraphedBody(body, self.graphs, self.lanes.padding)

    @torch.no_grad()
    def launch(self, plan: Plan) -> Launch:
        """Launches a plan on the device without waiting for its results."""
        self._update_lanes(plan.resident)
        if plan.starting:
            self._start_decoding(plan.starting)
        if plan.pages:
            self.lanes.update_block_tables(plan.pages)
        launch = Launch([(sequence, sequence.kv) for sequence in plan.decoding], plan.ticks)
        features = Features.union({sequence.submission.features for sequence in plan.decoding})
        lanes = [sequence.lane_number for sequence in plan.decoding]
        if self.graphs is None:
            self._run(lanes, features, plan.chunks, plan, launch)
        else:
            if lanes and self.policies.callables():
                self._run(lanes, features, (), plan, launch)
            elif lanes:
                launch.log = self.graphs.of(len(lanes), features, plan.context).run(lanes, plan.ticks)
            if plan.chunks:  # a separate pass after the ticks: the host can launch it while they run
                self._run([], Features(), plan.chunks, plan, launch)
        if self.device.type == "cuda":
            launch.ready = torch.cuda.Event()
            launch.ready.record()
        return launch

    def span(self, sequence: Sequence, start: int, stop: int, pages: frozenset[int]) -> Span:
        """Returns a :class:`Span` of tokens ``start … stop - 1`` of a sequence, whose rows are on ``pages``."""
        columns = self.lanes.index[sequence.lane, :, start * self.width : stop * self.width].clone()
        return Span(columns, sequence.depths[start:stop], pages)

    def _update_lanes(self, resident: dict[int, Sequence]) -> None:
        """Clears the policies of lanes whose sequence is no longer resident, and sets up lanes with a new sequence.

        Setting up a lane sets its policy, and writes the pool rows that it shares with other sequences into its index.
        """
        for lane in self.occupants.keys() - resident.keys():
            self.policies.clear(lane)
            del self.occupants[lane]
        for lane, sequence in resident.items():
            if self.occupants.get(lane) is sequence.kv:  # a preempted sequence has new rows
                continue
            self.occupants[lane] = sequence.kv
            submission, last = sequence.submission, sequence.passes - 1
            self.policies.set(lane, submission.policy, submission.request.seed, submission.forced, last)
            if sequence.kv.shared:
                columns = torch.cat([span.columns for span in sequence.kv.shared], dim=1)
                self.lanes.index[lane, :, : columns.shape[1]] = columns

    def _start_decoding(self, sequences: Many[Sequence]) -> None:
        """Sets up the lanes of prefilled sequences for decoding: sampling settings and the first token to decode."""
        entries = []
        for sequence in sequences:
            lane, tokens, prompt = sequence.lane_number, sequence.tokens, sequence.submission.prompt
            self.sampler.set(lane, sequence.request, sequence.sample, prompt, output_ids=tokens[len(prompt) :])
            entries.append((lane, tokens[-1], len(tokens) - 1, sequence.passes - 1))
        self.lanes.start(entries)
        if self.drafts is not None:
            self.drafts.start(sequences, self.policies.callables())

    def _run(self, lanes: list[int], features: Features, chunks: Many[Chunk], plan: Plan, launch: Launch) -> None:
        """Runs the plan's ticks one by one (only one if ``lanes`` is empty), with the chunks in the first tick."""
        rows = (len(lanes) + sum(len(chunk.tokens) for chunk in chunks)) * self.width
        numbers, extras = self.as_tensor(lanes), []
        ticks = plan.ticks if lanes else 1
        log = self.new_log(ticks, len(lanes))
        self.lanes.books.tick.fill_(-1)
        with pass_threads(self.backbone_shape, rows) if self.device.type == "cpu" else nullcontext():
            for _ in range(ticks):
                extra, outputs = self.tick(numbers, chunks, features, plan.context, log, self.replayed)
                extras.append(extra)
                launch.chunks += [(chunk, *output) for chunk, output in zip(chunks, outputs, strict=True)]
                launch.failed |= {plan.resident[lane]: error for lane, error in self.policies.errors.items()}
                chunks = ()
        if launch.log is None:
            columns = zip(*extras, strict=True)
            stacked = (None if values[0] is None else to_host(torch.stack(values)) for values in columns)
            launch.log = (to_host(log), Extras(*stacked))


@contextmanager
def pass_threads(shape: Shape, rows: int) -> Iterator[None]:
    """Context manager that limits torch's threads during a pass over ``rows`` rows, then restores their number.

    The limit is one thread per ``PER_THREAD`` multiply-adds of the pass's average matrix product.
    """
    weights = shape.body + _HEAD_PRODUCTS * shape.vocabulary * shape.hidden
    products = _LAYER_PRODUCTS * shape.layers + _HEAD_PRODUCTS
    before = torch.get_num_threads()
    torch.set_num_threads(max(1, min(before, rows * weights // products // PER_THREAD)))
    try:
        yield
    finally:
        torch.set_num_threads(before)
