"""What the device does in a tick: one pass over all rows, the method's own lines between passes, and sampling."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from adaponder.execution.base import Pass
from adaponder.inference.bodies.base import Body, Pools
from adaponder.inference.graphs import Graphs
from adaponder.inference.lane_policies import LanePolicies
from adaponder.inference.lanes import Lanes, chosen, joined, rows_of, store
from adaponder.inference.prefixes import Span
from adaponder.inference.request import forced_depths
from adaponder.inference.rows import TickRows
from adaponder.inference.sampler import Features, SamplerState, Scored, prompt_log_probabilities
from adaponder.inference.scheduler import Plan
from adaponder.inference.sequence import Chunk, Sequence
from adaponder.methods import State
from adaponder.modeling import AdaPonderForCausalLM
from adaponder.ops.ledger_attention import Cohort, LedgerRows


class Log(NamedTuple):
    """What one tick says of each lane that decodes: ``[n]``, and ``[n, top]``.

    ``token`` is the sampled id, or one of the numbers below.
    """

    token: Tensor
    gate: Tensor
    log_probability: Tensor
    top_ids: Tensor
    top_log_probabilities: Tensor


GOES_ON, NOT_A_NUMBER = -1, -2


class Read(NamedTuple):
    """What a tick says of the tokens of a chunk: ``goes_on [n]``, and their log-probabilities where they are wanted."""

    goes_on: Tensor
    predicted: Any


@dataclass
class Launch:
    """Work that the device has been given, and the answers that will come.

    Attributes:
        decoding: whose rows the logs are, each with the stay in which it was.
        log: what every tick said, on the host once it is ``ready``: ``[ticks, n, …]``.
        chunks: the chunks that were read, each with its sequence's stay and its answer.
        ticks: how many ticks it has.
        failed: what a user's own policy raised, by lane.
    """

    decoding: list[tuple[Sequence, int]]
    ticks: int
    log: Log | None = None
    chunks: list[tuple[Chunk, int, Read]] = field(default_factory=list)
    failed: dict[int, Exception] = field(default_factory=dict)
    ready: Any = None

    def wait(self) -> Log:
        """The log, when it is on the host."""
        if self.ready is not None:
            self.ready.synchronize()
        assert self.log is not None
        return self.log


class Runner:
    """Everything of an engine that lives on the device."""

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
    ):
        self.model, self.method, self.backbone, self.body = model, model.method, model.wrapped, body
        self.device, self.dtype = model.device, model.dtype
        self.passes, self.width = self.method.passes(iterations), self.method.slots_per_token(iterations)
        self.vanishes = self.method.reuse() == "absent"
        self.policies = LanePolicies(lanes + 1, tokens, model.config, self.device)
        self.sampler = SamplerState(lanes + 1, model.config.vocab_size, self.device, eos_ids=eos_ids)
        self.pools = Pools.empty(body.row_shapes(), rows, self.dtype, self.device)
        one = torch.zeros(1, dtype=torch.long, device=self.device)
        first = self.method.start(
            self._rows(one, one, one, one, self._nothing(1), 1), self.backbone.embed(one[:, None])
        )
        self.graphs: Graphs | None = None
        self.lanes = Lanes(lanes, passes=self.passes, tokens=tokens, width=self.width, page_size=page_size, like=first)

    # --- lanes --------------------------------------------------------------------------------------------------

    def admit(self, sequence: Sequence) -> None:
        """A sequence gets its lane: its policy, and the rows that it shares."""
        assert sequence.lane is not None
        request = sequence.request
        self.policies.set(
            sequence.lane,
            sequence.policy,
            request.seed,
            forced_depths(request),
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
                one.lane,
                one.request,
                one.sample,
                one.tokens[: one.prompt_length],
                output_ids=one.tokens[one.prompt_length :],
            )
        last = self.passes - 1
        self.lanes.enter(
            [(one.lane, one.tokens[-1], len(one.tokens) - 1, min(last, one.iterations - 1)) for one in sequences]
        )

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
            self.sampler.clear(lane)
        for sequence in plan.admitted:
            self.admit(sequence)
        if plan.entering:
            self.enter(plan.entering)
        if plan.pages:
            self.lanes.add_pages(plan.pages)
        launch = Launch([(one, one.stay) for one in plan.decoding], plan.ticks)
        features = Features.union({_features(one) for one in plan.decoding})
        seats = [one.lane for one in plan.decoding if one.lane is not None]
        if self.graphs is not None and not plan.chunks and not self.policies.callables():
            launch.log = self.graphs.run(seats, features, plan.longest, plan.ticks)
        else:
            self._run(seats, features, plan, launch)
        if self.device.type == "cuda":
            launch.ready = torch.cuda.Event()
            launch.ready.record()
        return launch

    def _run(self, seats: list[int], features: Features, plan: Plan, launch: Launch) -> None:
        lane, logs = self.as_tensor(seats), []
        for tick in range(plan.ticks):
            log, reads = self.tick(lane, plan.chunks if tick == 0 else (), features, plan.longest)
            logs.append(log)
            for (chunk, _), read in zip(plan.chunks if tick == 0 else (), reads, strict=True):
                predicted = None if read.predicted is None else tuple(_to_host(part) for part in read.predicted)
                launch.chunks.append((chunk, chunk.sequence.stay, Read(_to_host(read.goes_on), predicted)))
            launch.failed |= self.policies.errors
        launch.log = Log(*(_to_host(torch.stack(parts)) for parts in zip(*logs, strict=True)))

    def as_tensor(self, numbers: Any) -> Tensor:
        return torch.tensor(numbers, dtype=torch.long).to(self.device, non_blocking=True)

    def tick(
        self, lane: Tensor, chunks: Many[tuple[Chunk, list[int]]], features: Features, longest: int
    ) -> tuple[Log, list[Read]]:
        """One pass over a row of each of these lanes and over these chunks."""
        lanes, alone = self.lanes, len(lane)
        place, iteration, last = lanes.place[lane], lanes.iteration[lane], lanes.last[lane]
        ids = [lanes.token[lane]]
        states, places, iterations, lasts, owners = [rows_of(lanes.state, lane)], [place], [iteration], [last], [lane]
        pool_rows, cohorts = [lanes.next_rows(lane)], []
        for chunk, rows in chunks:
            part = self._chunk_rows(chunk)
            start = sum(len(one) for one in owners)
            owners.append(part.lane)
            places.append(part.token)
            iterations.append(part.iteration)
            lasts.append(part.last)
            ids.append(part.ids)
            states.append(part.state)
            pool_rows.append(self.as_tensor(rows).view(-1, self.width))
            stop, last_slot = start + len(chunk.tokens), (chunk.tokens[-1] + 1) * self.width - 1
            cohorts.append(
                Cohort(start * self.width, stop * self.width, chunk.sequence.lane, chunk.iteration, last_slot)
            )
        every = TickInput(
            *(torch.cat(parts) for parts in (owners, places, iterations, lasts, ids, pool_rows)), joined(states)
        )
        rows, state, hidden = self._pass(every, alone, tuple(cohorts), longest)
        goes_on = rows.active[:, 0]
        log = self._decoded(rows, rows_of(state, slice(alone)), hidden, goes_on[:alone], features)
        reads = []
        for (chunk, _), cohort in zip(chunks, cohorts, strict=True):
            which = slice(cohort.start // self.width, cohort.stop // self.width)
            chunk.state, chunk.before = rows_of(state, which), hidden[which]
            reads.append(Read(goes_on[which], self._predicted(chunk, hidden[which])))
        return log, reads

    def _pass(
        self, tick: TickInput, alone: int, cohorts: tuple[Cohort, ...], longest: int
    ) -> tuple[TickRows, State, Tensor]:
        """A pass of the backbone and the method's lines after it: (rows, their state for the next pass, hidden)."""
        rows = self._rows(tick.lane, tick.token, tick.iteration, tick.last, tick.state.hidden, alone)
        embedded = self.backbone.embed(tick.ids[:, None])
        state = chosen(
            tick.iteration == 0, self.method.start(rows, embedded)._replace(hidden=tick.state.hidden), tick.state
        )
        slot = (tick.token[:, None] * self.width + torch.arange(self.width, device=self.device)).flatten()
        lane, iteration = (one.repeat_interleave(self.width) for one in (tick.lane, tick.iteration))
        row = tick.row.flatten()
        self.lanes.book(lane, slot, iteration, row, vanishes=self.vanishes)
        ledger = LedgerRows(
            self.lanes.index,
            lane,
            slot,
            iteration,
            row,
            alone * self.width,
            cohorts,
            min(longest, self.lanes.index.shape[2]),
        )
        output = self.body.read(state.input.flatten(0, 1), tick.token.repeat_interleave(self.width), ledger, self.pools)
        grid = (len(tick.lane), self.width, -1)
        state = self.method.receive(rows, state, Pass(output.hidden.view(grid), output.stream.view(grid)))
        hidden = state.hidden
        rows.active = (tick.iteration < tick.last)[:, None]
        if self.passes > 1:
            state = self.method.advance(rows, state)
        return rows, state, hidden

    def _decoded(self, rows: TickRows, state: State, hidden: Tensor, goes_on: Tensor, features: Features) -> Log:
        """What becomes of the rows that decode: the next iteration of their token, or the first one of the next."""
        lanes, alone = self.lanes, rows.alone
        lane, place, iteration = rows.lane[:alone], rows.token[:alone], rows.iteration[:alone]
        said = self.sampler.choose(rows.backbone.decoding_logits(hidden), lane, place, features)
        if features.penalised:
            self.sampler.record(said.token, lane, ~goes_on)
        lanes.token.index_copy_(0, lane, torch.where(goes_on, lanes.token[lane], said.token))
        lanes.place.index_copy_(0, lane, torch.where(goes_on, place, (place + 1).clamp(max=self._last_place())))
        lanes.iteration.index_copy_(0, lane, torch.where(goes_on, iteration + 1, 0))
        store(lanes.state, lane, state._replace(hidden=hidden[:alone]))
        token = torch.where(goes_on, GOES_ON, torch.where(said.bad, NOT_A_NUMBER, said.token))
        wants = place.new_zeros(alone, dtype=torch.float32) if rows.wants is None else rows.wants[:alone, 0].float()
        nothing = wants.new_zeros(alone, 0)
        scored = Scored(wants, nothing, nothing) if said.scored is None else said.scored
        return Log(token, wants, *scored)

    def _last_place(self) -> int:
        return self.lanes.index.shape[2] // self.width - 1

    def _predicted(self, chunk: Chunk, hidden: Tensor) -> Any:
        """What these prompt tokens say of the ones after them, where that was asked for."""
        wanted = chunk.sequence.request.prompt_log_probabilities
        if wanted is None or chunk.sequence.prompt_log_probabilities is None:
            return None
        tokens = chunk.sequence.tokens
        targets = self.as_tensor([tokens[place + 1] for place in chunk.tokens])
        return prompt_log_probabilities(self.backbone.logits(hidden[:, 0]), targets, wanted)

    def _chunk_rows(self, chunk: Chunk) -> TickInput:
        sequence = chunk.sequence
        token = self.as_tensor(chunk.tokens)
        ids = self.as_tensor([sequence.tokens[place] for place in chunk.tokens])
        state = chunk.state
        if state is None:
            state = rows_of(self.lanes.state, torch.full_like(token, self.lanes.nobody))
        return TickInput(
            torch.full_like(token, sequence.lane),
            token,
            torch.full_like(token, chunk.iteration),
            torch.full_like(token, min(self.passes, sequence.iterations) - 1),
            ids,
            token,
            state._replace(hidden=state.hidden if chunk.before is None else chunk.before),
        )

    def survive(self, chunk: Chunk, which: list[int]) -> None:
        """Keeps these tokens of a chunk: those that are read again."""
        if which and len(which) < len(chunk.tokens):
            assert chunk.state is not None
            assert chunk.before is not None
            index = self.as_tensor(which)
            chunk.state, chunk.before = rows_of(chunk.state, index), chunk.before[index]
        chunk.tokens = [chunk.tokens[number] for number in which]

    def _rows(
        self, lane: Tensor, token: Tensor, iteration: Tensor, last: Tensor, before: Tensor, alone: int
    ) -> TickRows:
        return TickRows(
            self.backbone,
            self.policies,
            lane=lane,
            token=token,
            iteration=iteration,
            last=last,
            before=before,
            alone=alone,
            width=self.width,
        )

    def _nothing(self, rows: int) -> Tensor:
        return torch.zeros(rows, 1, self.model.config.hidden_size, dtype=self.dtype, device=self.device)


class TickInput(NamedTuple):
    """The tokens of a tick, ``[n]`` each: lane, place in the sequence, iteration, last iteration, id, pool rows."""

    lane: Tensor
    token: Tensor
    iteration: Tensor
    last: Tensor
    ids: Tensor
    row: Tensor
    state: State


def _features(sequence: Sequence) -> Features:
    """What a sequence needs of the sampler, the likeliest tokens after each iteration included."""
    wanted, features = sequence.request.iteration_top, Features.of(sequence.request)
    if not wanted:
        return features
    both = replace(sequence.request, log_probabilities=max(wanted, sequence.request.log_probabilities or 0))
    return Features.of(both)


def _to_host(values: Tensor) -> Tensor:
    """A copy on the host, which has its values once the stream has come so far."""
    return values.to("cpu", non_blocking=True)
