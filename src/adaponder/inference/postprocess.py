"""Turns the results of a launch into tokens, depths, cached prefixes and finished sequences."""

from __future__ import annotations

from copy import copy

from adaponder.inference.outputs import Event, FinishReason, PromptToken, Token, TopTokens
from adaponder.inference.runner import Launch, Runner
from adaponder.inference.sampler import Scores
from adaponder.inference.scheduler import Scheduler
from adaponder.inference.sequence import FINISHED, Chunk, Sequence, TokenProgress
from adaponder.inference.tick import Extras
from adaponder.ops.lanes import GOES_ON, NOT_A_NUMBER

# Where the results of a row are in a launch's log: (tick, column).
Entry = tuple[int, int]


class Postprocessor:
    """Updates the host's view of each sequence, finishes sequences, and counts ticks, rows and tokens.

    ``counts["drafted"]`` is the number of tokens started as drafts, ``counts["accepted"]`` the number accepted.
    """

    def __init__(self, runner: Runner, scheduler: Scheduler):
        self.runner, self.scheduler, self.prefixes = runner, scheduler, scheduler.prefixes
        self.counts = dict.fromkeys(("ticks", "rows", "tokens", "drafted", "accepted"), 0)

    def process(self, launch: Launch) -> list[Event]:
        """Waits for a launch, processes its results and returns the new events."""
        tokens, extras = launch.wait()
        events: list[Event] = []
        self.counts["ticks"] += launch.ticks
        for sequence, error in launch.failed.items():
            if sequence.state != FINISHED:
                events.append(self.finish(sequence, "error", error=f"policy: {type(error).__name__}: {error}"))
        results = tokens.transpose(0, 1).tolist()  # by lane
        process = self._decode if self.runner.drafts is None else self._decode_window
        # Results of sequences that have finished or been preempted since the launch are dropped.
        for column, (sequence, kv) in enumerate(launch.decoding):
            if sequence.kv is kv:
                process(sequence, results[column], extras, column, events)
        for chunk, active, scores in launch.chunks:
            if chunk in chunk.sequence.chunks:
                self._prefill(chunk, active.tolist(), scores)
        return events

    def _decode(self, sequence: Sequence, tokens: list[int], extras: Extras, column: int, events: list[Event]) -> None:
        """Processes a sequence's log: for each tick the id of the next token, or ``GOES_ON`` if the token continues."""
        rows = len(tokens) * self.runner.width
        sequence.kv.in_flight -= rows
        sequence.kv.decode.used += rows
        self.counts["rows"] += rows
        progress = sequence.window.pop(0, None) or TokenProgress()
        for tick, token_id in enumerate(tokens):
            self._record_iteration(sequence, progress, extras, (tick, column))
            if token_id == GOES_ON:
                continue
            if self._append(sequence, self._token(sequence, progress, token_id, extras, (tick, column)), events):
                return
            progress = TokenProgress()
        sequence.window[0] = progress

    def _decode_window(
        self, sequence: Sequence, lines: list[list[int]], extras: Extras, column: int, events: list[Event]
    ) -> None:
        """Processes the log of a sequence's draft window, one line per tick, and appends the accepted tokens."""
        assert self.runner.drafts is not None
        size, window, completion = self.runner.drafts.size, sequence.window, sequence.completion
        sequence.kv.in_flight -= len(lines)
        for tick, line in enumerate(lines):
            front = len(sequence.tokens) - 1
            for place, (token_id, iteration) in enumerate(zip(line[:size], line[size:-1], strict=True)):
                if iteration < 0:
                    continue
                if iteration == 0:
                    window[place] = TokenProgress(drafted=(place - front) % size > 0)
                    self.counts["drafted"] += window[place].drafted
                self.counts["rows"] += 1
                completion.dropped_rows += 1
                progress, entry = window[place], (tick, column * size + place)
                self._record_iteration(sequence, progress, extras, entry)
                progress.token = self._token(sequence, progress, token_id, extras, entry)
            for position in range(front, front + line[-1]):
                progress = window[position % size]
                assert progress.token is not None
                self.counts["accepted"] += progress.drafted
                sequence.kv.decode.used += self.runner.passes
                completion.dropped_rows -= progress.token.depth
                if self._append(sequence, progress.token, events):
                    return

    def _record_iteration(self, sequence: Sequence, progress: TokenProgress, extras: Extras, entry: Entry) -> None:
        """Records one completed iteration of a token (gates, top tokens)."""
        request = sequence.request
        progress.iterations += 1
        if request.gates and extras.gate is not None and progress.iterations < sequence.iterations:
            progress.gates.append(float(extras.gate[entry]))
        if request.iteration_top:
            progress.top.append(_top_tokens(extras, entry, request.iteration_top))

    def _token(self, sequence: Sequence, progress: TokenProgress, token_id: int, extras: Extras, entry: Entry) -> Token:
        """Builds the :class:`Token` sampled after the current token's latest iteration, with the requested outputs."""
        depth, count = progress.iterations * self.runner.width, sequence.request.log_probabilities
        score, top = None, ()
        if count is not None and extras.log_probability is not None:
            score, top = float(extras.log_probability[entry]), _top_tokens(extras, entry, count)
        return Token(token_id, depth, score, top, tuple(progress.gates), tuple(progress.top))

    def _append(self, sequence: Sequence, token: Token, events: list[Event]) -> bool:
        """Appends a generated token; returns whether the sequence has finished."""
        request = sequence.request
        if token.id == NOT_A_NUMBER:
            error = (
                f"the model's logits are NaN after {len(sequence.tokens)} tokens: its weights are damaged, or it "
                "overflows in this precision"
            )
            events.append(self.finish(sequence, "error", error=error))
            return True
        sequence.set_depth([len(sequence.tokens) - 1], token.depth)
        self.scheduler.record_depth(sequence.submission.kind, 1, token.depth // self.runner.width)
        sequence.tokens.append(token.id)
        sequence.completion.tokens.append(token)
        self.counts["tokens"] += 1
        events.append(Event(*sequence.order, token))
        if token.id in request.stop_ids or (token.id in self.runner.eos_ids and not request.ignore_eos):
            events.append(self.finish(sequence, "stop", stop_id=token.id))
        elif not sequence.num_remaining:
            events.append(self.finish(sequence, "length"))
        return sequence.state == FINISHED

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
            return  # sharing is disabled, or the prompt came from another sample, which has cached it
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


def _top_tokens(extras: Extras, entry: Entry, count: int) -> TopTokens:
    if not count or extras.top_ids is None or extras.top_log_probabilities is None:
        return ()
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
