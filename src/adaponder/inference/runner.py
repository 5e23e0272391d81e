"""What the device does in a tick: one pass over all rows, the method's own lines between passes, and sampling."""

from __future__ import annotations

from collections.abc import Sequence as Many
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from adaponder.backbones.shape import shape_of
from adaponder.execution.base import Pass
from adaponder.inference.bodies.base import Body, Pools
from adaponder.inference.drafting import Drafting
from adaponder.inference.graphs import Graphs, bucket_of
from adaponder.inference.lane_policies import LanePolicies
from adaponder.inference.lanes import Lanes, joined, resumed, rows_of, store
from adaponder.inference.launches import Extras, Launch, Log, Needs
from adaponder.inference.pass_graphs import GraphedBody
from adaponder.inference.prefixes import Span
from adaponder.inference.prompts import ChunkRows, Chunks, Read, states_of
from adaponder.inference.row_gates import RowGates
from adaponder.inference.rows import TickInput, TickRows
from adaponder.inference.sampler import SamplerState, prompt_log_probabilities
from adaponder.inference.scheduler import Plan
from adaponder.inference.sequence import Chunk, Sequence
from adaponder.inference.threads import pass_threads
from adaponder.methods import State
from adaponder.modeling import AdaPonderForCausalLM
from adaponder.ops.lane_books import Begun, begin_rows, book_rows, end_rows
from adaponder.ops.ledger_attention import LedgerRows


class Runner:
    """Everything of an engine that lives on the device.

    Args:
        model: whose method runs between passes.
        body: reads the backbone's layers over the pools.
        lanes: sequences at a time.
        iterations: the most times a token is read.
        tokens: of the longest sequence.
        rows: of the pools, in pages of ``page_size``.
        eos_ids: end a sequence.
        ahead: rows that a lane may use before the host has heard of them.
        window: tokens of a sequence that are read at a time; above 1 the engine drafts.

    Attributes:
        drafts: the windows of all lanes; ``None`` where nothing is drafted.
        graphs: replays ticks as CUDA graphs; ``None`` where they run eagerly.
        top_k: of the expectation over the vocabulary, instead of the config's.
    """

    def __init__(
        self,
        model: AdaPonderForCausalLM,
        body: Body,
        *,
        lanes: int,
        iterations: int,
        tokens: int,
        rows: int,
        page_size: int,
        eos_ids: frozenset[int],
        ahead: int,
        window: int = 1,
    ):
        self.model, self.method, self.backbone, self.body = model, model.method, model.wrapped, body
        self.device, self.dtype = model.device, model.dtype
        self.shape = shape_of(model.config.backbone_config)
        self.passes, self.width = self.method.passes(iterations), self.method.slots_per_token(iterations)
        self.vanishes = self.method.reuse() == "absent"
        self.policies = LanePolicies(lanes + 1, tokens, model.config, self.device)
        self.sampler = SamplerState(lanes + 1, model.config.vocab_size, self.device, eos_ids=eos_ids)
        self.pools = Pools.empty(body.row_shapes(), rows, self.dtype, self.device)
        one = torch.zeros(1, dtype=torch.long, device=self.device)
        embedded = self.backbone.embed(one[:, None])
        self._everybody = torch.ones(bucket_of(lanes) * window, 1, dtype=torch.bool, device=self.device)
        nothing = TickRows(self, TickInput(one, one, one, one, one[:, None], None), 1, ())
        first = self.method.start(nothing, embedded)
        self.graphs: Graphs | None = None
        self.replayed: Body | None = None
        self._gates: tuple[Any, RowGates] | None = None
        self.top_k: int | None = None
        shape = {"passes": self.passes, "tokens": tokens, "width": self.width, "page_size": page_size}
        self.lanes = Lanes(lanes, **shape, ahead=ahead, like=first, window=window)
        self.drafts: Drafting | None = None
        if window > 1:
            self.drafts = Drafting(self.lanes.books, size=window, passes=self.passes, vanishes=self.vanishes)

    def use_graphs(self, ticks: int) -> None:
        """Replays ticks as CUDA graphs, so many in a row at most, and the passes of ticks that cannot be one."""
        self.graphs = Graphs(self, ticks)
        self.replayed = GraphedBody(self.body, self.graphs, self.lanes.nobody)

    # --- lanes --------------------------------------------------------------------------------------------------

    def admit(self, sequence: Sequence) -> None:
        """A sequence gets its lane: its policy, and the rows that it shares."""
        request = sequence.request
        self.policies.set(
            sequence.lane_number,
            sequence.policy,
            request.seed,
            sequence.forced,
            min(self.passes, sequence.iterations) - 1,
        )
        columns = [span.columns for span in sequence.shared]
        if columns:
            shared = torch.cat(columns, dim=1)
            self.lanes.index[sequence.lane, :, : shared.shape[1]] = shared

    def enter(self, sequences: Many[Sequence]) -> None:
        """Their prompts are read: they begin to decode."""
        for one in sequences:
            self.sampler.set(
                one.lane_number,
                one.request,
                one.sample,
                one.tokens[: one.prompt_length],
                output_ids=one.tokens[one.prompt_length :],
            )
        last = self.passes - 1
        self.lanes.enter(
            [(one.lane_number, one.tokens[-1], len(one.tokens) - 1, min(last, one.iterations - 1)) for one in sequences]
        )
        if self.drafts is not None:
            self.drafts.enter(sequences, self.policies.callables())

    def span(self, sequence: Sequence, start: int, stop: int, pages: frozenset[int]) -> Span:
        """The part of the index that the tokens from ``start`` to ``stop`` of a sequence have."""
        columns = self.lanes.index[sequence.lane, :, start * self.width : stop * self.width].clone()
        return Span(columns, sequence.depths[start:stop], pages)

    # --- a tick -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def launch(self, plan: Plan) -> Launch:
        """Gives the device a plan; the answers come later."""
        for lane in plan.left:
            self.policies.clear(lane)
        for sequence in plan.admitted:
            self.admit(sequence)
        if plan.entering:
            self.enter(plan.entering)
        if plan.pages:
            self.lanes.add_pages(plan.pages)
        launch = Launch([(one, one.stay) for one in plan.decoding], plan.ticks)
        needs = Needs.of(plan.decoding)
        lanes = [one.lane_number for one in plan.decoding]
        if self.graphs is None:
            self._run(lanes, needs, plan.chunks, plan, launch)
        else:
            if lanes and self.policies.callables():
                self._run(lanes, needs, (), plan, launch)
            elif lanes:
                launch.log = Log(*self.graphs.run(lanes, needs, plan.longest, plan.ticks))
            if plan.chunks:  # a pass of its own, after the ticks: the host has time to launch it while they run
                self._run([], Needs(), plan.chunks, plan, launch)
        if self.device.type == "cuda":
            launch.ready = torch.cuda.Event()
            launch.ready.record()
        return launch

    def _run(self, lanes: list[int], needs: Needs, chunks: Chunks, plan: Plan, launch: Launch) -> None:
        """Runs ticks one by one, the chunks in the first; without lanes there is but that one."""
        rows = (len(lanes) + sum(len(chunk.tokens) for chunk, _ in chunks)) * self.width
        with pass_threads(self.shape, rows) if self.device.type == "cpu" else nullcontext():
            self._run_ticks(lanes, needs, chunks, plan, launch)

    def _run_ticks(self, lanes: list[int], needs: Needs, chunks: Chunks, plan: Plan, launch: Launch) -> None:
        lane, extras = self.as_tensor(lanes), []
        ticks = plan.ticks if lanes else 1
        log = self.new_log(ticks, len(lanes))
        self.lanes.books.tick.fill_(-1)
        for _ in range(ticks):
            extra, reads = self.tick(lane, chunks, needs, plan.longest, log, self.replayed)
            extras.append(extra)
            for (chunk, _), read in zip(chunks, reads, strict=True):
                launch.chunks.append((chunk, chunk.sequence.stay, read))
            launch.failed |= self.policies.errors
            chunks = ()
        if launch.log is None:
            columns = [None if parts[0] is None else torch.stack(parts) for parts in zip(*extras, strict=True)]
            launch.log = Log(_to_host(log), Extras(*(None if one is None else _to_host(one) for one in columns)))

    def new_log(self, ticks: int, lanes: int) -> Tensor:
        """Room for what so many ticks say of so many lanes."""
        if self.drafts is not None:
            return self.drafts.new_log(ticks, lanes)
        return torch.zeros(ticks, lanes, dtype=torch.long, device=self.device)

    def as_tensor(self, numbers: Any) -> Tensor:
        return torch.tensor(numbers, dtype=torch.long).to(self.device, non_blocking=True)

    def _pinned(self, numbers: np.ndarray) -> Tensor:
        """On the device, without waiting for it however many there are."""
        values = torch.from_numpy(numbers)
        return values.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else values

    def tick(
        self, lane: Tensor, chunks: Chunks, needs: Needs, longest: int, log: Tensor, body: Body | None = None
    ) -> tuple[Extras, list[Read]]:
        """One pass over a row of each of these lanes and over these chunks; ``log [ticks, n]`` gets the tokens.

        ``body`` is who reads, instead of the runner's own.
        """
        lanes, keeps = self.lanes, self.policies.reads_previous()
        alone, parts, cohorts, ids = len(lane), [], (), lane[:0]
        if self.drafts is not None and alone:
            lane, seat, begun, _ = self.drafts.begin(lane)
            alone = len(lane)
        else:
            seat, begun = lane, begin_rows(lanes.books, lane, width=self.width, vanishes=self.vanishes)
        if alone or not chunks:
            parts.append(TickInput(lane, *begun[1:], lanes.state.hidden[seat] if keeps else None))
        if chunks:
            tick, ids, cohorts = ChunkRows.of(
                chunks,
                alone=alone,
                passes=self.passes,
                width=self.width,
                before=lanes.state.hidden.new_zeros(1, *lanes.state.hidden.shape[1:]) if keeps else None,
                to_device=self._pinned,
            )
            parts.append(tick)
        tick = TickInput.joined(parts)
        rows = TickRows(self, tick, alone, cohorts)
        state = self._begin(rows, begun.token, seat, chunks, ids)
        state, hidden = self._pass(body or self.body, rows, tick, state, longest)
        extras = Extras()
        if alone or not chunks:
            extras = self._decoded(rows, begun, seat, rows_of(state, slice(alone)), hidden, needs, log)
        return extras, self._reads(chunks, rows, state, hidden, keeps)

    def _begin(self, rows: TickRows, token: Tensor, seat: Tensor, chunks: Chunks, ids: Tensor) -> State:
        """What rows begin their pass with: the method's start, or what it kept of the iteration before."""
        embed, alone, states = self.backbone.embed, rows.alone, []
        if alone or not chunks:
            first = self.method.start(rows, embed(token[:, None]))
            states.append(resumed(first, self.lanes.state, seat, rows.iteration[:alone]))
        states += states_of(chunks, ids, lambda those: self.method.start(rows, embed(those[:, None])))
        return joined(states)

    def _reads(self, chunks: Chunks, rows: TickRows, state: State, hidden: Tensor, keeps: bool) -> list[Read]:
        """What becomes of the tokens of chunks; each chunk keeps what they go on with."""
        if not chunks:
            return []
        goes_on, reads = _to_host(rows.active[rows.alone :, 0]), []
        for (chunk, _), cohort in zip(chunks, rows.cohorts, strict=True):
            start, stop = cohort.start // self.width, cohort.stop // self.width
            which = slice(start, stop)
            chunk.state, chunk.before = rows_of(state, which), hidden[which] if keeps else None
            predicted = self._predicted(chunk, hidden[which])
            if predicted is not None:
                predicted = tuple(_to_host(part) for part in predicted)
            reads.append(Read(goes_on[start - rows.alone : stop - rows.alone], predicted))
        return reads

    def _pass(self, body: Body, rows: TickRows, tick: TickInput, state: State, longest: int) -> tuple[State, Tensor]:
        """A pass of the backbone and the method's lines after it: (their state for the next pass, hidden states)."""
        width, alone, cohorts = self.width, rows.alone, rows.cohorts
        lane, slot, iteration, row = tick.lane, tick.place, tick.iteration, tick.row.flatten()
        if width > 1:
            lane, iteration = lane.repeat_interleave(width), iteration.repeat_interleave(width)
            slot = (slot[:, None] * width + torch.arange(width, device=self.device)).flatten()
        if cohorts:
            those = slice(alone * width, None)
            book_rows(self.lanes.index, lane[those], slot[those], iteration[those], row[those], vanishes=self.vanishes)
        longest = min(longest, self.lanes.index.shape[2])
        ledger = LedgerRows(self.lanes.index, lane, slot, iteration, row, alone * width, cohorts, longest)
        position = tick.place if width == 1 else tick.place.repeat_interleave(width)
        output = body.read(state.input.flatten(0, 1), position, ledger, self.pools)
        grid = (len(tick.lane), width, -1)
        state = self.method.receive(rows, state, Pass(output.hidden.view(grid), output.stream.view(grid)))
        hidden = state.hidden
        rows.active = (tick.iteration < tick.last)[:, None]
        if self.passes > 1:
            state = self.method.advance(rows, state)
        return state, hidden

    def _decoded(
        self, rows: TickRows, begun: Begun, seat: Tensor, state: State, hidden: Tensor, needs: Needs, log: Tensor
    ) -> Extras:
        """What becomes of the rows that decode: the next iteration of their token, or the first one of the next."""
        lanes, alone = self.lanes, rows.alone
        lane, goes_on = rows.lane[:alone], rows.active[:alone, 0]
        said = self.sampler.choose(rows.backbone.decoding_logits(hidden), lane, begun.place, needs.features)
        if needs.features.penalised:
            self.sampler.record(said.token, lane, ~goes_on)
        if self.drafts is not None:
            self.drafts.end(goes_on, said.token, said.bad, log)
        else:
            end_rows(lanes.books, lane, begun, goes_on, said.token, said.bad, log, places=lanes.places)
        store(lanes.state, seat, state, hidden[:alone] if self.policies.reads_previous() else None)
        gate = rows.gate_said[:alone, 0].float() if needs.gates and rows.gate_said is not None else None
        said_of = (gate, *(said.scored or (None, None, None)))
        if self.drafts is not None:
            said_of = tuple(None if one is None else self.drafts.columns(one) for one in said_of)
        return Extras(*said_of)

    def _predicted(self, chunk: Chunk, hidden: Tensor) -> Any:
        """What these prompt tokens say of the ones after them, where that was asked for."""
        wanted = chunk.sequence.request.prompt_log_probabilities
        if wanted is None or chunk.sequence.prompt_log_probabilities is None:
            return None
        tokens = chunk.sequence.tokens
        targets = self.as_tensor([tokens[place + 1] for place in chunk.tokens])
        return prompt_log_probabilities(self.backbone.logits(hidden[:, 0]), targets, wanted)

    def survive(self, chunk: Chunk, which: list[int]) -> None:
        """Keeps these tokens of a chunk: those that are read again."""
        if which and len(which) < len(chunk.tokens):
            assert chunk.state is not None
            index = self.as_tensor(which)
            chunk.state = rows_of(chunk.state, index)
            chunk.before = None if chunk.before is None else chunk.before[index]
        chunk.tokens = [chunk.tokens[number] for number in which]

    def everybody(self, rows: int) -> Tensor:
        """True for so many rows, ``[rows, 1]``."""
        if rows <= len(self._everybody):
            return self._everybody[:rows]
        return torch.ones(rows, 1, dtype=torch.bool, device=self.device)

    def gates(self, gates: Many[nn.Module] | nn.ModuleList) -> RowGates:
        """The gates as rows at different iterations ask them."""
        if self._gates is None or self._gates[0] is not gates:
            self._gates = (gates, RowGates(gates))
        return self._gates[1]


def _to_host(values: Tensor) -> Tensor:
    """A copy on the host, which has its values once the stream has come so far."""
    return values.to("cpu", non_blocking=True)
