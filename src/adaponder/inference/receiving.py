"""What the device said of a launch, turned into tokens, depths and finished requests."""

from __future__ import annotations

from collections.abc import Sequence as Many
from copy import copy
from typing import Any

from adaponder.inference.launches import Extras, Launch
from adaponder.inference.outputs import Completion, Event, FinishReason, PromptToken, Token, TopTokens
from adaponder.inference.prefixes import Prefixes, Span
from adaponder.inference.prompts import Read
from adaponder.inference.runner import Runner
from adaponder.inference.scheduler import Scheduler
from adaponder.inference.sequence import FINISHED, Chunk, Sequence
from adaponder.ops.lane_books import GOES_ON, NOT_A_NUMBER


class Receiver:
    """Keeps the host's knowledge of each sequence; ends those that are finished."""

    def __init__(self, runner: Runner, scheduler: Scheduler, prefixes: Prefixes, eos_ids: frozenset[int]):
        self.runner, self.scheduler, self.prefixes, self.eos_ids = runner, scheduler, prefixes, eos_ids
        self.tokens = self.rows = self.ticks = 0

    def receive(self, launch: Launch) -> list[Event]:
        logs = launch.wait()
        events: list[Event] = []
        self.ticks += launch.ticks
        self._fail(launch, events)
        said = logs.token.transpose(0, 1).tolist()  # by lane
        for number, (sequence, stay) in enumerate(launch.decoding):
            if sequence.stay == stay and sequence.state != FINISHED:
                if self.runner.drafts is not None:
                    self.runner.drafts.receive(self, sequence, said[number], logs.extras, number, events)
                else:
                    self._decoded(sequence, said[number], logs.extras, number, events)
        for chunk, stay, read in launch.chunks:
            if chunk.sequence.stay == stay and chunk.sequence.state != FINISHED:
                self._read(chunk, read)
        return events

    def _fail(self, launch: Launch, events: list[Event]) -> None:
        """A policy of the user's that raised ends its own request and no other."""
        if not launch.failed:
            return
        involved = [*launch.decoding, *((chunk.sequence, stay) for chunk, stay, _ in launch.chunks)]
        for sequence, stay in involved:
            if sequence.stay == stay and sequence.lane in launch.failed and sequence.state != FINISHED:
                error = launch.failed[sequence.lane]
                events.append(self.end(sequence, "error", error=f"policy: {type(error).__name__}: {error}"))

    # --- decoding -----------------------------------------------------------------------------------------------

    def _decoded(self, sequence: Sequence, tokens: list[int], extras: Extras, number: int, events: list[Event]) -> None:
        rows = len(tokens) * self.runner.width
        sequence.ahead -= rows
        sequence.rows.used += rows
        self.rows += rows
        for tick, said in enumerate(tokens):
            self.listen(sequence, extras, tick, number)
            if said == GOES_ON:
                continue
            if self.settle(sequence, self.token(sequence, said, extras, tick, number), events):
                return

    def listen(self, sequence: Sequence, extras: Extras, tick: int, number: int) -> None:
        """One more iteration of the token that is being read is known."""
        request = sequence.request
        sequence.reading += 1
        if request.gates and extras.gate is not None and sequence.reading < sequence.iterations:
            sequence.gates.append(float(extras.gate[tick, number]))
        if request.iteration_top:
            sequence.iteration_top.append(_top(extras, tick, number, request.iteration_top))

    def settle(self, sequence: Sequence, token: Token, events: list[Event]) -> bool:
        """The token that was read has halted, and said which one comes next; whether the sequence ends with that."""
        if token.id == NOT_A_NUMBER:
            error = (
                f"after {len(sequence.tokens)} tokens the model's logits are NaN: its weights are damaged, or it "
                "overflows in this precision"
            )
            events.append(self.end(sequence, "error", error=error))
            return True
        self._take(sequence, token)
        events.append(Event(sequence.request_number, sequence.sample, token))
        if self._ends(sequence, token.id):
            events.append(self.end(sequence, "stop", stop_id=token.id))
        elif not sequence.left:
            events.append(self.end(sequence, "length"))
        return sequence.state == FINISHED

    def token(self, sequence: Sequence, said: int, extras: Extras, tick: int, number: int) -> Token:
        request = sequence.request
        if request.log_probabilities is None and not request.gates and not request.iteration_top:
            return Token(said, sequence.reading * self.runner.width)
        wanted = request.log_probabilities
        return Token(
            said,
            sequence.reading * self.runner.width,
            None if wanted is None or extras.log_probability is None else float(extras.log_probability[tick, number]),
            _top(extras, tick, number, wanted or 0),
            tuple(sequence.gates),
            tuple(sequence.iteration_top),
        )

    def _take(self, sequence: Sequence, token: Token) -> None:
        sequence.set_depth([len(sequence.tokens) - 1], token.depth)
        self.scheduler.saw_depth(sequence.kind, 1, sequence.reading)
        sequence.tokens.append(token.id)
        sequence.generated.append(token)
        sequence.reading, sequence.gates, sequence.iteration_top = 0, [], []
        self.tokens += 1

    def _ends(self, sequence: Sequence, token: int) -> bool:
        request = sequence.request
        return token in request.stop_ids or (token in self.eos_ids and not request.ignore_eos)

    # --- prompts ------------------------------------------------------------------------------------------------

    def _read(self, chunk: Chunk, read: Read) -> None:
        sequence, goes_on = chunk.sequence, read.goes_on.tolist()
        halted = [place for place, on in zip(chunk.tokens, goes_on, strict=True) if not on]
        sequence.set_depth(halted, (chunk.iteration + 1) * self.runner.width)
        self.rows += len(chunk.tokens) * self.runner.width
        self.scheduler.saw_depth(sequence.kind, len(halted), len(halted) * (chunk.iteration + 1))
        if read.predicted is not None:
            _note(sequence, chunk, goes_on, read.predicted)
        self.runner.survive(chunk, [number for number, on in enumerate(goes_on) if on])
        chunk.in_flight, chunk.iteration = False, chunk.iteration + 1
        if not chunk.tokens:
            sequence.chunks.remove(chunk)
        if sequence.prefilled:
            self._share(sequence)

    def _share(self, sequence: Sequence) -> None:
        """The prompt is read: other samples of the request, and later requests, need not read it again."""
        stop = sequence.to_prefill
        for other in sequence.waiting_samples():
            pages = frozenset(sequence.pages())
            self.prefixes.pages.hold(pages)
            other.shared = [self.runner.span(sequence, 0, stop, pages)]
            other.prompt_log_probabilities = copy(sequence.prompt_log_probabilities)
        if sequence.root is None:
            return
        size = self.prefixes.size
        known = sum(len(span.depths) for span in sequence.shared)
        spans: list[Span] = [span for span in sequence.shared if len(span.depths) == size]
        if known != len(spans) * size:
            return  # its prompt came from another sample, which has entered it
        pages = sequence.pages_by_block(size)
        spans += [
            self.runner.span(sequence, start, start + size, pages[start // size])
            for start in range(known, stop - size + 1, size)
        ]
        self.prefixes.keep(sequence.root, sequence.tokens, spans)

    # --- endings ------------------------------------------------------------------------------------------------

    def end(
        self, sequence: Sequence, reason: FinishReason, *, stop_id: int | None = None, error: str | None = None
    ) -> Event:
        """Ends a sequence and gives back all it holds."""
        for heir in sequence.waiting_samples():
            heir.leader = None  # each reads the prompt for itself, or finds it among the prefixes
        self.scheduler.remove(sequence)
        return self.ended(sequence, reason, stop_id=stop_id, error=error)

    def ended(
        self, sequence: Sequence, reason: FinishReason, *, stop_id: int | None = None, error: str | None = None
    ) -> Event:
        """What is told of a sequence that has come to its end."""
        completion = Completion(
            sequence.request,
            sequence.sample,
            sequence.tokens[: sequence.prompt_length],
            sequence.generated,
            sequence.depths[: sequence.prompt_length],
            sequence.prompt_log_probabilities,
            reason,
            stop_id,
            error,
            sequence.dropped_rows,
            sequence.cached_tokens,
        )
        return Event(sequence.request_number, sequence.sample, None, completion)


def _top(extras: Extras, tick: int, number: int, count: int) -> TopTokens:
    if not count or extras.top_ids is None or extras.top_log_probabilities is None:
        return ()
    ids, values = extras.top_ids[tick, number, :count], extras.top_log_probabilities[tick, number, :count]
    return tuple(zip(ids.tolist(), values.tolist(), strict=True))


def _note(sequence: Sequence, chunk: Chunk, goes_on: Many[bool], predicted: Any) -> None:
    """Log-probabilities of the prompt's tokens, as the halted tokens before them say."""
    own, ids, values = (part.tolist() for part in predicted)
    entries = sequence.prompt_log_probabilities
    assert entries is not None
    for number, place in enumerate(chunk.tokens):
        if not goes_on[number] and place + 1 < len(entries):  # it may read its own output again
            top = tuple(zip(ids[number], values[number], strict=True))
            entries[place + 1] = PromptToken(sequence.tokens[place + 1], own[number], top)
