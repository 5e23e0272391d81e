"""Turns the results of a launch (one or more ticks) into tokens, depths, cached prefixes and finished sequences."""

from __future__ import annotations

from collections.abc import Collection
from copy import copy
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np

from adaponder.inference.outputs import Event, FinishReason, PromptToken, Token, TopTokens
from adaponder.inference.runner import Launch, Runner
from adaponder.inference.sampler import Scores
from adaponder.inference.scheduler import Scheduler
from adaponder.inference.sequence import FINISHED, Chunk, Sequence
from adaponder.inference.tick import Extras
from adaponder.ops.lanes import GOES_ON, NOT_A_NUMBER

# A sequence's log of draft windows: by tick and window entry, the sampled ids and the iterations; by tick, the number
# of accepted tokens (see :func:`end_windows <adaponder.ops.lanes.end_windows>`).
WindowLog = tuple[list[int], list[int], list[int]]


class NewTokens(NamedTuple):
    """New tokens of a sequence.

    ``entries`` has for each token the row that sampled it, as ``tick * window + i``: row ``i`` of the sequence's draft
    window (0 without drafting) in tick ``tick`` of the launch; ticks of earlier launches are negative.
    """

    ids: list[int]
    depths: list[int]
    entries: list[int]


class Postprocessor:
    """Updates the host's view of each sequence, finishes sequences, and counts ticks, rows and tokens.

    ``counts["drafted"]`` counts tokens started as drafts, ``counts["accepted"]`` the accepted ones.
    """

    def __init__(self, runner: Runner, scheduler: Scheduler):
        self.runner, self.scheduler, self.prefixes = runner, scheduler, scheduler.prefixes
        self.window = 1 if runner.drafts is None else runner.drafts.size
        self.counts = dict.fromkeys(("ticks", "rows", "tokens", "drafted", "accepted"), 0)

    def process(self, launch: Launch) -> list[Event]:
        """Waits for a launch, processes its results and returns the new events."""
        values, outputs = launch.wait()
        events: list[Event] = []
        self.counts["ticks"] += launch.ticks
        for sequence, error in launch.failed.items():
            if sequence.state != FINISHED:
                events.append(self.finish(sequence, "error", error=f"policy: {type(error).__name__}: {error}"))
        arrays: list[Any] = [None if output is None else output.numpy() for output in outputs]
        extras, by_lane, drafts = Extras(*arrays), values.numpy().swapaxes(0, 1), self.window > 1
        logs: Any = _split(by_lane, self.window) if drafts else by_lane.tolist()
        read = self._read_window if drafts else self._read
        # Results of sequences that have finished or been preempted since the launch are dropped.
        for column, (sequence, kv) in enumerate(launch.decoding):
            if sequence.kv is kv:
                kv.in_flight -= launch.ticks * self.runner.width
                ends = sequence.submission.stop_ids
                if not sequence.request.ignore_eos:
                    ends = ends.union(self.runner.eos_ids)
                new = read(sequence, logs[column], ends)
                if tokens := self._tokens(sequence, new, extras, column, launch.ticks):
                    self._append(sequence, tokens, ends, events)
        for chunk, active, scores in launch.chunks:
            if chunk in chunk.sequence.chunks:
                self._prefill(chunk, active.tolist(), scores)
        return events

    def _read(self, sequence: Sequence, log: list[int], ends: Collection[int]) -> NewTokens:
        """Returns new tokens, up to a token that ends the sequence; ``log`` has a token id or ``GOES_ON`` per tick."""
        start, remaining, width = -sequence.num_iterations, sequence.num_remaining, self.runner.width
        sequence.kv.decode.used += len(log) * width
        self.counts["rows"] += len(log) * width
        ids, depths, entries = new = NewTokens([], [], [])
        for tick, token_id in enumerate(log):
            if token_id == GOES_ON:
                continue
            ids.append(token_id)
            depths.append((tick + 1 - start) * width)
            entries.append(tick)
            start = tick + 1
            if token_id in ends or len(ids) == remaining:
                break
        sequence.num_iterations = len(log) - start
        return new

    def _read_window(self, sequence: Sequence, log: WindowLog, ends: Collection[int]) -> NewTokens:
        """Returns the new tokens of a sequence with a draft window, up to a token that ends the sequence."""
        size, front, remaining = self.window, len(sequence.tokens) - 1, sequence.num_remaining
        # The log from the earliest tick in which a token of the window may have started; ``first`` is the first new
        # tick.
        choices, iterations, counts = (past + new for past, new in zip(sequence.window, log, strict=True))
        first = stop = len(sequence.window[2])
        # The last tick that accepted a token: the next token was a draft if it started in that tick or earlier.
        latest = max((tick for tick in range(first) if counts[tick]), default=-1)
        # Tokens that started as the first of the window, hence not as drafts; and the number of accepted drafts.
        certain, accepted = int(iterations[first * size + front % size] == 0), 0
        ids, depths, entries = new = NewTokens([], [], [])
        for tick, count in enumerate(counts[first:], first):
            stop += 1
            for _ in range(count):
                entry = tick * size + front % size
                while iterations[entry] < 0:  # it halted in an earlier tick, before a token in front of it
                    entry -= size
                token_id, depth = choices[entry], iterations[entry] + 1
                ids.append(token_id)
                depths.append(depth)
                entries.append(entry - first * size)
                accepted += entry // size - depth < latest
                latest, front = tick, front + 1
                if token_id in ends or len(ids) == remaining:
                    break
            else:
                if count and stop < len(counts):
                    certain += iterations[stop * size + front % size] == 0
                continue
            break
        computed = iterations[first * size : stop * size]
        rows = len(computed) - computed.count(-1)
        self.counts["rows"] += rows
        self.counts["drafted"] += computed.count(0) - certain
        self.counts["accepted"] += accepted
        sequence.kv.decode.used += self.runner.passes * len(ids)
        sequence.completion.dropped_rows += rows - sum(depths)
        ticks = self.runner.passes - 1  # a token leaves the window at most this many ticks after it started
        sequence.window = choices[-ticks * size :], iterations[-ticks * size :], counts[-ticks:]
        return new

    def _tokens(self, sequence: Sequence, new: NewTokens, extras: Extras, column: int, ticks: int) -> list[Token]:
        """Builds the new tokens with the outputs that their request asks for."""
        request, width = sequence.request, self.runner.width
        if not (request.gates or request.iteration_top or request.log_probabilities is not None):
            return list(map(Token, new.ids, new.depths))
        first, row, tokens = len(sequence.extras), column * self.window, []
        history = sequence.extras + [(extras, tick, row) for tick in range(ticks)]
        for token_id, depth, entry in zip(*new, strict=True):
            stop, offset = first + entry // self.window + 1, entry % self.window
            rows = [(values, (tick, row + offset)) for values, tick, row in history[stop - depth // width : stop]]
            tokens.append(_token_with_outputs(sequence, token_id, depth, rows))
        sequence.extras = history[-self.runner.passes :]
        return tokens

    def _append(self, sequence: Sequence, tokens: list[Token], ends: Collection[int], events: list[Event]) -> None:
        """Appends generated tokens to a sequence, and finishes the sequence if the last token ends it."""
        last = tokens[-1].id
        if last == NOT_A_NUMBER:
            tokens.pop()
        depths = [token.depth for token in tokens]
        self.scheduler.record_depth(sequence.submission.kind, len(tokens), sum(depths) // self.runner.width)
        sequence.depths += depths
        sequence.tokens += [token.id for token in tokens]
        sequence.completion.tokens += tokens
        self.counts["tokens"] += len(tokens)
        events += map(Event, repeat(sequence.order[0]), repeat(sequence.sample), tokens)
        if last == NOT_A_NUMBER:
            error = (
                f"the model's logits are NaN after {len(sequence.tokens)} tokens: its weights are damaged, or it "
                "overflows in this precision"
            )
            events.append(self.finish(sequence, "error", error=error))
        elif last in ends:
            events.append(self.finish(sequence, "stop", stop_id=last))
        elif not sequence.num_remaining:
            events.append(self.finish(sequence, "length"))

    def _prefill(self, chunk: Chunk, active: list[bool], scores: Scores | None) -> None:
        """Processes one iteration of a chunk: records the depths of halted tokens and removes them from the chunk."""
        sequence, iterations = chunk.sequence, chunk.iteration + 1
        halted = [index for index, continues in zip(chunk.tokens, active, strict=True) if not continues]
        sequence.set_depth(halted, iterations * self.runner.width)
        self.counts["rows"] += len(chunk.tokens) * self.runner.width
        self.scheduler.record_depth(sequence.submission.kind, len(halted), len(halted) * iterations)
        if scores is not None:
            _record_scores(sequence, chunk, active, scores)
        chunk.keep([number for number, continues in enumerate(active) if continues])
        chunk.in_flight, chunk.iteration = False, iterations
        if not chunk.tokens:
            sequence.chunks.remove(chunk)
        if sequence.prefilled:
            self._share_prompt(sequence)

    def _share_prompt(self, sequence: Sequence) -> None:
        """Shares a prefilled prompt with the request's other samples and adds it to the prefix cache."""
        stop, namespace = sequence.num_prefill, sequence.submission.namespace
        for sample in sequence.waiting_samples():
            pages = frozenset(sequence.kv.pages())
            self.prefixes.pages.hold(pages)
            sample.kv.shared = [self.runner.span(sequence, 0, stop, pages)]
            sample.completion.prompt_log_probabilities = copy(sequence.completion.prompt_log_probabilities)
        size, num_cached = self.prefixes.size, sequence.kv.num_cached
        spans = [span for span in sequence.kv.shared if len(span.depths) == size]
        if namespace is None or num_cached != len(spans) * size:
            return  # sharing is disabled, or another sample shared the prompt and has already cached it
        pages = sequence.kv.pages_by_block(size)
        spans += [
            self.runner.span(sequence, start, start + size, pages[start // size])
            for start in range(num_cached, stop - size + 1, size)
        ]
        self.prefixes.add(namespace, sequence.tokens, spans)

    def finish(
        self, sequence: Sequence, reason: FinishReason, *, stop_id: int | None = None, error: str | None = None
    ) -> Event:
        """Finishes a sequence, frees its lane and pages, and returns its final event."""
        for sample in sequence.waiting_samples():
            sample.leader = None  # the sample prefills the prompt itself, or finds it in the prefix cache
        self.scheduler.remove(sequence)
        return sequence.final_event(reason, stop_id=stop_id, error=error)


def _split(log: np.ndarray, size: int) -> list[WindowLog]:
    """Splits the log of all draft windows, ``[lanes, ticks, 2 * size + 1]``, into one log per lane."""
    lanes, ticks, _ = log.shape
    columns = np.split(log, (size, 2 * size), axis=2)
    flat = (values.reshape(lanes, ticks * values.shape[2]).tolist() for values in columns)
    return list(zip(*flat, strict=True))


def _token_with_outputs(
    sequence: Sequence, token_id: int, depth: int, rows: list[tuple[Any, tuple[int, int]]]
) -> Token:
    """Builds a token with the outputs that its request asks for.

    ``rows`` has for each iteration of the preceding token the launch's extras and the index of that row in them.
    """
    request, score, top, gates, iteration_top = sequence.request, None, (), (), ()
    extras, row = rows[-1]
    if request.log_probabilities is not None:
        score, top = float(extras.log_probability[row]), _top_tokens(extras, row, request.log_probabilities)
    if request.gates and extras.gate is not None:
        gates = tuple(float(extras.gate[row]) for extras, row in rows[: sequence.iterations - 1])
    if request.iteration_top:
        iteration_top = tuple(_top_tokens(extras, row, request.iteration_top) for extras, row in rows)
    return Token(token_id, depth, score, top, gates, iteration_top)


def _top_tokens(extras: Any, entry: tuple[int, int], count: int) -> TopTokens:
    ids, values = extras.top_ids[entry][:count], extras.top_log_probabilities[entry][:count]
    return tuple(zip(ids.tolist(), values.tolist(), strict=True))


def _record_scores(sequence: Sequence, chunk: Chunk, active: list[bool], scores: Scores) -> None:
    """Records the log-probability of each prompt token whose preceding token has halted."""
    log_probability, ids, values = (column.tolist() for column in scores)
    prompt = sequence.completion.prompt_log_probabilities
    assert prompt is not None
    for number, index in enumerate(chunk.tokens):
        if not active[number] and index + 1 < len(prompt):  # a preempted sequence also prefills generated tokens
            top = tuple(zip(ids[number], values[number], strict=True))
            prompt[index + 1] = PromptToken(sequence.tokens[index + 1], log_probability[number], top)
