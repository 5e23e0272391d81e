"""Computes one tick: a pass of the backbone over all rows, the method's update, and sampling.

A tick has one row per decoding lane (with drafting, one per active token of its draft window), followed by the rows of
prefill chunks, sorted by iteration. The rows of a chunk, a *cohort*, share a lane and an iteration; other rows may
differ in both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from adaponder.execution.base import Pass, Rows
from adaponder.halting import Column, Gate, pondered
from adaponder.inference.bodies import Body, Pools
from adaponder.inference.config import EngineShape, eos_ids
from adaponder.inference.drafting import Drafting
from adaponder.inference.lanes import Lanes, join_states, resume_state, select_state, store_state
from adaponder.inference.policies import LanePolicies
from adaponder.inference.sampler import Features, Sampled, SamplerState, Scores, prompt_log_probabilities
from adaponder.inference.sequence import Chunk
from adaponder.methods import State
from adaponder.modeling import AdaPonderForCausalLM
from adaponder.ops.lanes import Begun, begin_rows, book_rows, end_rows, ponder_rows
from adaponder.ops.ledger_attention import Cohort, LedgerRows
from adaponder.ops.precision import widened
from adaponder.ops.row_gates import StackedGates, counter_on, stacked_gates
from adaponder.ops.row_vocabulary import row_expectation, row_logits
from adaponder.ops.vocab_expectation import vocab_expectation
from adaponder.policies import PolicyInput

# The results of a chunk's pass: whether each token continues, bool ``[n]``, and the scores of the next tokens.
ChunkOutput = tuple[Tensor, Scores | None]
# Tensors of one entry per token: lane, position, iteration, last allowed iteration, pool rows, previous hidden states
# (or None).
TickColumns = Sequence[Any]
Gates = Sequence[nn.Module] | nn.ModuleList


class Extras(NamedTuple):
    """Optional outputs of a tick for each decoding lane, ``[n]`` or ``[n, top]``; ``None`` if not requested."""

    gate: Tensor | None = None
    log_probability: Tensor | None = None
    top_ids: Tensor | None = None
    top_log_probabilities: Tensor | None = None


class TickRunner:
    """Holds the state of all lanes on the device and computes ticks, eagerly or under capture by a CUDA graph.

    ``rows`` is the number of pool rows; ``top_k`` replaces the model's ``expectation_top_k``. ``drafts`` holds the
    draft windows of all lanes; ``None`` without drafting.
    """

    def __init__(
        self, model: AdaPonderForCausalLM, body: Body, shape: EngineShape, *, rows: int, top_k: int | None = None
    ):
        self.method, self.backbone, self.body, self.device = model.method, model.wrapped, body, model.device
        self.passes, self.width, self.top_k, self.eos_ids = shape.passes, shape.width, top_k, eos_ids(model)
        self.vanishes = self.method.reuse() == "absent"
        self.policies = LanePolicies(shape.lanes + 1, shape.tokens, model.config.iterations, self.device)
        self.sampler = SamplerState(shape.lanes + 1, model.config.vocab_size, self.device, eos_ids=self.eos_ids)
        self.pools = Pools.empty(body.row_shapes(), rows, model.dtype, self.device)
        self._gates: dict[nn.Module, RowGates] = {}
        self._all_active = torch.ones(pad_lanes(shape.lanes) * shape.window, 1, dtype=torch.bool, device=self.device)
        zero = torch.zeros(1, dtype=torch.long, device=self.device)
        example = TickRows(self, (zero, zero, zero, zero, zero[:, None], None), 1, ())
        self.lanes = Lanes(shape, self.method.start(example, self.backbone.embed(zero[:, None])))
        self._stream: torch.cuda.Stream | None = None
        self.drafts: Drafting | None = None
        if shape.window > 1:
            self.drafts = Drafting(self.lanes.books, size=shape.window, passes=self.passes, vanishes=self.vanishes)

    def new_log(self, ticks: int, lanes: int) -> Tensor:
        """Allocates the log of ``ticks`` ticks, as :func:`end_rows` or :func:`end_windows` writes it."""
        columns = () if self.drafts is None else (2 * self.drafts.size + 1,)
        return torch.zeros(ticks, lanes, *columns, dtype=torch.long, device=self.device)

    def as_tensor(self, numbers: Any) -> Tensor:
        """Copies integers to the device without waiting."""
        return torch.tensor(numbers, dtype=torch.long).to(self.device, non_blocking=True)

    def tick(
        self,
        lane: Tensor,
        chunks: Sequence[Chunk],
        features: Features,
        context: int,
        log: Tensor,
        body: Body | None = None,
    ) -> tuple[Extras, list[ChunkOutput]]:
        """Runs one tick of these lanes and one iteration of these chunks; writes the lanes' tokens into ``log``.

        ``context`` is an upper bound on the slots of the lanes; ``body``, if given, replaces the runner's body.
        """
        lanes, reads_previous = self.lanes, self.policies.reads_previous()
        # Rows: one per decoding lane, or one per active token of its draft window; then those of the chunks.
        if self.drafts is not None and len(lane):
            lane, state_row, begun, _ = self.drafts.begin(lane)
        else:
            state_row, begun = lane, begin_rows(lanes.books, lane, width=self.width, vanishes=self.vanishes)
        num_decode = len(lane)
        inputs, cohorts, ids = [], (), lane[:0]
        if num_decode:
            inputs.append((lane, *begun[1:], lanes.state.hidden[state_row] if reads_previous else None))
        if chunks:
            chunk_input, ids, cohorts = self._chunk_input(chunks, num_decode, reads_previous)
            inputs.append(chunk_input)
        columns = [
            values[0] if len(values) == 1 or values[0] is None else torch.cat(values)
            for values in zip(*inputs, strict=True)
        ]
        rows = TickRows(self, columns, num_decode, cohorts)
        # One pass of the backbone (eq. 1), sampling, and the method's update of each row.
        state = self._start(rows, begun.token, state_row, chunks, ids)
        state = self._pass(body or self.body, rows, state, context)
        hidden = state.hidden
        sampled = self._sample(rows, begun, hidden, features) if num_decode else None
        rows.active = (rows.iteration < rows.last)[:, None]
        if self.passes > 1:
            state = self.method.advance(rows, state)
        state = state._replace(hidden=hidden if reads_previous else None)
        # Halted tokens are replaced by the sampled ones; the states of the others are stored for the next tick.
        extras = Extras()
        if sampled is not None:
            decoded = select_state(state, slice(num_decode))
            extras = self._finish_decode(rows, begun, state_row, decoded, sampled(), features, log)
        return extras, self._finish_chunks(chunks, rows, state, hidden)

    def _chunk_input(
        self, chunks: Sequence[Chunk], num_decode: int, reads_previous: bool
    ) -> tuple[TickColumns, Tensor, tuple[Cohort, ...]]:
        """Returns the prefill part of a tick: its columns, the ids of tokens at iteration 0, and a cohort per chunk."""
        width, counts = self.width, [len(chunk.tokens) for chunk in chunks]
        new_ids = [chunk.sequence.tokens[index] for chunk in chunks if chunk.state is None for index in chunk.tokens]
        of_chunks = [(chunk.sequence.lane_number, chunk.iteration, chunk.sequence.passes - 1) for chunk in chunks]
        numbers = np.zeros((5 + width, sum(counts)), dtype=np.int64)
        numbers[:3] = np.repeat(of_chunks, counts, axis=0).T
        numbers[3] = np.concatenate([chunk.tokens for chunk in chunks])
        numbers[4, : len(new_ids)] = new_ids
        numbers[5:] = np.concatenate([chunk.rows for chunk in chunks]).reshape(-1, width).T
        cohorts, start = [], num_decode * width
        for chunk, (lane, iteration, _), count in zip(chunks, of_chunks, counts, strict=True):
            stop, last_slot = start + count * width, (chunk.tokens[-1] + 1) * width - 1
            cohorts.append(Cohort(start, stop, lane, iteration, last_slot))
            start = stop
        values = torch.from_numpy(numbers)
        if self.device.type == "cuda":  # pinned, so that the host does not wait for a large copy
            values = values.pin_memory().to(self.device, non_blocking=True)
        lanes, iterations, lasts, positions, ids, *pool_rows = values.unbind()
        previous = None
        if reads_previous:
            zeros = torch.zeros_like(self.lanes.state.hidden[:1])
            previous = torch.cat([chunk.hidden(zeros) for chunk in chunks])
        columns = (lanes, positions, iterations, lasts, torch.stack(pool_rows, 1), previous)
        return columns, ids[: len(new_ids)], tuple(cohorts)

    def _start(self, rows: TickRows, token: Tensor, state_row: Tensor, chunks: Sequence[Chunk], ids: Tensor) -> State:
        """Returns the method's state of all rows before the pass: new at iteration 0, else as the last pass left it."""
        embed, states = self.backbone.embed, []
        if rows.num_decode:
            initial = self.method.start(rows, embed(token[:, None]))
            states.append(resume_state(initial, self.lanes.state, state_row, rows.iteration[: rows.num_decode]))
        if len(ids):
            states.append(self.method.start(rows, embed(ids[:, None])))
        states += [chunk.state for chunk in chunks if chunk.state is not None]
        return join_states(states)

    def _pass(self, body: Body, rows: TickRows, state: State, context: int) -> State:
        """Runs one pass of the backbone and returns the method's state after it."""
        width, num_decode, cohorts = self.width, rows.num_decode, rows.cohorts
        lane, slot, iteration, row = rows.lane, rows.position, rows.iteration, rows.row.flatten()
        if width > 1:
            lane, iteration = lane.repeat_interleave(width), iteration.repeat_interleave(width)
            slot = (slot[:, None] * width + torch.arange(width, device=self.device)).flatten()
        if cohorts:
            prefill = slice(num_decode * width, None)
            entries = (values[prefill] for values in (lane, slot, iteration, row))
            book_rows(self.lanes.index, *entries, vanishes=self.vanishes)
        context = min(context, self.lanes.index.shape[2])
        ledger = LedgerRows(self.lanes.index, lane, slot, iteration, row, num_decode * width, cohorts, context)
        position = rows.position if width == 1 else rows.position.repeat_interleave(width)
        output = body.forward(state.input.flatten(0, 1), position, ledger, self.pools)
        grid = (len(rows.lane), width, -1)
        return self.method.receive(rows, state, Pass(output.hidden.view(grid), output.stream.view(grid)))

    def _sample(self, rows: TickRows, begun: Begun, hidden: Tensor, features: Features) -> Callable[[], Sampled]:
        """Starts sampling the next token of each decoding row; returns a function that waits for the result.

        In a CUDA graph, sampling is a branch parallel to the method's update, because with few rows neither fills the
        GPU.
        """
        logits = rows.backbone.decode_logits(hidden)
        inputs = logits, rows.lane[: rows.num_decode], begun.place, features
        capturing = logits.is_cuda and torch.cuda.is_current_stream_capturing()
        if self.passes == 1 or not capturing:
            sampled = self.sampler.choose(*inputs)
            return lambda: sampled
        main, branch = torch.cuda.current_stream(), self._sampling_stream()
        branch.wait_stream(main)
        with torch.cuda.stream(branch):
            sampled = self.sampler.choose(*inputs)

        def join() -> Sampled:
            main.wait_stream(branch)
            return sampled

        return join

    def _sampling_stream(self) -> torch.cuda.Stream:
        """Returns the one stream in which all graphs sample: the allocator reuses memory only within a stream."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)
        return self._stream

    def _finish_decode(
        self,
        rows: TickRows,
        begun: Begun,
        state_row: Tensor,
        state: State,
        sampled: Sampled,
        features: Features,
        log: Tensor,
    ) -> Extras:
        """Advances each decoding lane to its token's next iteration or, if the token halted, to the sampled token."""
        lanes, num_decode = self.lanes, rows.num_decode
        lane, active = rows.lane[:num_decode], rows.active[:num_decode, 0]
        if features.penalised:
            self.sampler.record(sampled.token, lane, ~active)
        if self.drafts is not None:
            self.drafts.end(active, sampled.token, sampled.bad, log)
        else:
            end_rows(lanes.books, lane, begun, active, sampled.token, sampled.bad, log, max_tokens=lanes.tokens)
        store_state(lanes.state, state_row, state)
        gate = rows.gate_output[:num_decode, 0].float() if features.gates and rows.gate_output is not None else None
        outputs = (gate, *(sampled.scores or (None, None, None)))
        if self.drafts is not None:
            outputs = tuple(None if values is None else self.drafts.spread(values) for values in outputs)
        return Extras(*outputs)

    def _finish_chunks(
        self, chunks: Sequence[Chunk], rows: TickRows, state: State, hidden: Tensor
    ) -> list[ChunkOutput]:
        """Stores the chunks' new states and returns their results."""
        if not chunks:
            return []
        active, outputs = to_host(rows.active[rows.num_decode :, 0]), []
        for chunk, cohort in zip(chunks, rows.cohorts, strict=True):
            start, stop = cohort.start // self.width, cohort.stop // self.width
            span, sequence, scores = slice(start, stop), chunk.sequence, None
            chunk.state = select_state(state, span)
            top = sequence.request.prompt_log_probabilities
            if top is not None:
                targets = self.as_tensor([sequence.tokens[index + 1] for index in chunk.tokens])
                logits = self.backbone.logits(hidden[span][:, 0])
                scores = Scores(*map(to_host, prompt_log_probabilities(logits, targets, top)))
            outputs.append((active[start - rows.num_decode : stop - rows.num_decode], scores))
        return outputs

    def all_active(self, rows: int) -> Tensor:
        """Returns a mask that is True for all rows, ``[rows, 1]``."""
        if rows <= len(self._all_active):
            return self._all_active[:rows]
        return torch.ones(rows, 1, dtype=torch.bool, device=self.device)

    def row_gates(self, gates: Gates) -> RowGates:
        """Returns the :class:`RowGates` of these gates, built at the first call."""
        if gates[0] not in self._gates:
            self._gates[gates[0]] = RowGates(gates)
        return self._gates[gates[0]]


class TickRows(Rows):
    """The rows of a tick in the shapes that methods read: ``[n, 1]`` per token and ``[n, width, d]`` per slot.

    ``n`` is the number of tokens in the tick, ``width`` the number of slots per token.

    Attributes:
        last: the last allowed iteration of each token.
        row: the KV pool rows of each token, ``[n, width]``.
        previous: the hidden states of the previous iteration, if a policy reads them.
        num_decode: the number of decoding tokens; they precede the prefill tokens.
        cohorts: the prefill chunks, as ranges of rows that share lane and iteration.
        gate_output: the gate values, ``[n, 1]``, if the method evaluated gates.
    """

    def __init__(self, runner: TickRunner, columns: TickColumns, num_decode: int, cohorts: tuple[Cohort, ...]):
        self.lane, self.position, self.iteration, self.last, self.row, self.previous = columns
        self.num_decode, self.cohorts = num_decode, cohorts
        self.slots_per_token = runner.width
        self.runner = runner
        self.backbone: Any = TickHead(runner, self)
        self.active = runner.all_active(len(self.lane))
        self.gate_output: Tensor | None = None

    def map(self, function: Callable[[Tensor], Tensor], values: Tensor) -> Tensor:
        return function(values)

    def gate(self, gates: Gates, values: Tensor) -> Tensor:
        num_decode, logits = self.num_decode, []
        if num_decode:
            logits.append(self.runner.row_gates(gates)(values[:num_decode], self.iteration[:num_decode, None]))
        for iteration, group in groupby(self.cohorts, key=lambda cohort: cohort.iteration):
            cohorts = list(group)
            rows = slice(cohorts[0].start // self.slots_per_token, cohorts[-1].stop // self.slots_per_token)
            logits.append(gates[min(iteration, len(gates) - 1)](values[rows]))
        return logits[0] if len(logits) == 1 else torch.cat([values.to(logits[0].dtype) for values in logits])

    def decide(self, gate: Tensor, hidden: Tensor) -> None:
        self.gate_output = gate
        rows = PolicyInput(
            iteration=self.iteration[:, None],
            gate=gate,
            hidden=hidden,
            position=self.position[:, None],
            seed=self.lane[:, None],  # ignored: LanePolicies has each lane's seed
            sequence=self.lane[:, None],
            slot=self.position[:, None],
            active=self.active,
            head=self.backbone.logits,
            previous=self.previous if self.runner.policies.reads_previous() else None,
        )
        self.active = self.active & self.runner.policies(rows)

    def freeze(self, new: Tensor, old: Tensor | None) -> Tensor:
        return new  # a tick has no halted rows

    def after_first(self, first: Tensor, later: Callable[[], Tensor]) -> Tensor:
        return torch.where((self.iteration == 0)[:, None, None], first, later())

    def compiled(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return ponder_rows if function is pondered else function


class TickHead:
    """The backbone's embedding and head in a tick; computes the logits of decoding rows only once."""

    def __init__(self, runner: TickRunner, rows: TickRows):
        self._backbone, self._top_k, self._rows = runner.backbone, runner.top_k, rows
        self._hidden: Tensor | None = None
        self._logits: Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backbone, name)

    def decode_logits(self, hidden: Tensor) -> Tensor:
        """Returns the logits of the decoding rows, ``[num_decode, vocabulary]``."""
        if self._logits is None or hidden is not self._hidden:
            weight, bias = self._backbone.head()
            self._hidden, self._logits = hidden, row_logits(hidden[: self._rows.num_decode, 0], weight, bias=bias)
        return self._logits

    def expected_embedding(
        self, hidden: Tensor, *, scale: float, top_k: int | None = None, keep_logits: bool = False
    ) -> Tensor:
        """Equals :meth:`Backbone.expected_embedding`, except that halted decoding rows get zeros.

        Decoding rows share their logits with sampling. The engine's ``top_k``, if set, overrides the argument.
        """
        num_decode, expected, table = self._rows.num_decode, [], self._backbone.table()
        top_k = top_k if self._top_k is None else self._top_k
        if num_decode:
            active = self._rows.active[:num_decode, 0]
            logits = self.decode_logits(hidden)
            expected.append(row_expectation(logits, table, active, scale=scale, top_k=top_k)[:, None])
        if num_decode < len(hidden):
            weight, bias = self._backbone.head()
            expected.append(vocab_expectation(hidden[num_decode:], weight, table, bias=bias, top_k=top_k) * scale)
        return expected[0] if len(expected) == 1 else torch.cat(expected)


class RowGates:
    """Evaluates for each row the gate of its iteration; the last gate also serves all later iterations.

    The weights of plain gates are copied into stacked tensors for one kernel; other gate modules are each called on all
    rows. Calls share a counter on the device, so they must run on one stream.
    """

    def __init__(self, gates: Gates):
        self.gates = gates
        self.stacked = stack_gates(gates)
        self.counter: Tensor | None = None

    def __call__(self, hidden: Tensor, iteration: Tensor) -> Tensor:
        """Returns the gate logit of each row, ``[n, …]``, for ``hidden [n, …, d]`` and ``iteration [n, …]``."""
        rows, flat_iteration = hidden.reshape(-1, hidden.shape[-1]), iteration.reshape(-1)
        if self.stacked is None:
            logits = torch.stack([gate(rows) for gate in self.gates], dim=-1)
            gate = flat_iteration.clamp(max=len(self.gates) - 1)
            return logits.gather(-1, gate[:, None]).squeeze(-1).reshape(iteration.shape)
        if self.counter is None:
            self.counter = counter_on(rows.device)
        return stacked_gates(self.stacked, rows, flat_iteration, counter=self.counter).reshape(iteration.shape)


def stack_gates(gates: Gates) -> StackedGates | None:
    """Stacks the gates' weights; returns ``None`` unless all are plain :class:`adaponder.halting.Gate` modules."""
    plain = [gate for gate in gates if type(gate) is Gate and type(gate.out) is Column]
    shapes = {gate.out.weight.shape for gate in plain}
    kinds = {type(gate.inner) for gate in plain}
    if len(plain) != len(gates) or len(shapes) != 1 or kinds not in ({nn.Linear}, {type(None)}):
        return None
    inner = [gate.inner for gate in plain if gate.inner is not None]
    with torch.no_grad():
        return StackedGates(
            torch.stack([layer.weight for layer in inner]) if inner else None,
            torch.stack([layer.bias for layer in inner]) if inner else None,
            widened(torch.stack([gate.out.weight[0] for gate in plain])),
            widened(torch.stack([gate.out.bias[0] for gate in plain])),
        )


def pad_lanes(rows: int) -> int:
    """Rounds a number of decode rows up to the nearest captured graph size."""
    if rows <= 8:
        return 1 << (rows - 1).bit_length()
    step = 8 if rows <= 64 else 16 if rows <= 128 else 32
    return -(-rows // step) * step


def to_host(values: Tensor) -> Tensor:
    """Copies to the host without waiting; the values are valid once the stream has completed the copy."""
    return values.to("cpu", non_blocking=True)
