"""Schedules ticks: admits requests by expected rows, prefills in chunks beside decoding, preempts if pages run out."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from operator import attrgetter

from adaponder.inference.config import EngineShape
from adaponder.inference.kv_cache import PrefixCache
from adaponder.inference.sequence import DECODING, PREFILLING, WAITING, Chunk, Sequence

# The measured mean depth of a kind (policy, iterations) is used from this number of tokens on.
_ENOUGH = 32
# Maximum number of kinds whose mean depth is stored: each threshold of a policy is another kind.
_KINDS = 1024
_order, _rank = attrgetter("order"), attrgetter("rank")


@dataclass
class Plan:
    """The work of one launch: one or more ticks.

    Attributes:
        resident: the sequence of each lane in use.
        starting: prefilled sequences that start decoding.
        decoding: sequences with one row per tick, in the order of their lanes.
        chunks: prefill chunks of the first tick.
        pages: block-table updates, (lane, index, page).
        ticks: the number of ticks.
        context: an upper bound on the slots of the decoding sequences.
    """

    resident: dict[int, Sequence] = field(default_factory=dict)
    starting: list[Sequence] = field(default_factory=list)
    decoding: list[Sequence] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    pages: list[tuple[int, int, int]] = field(default_factory=list)
    ticks: int = 1
    context: int = 0

    @property
    def empty(self) -> bool:
        """Whether there is nothing to compute."""
        return not (self.decoding or self.chunks)

    def drop_preempted(self) -> None:
        """Removes sequences that were preempted after the plan included them."""
        self.starting = [sequence for sequence in self.starting if sequence.lane is not None]
        self.decoding = [sequence for sequence in self.decoding if sequence.lane is not None]
        self.chunks = [chunk for chunk in self.chunks if chunk.sequence.lane is not None]


class Scheduler:
    """Assigns lanes, pages and the rows of a tick to sequences; runs on the host only.

    Clients share lanes, pages and rows fairly. A resident is a sequence that has a lane; a client's oldest resident has
    rank 0, its next rank 1, and so on. Lower ranks come first:

    - The next sequence to be admitted is the oldest of the client with the fewest residents; clients that tie are
      served round-robin. If it lacks a lane or rows, it preempts residents of higher rank than its own.
    - If pages run short, the resident of the highest rank is preempted.
    - The prefill rows of a tick are divided equally; rows that a client does not need go to the others.

    So a client with fewer than ``lanes // clients`` residents never waits for a lane, and a sequence that needs at most
    ``chunk // clients`` prefill rows per tick takes as many ticks as if its client were alone, however many requests
    other clients have queued. The exception is a sequence whose rows do not fit beside the oldest resident of each
    other client: it waits for these residents, and later sequences wait for it. The sequences of a client are served in
    order of arrival; a client alone gets everything.

    Attributes:
        queues: the waiting sequences of each client that has any waiting or resident, in order of arrival.
        preemptions: the number of preemptions so far.
        tokens_reused: the number of tokens whose rows came from the prefix cache.
        most_resident: the largest number of sequences that had a lane at the same time.
    """

    def __init__(self, shape: EngineShape, prefixes: PrefixCache):
        self.shape, self.pages, self.prefixes, self.width = shape, prefixes.pages, prefixes, shape.width
        self.queues: dict[str, deque[Sequence]] = {}
        self.resident: dict[int, Sequence] = {}
        self._turns: dict[str, int] = {}  # by client: its latest admission's number
        self._turn = 0  # the number of admissions
        self._free_lanes = self._all_lanes()
        self._depths: dict[Hashable, tuple[int, int]] = {}  # by kind: numbers of tokens and of their iterations
        self._paused = False  # whether admission waits for a sequence to finish, see _preempt
        self.preemptions = self.most_resident = self.tokens_reused = 0

    def _all_lanes(self) -> list[int]:
        return list(range(self.shape.lanes - 1, -1, -1))

    def add(self, sequences: list[Sequence]) -> None:
        """Queues sequences of one client. In round-robin order, a new client comes before the one served last."""
        client = sequences[0].client
        self.queues.setdefault(client, deque()).extend(sequences)
        self._turns.setdefault(client, self._turn - 1)

    def remove(self, sequence: Sequence) -> None:
        """Removes a finished sequence, waiting or resident, and frees its pages."""
        client = sequence.client
        if sequence.lane is None:
            self.queues[client].remove(sequence)
            self._release(sequence)
        else:
            self._free(sequence)
        self._paused = False
        if not self.queues[client] and all(other.client != client for other in self.resident.values()):
            del self.queues[client], self._turns[client]

    def _free(self, sequence: Sequence) -> None:
        """Frees a sequence's lane and pages."""
        lane = sequence.lane_number
        del self.resident[lane]
        self._free_lanes.append(lane)
        self._free_lanes.sort(reverse=True)  # the lowest lane is used next, so that used lanes are adjacent
        sequence.lane = None
        self._release(sequence)

    def _release(self, sequence: Sequence) -> None:
        """Releases the pages of a sequence without a lane."""
        self.pages.release(sequence.kv.pages())
        sequence.reset()

    def _preempt(self, sequence: Sequence) -> None:
        """Preempts a sequence: frees its KV pages and requeues it for recomputation."""
        self._free(sequence)
        sequence.state, sequence.leader = WAITING, None
        sequence.num_preemptions += 1
        self.preemptions += 1
        self._paused = True  # until a sequence finishes: otherwise two could preempt each other forever
        queue = self.queues[sequence.client]
        queue.insert(sum(other.order < sequence.order for other in queue), sequence)

    def clear(self) -> None:
        """Removes every sequence; the caller must have freed the pages."""
        self.queues.clear()
        self._turns.clear()
        self.resident.clear()
        self._free_lanes, self._paused = self._all_lanes(), False

    def record_depth(self, kind: Hashable, tokens: int, iterations: int) -> None:
        """Updates the mean depth of a kind of request with ``tokens`` tokens, ``iterations`` iterations in total."""
        count, total = self._depths.pop(kind, (0, 0))
        self._depths[kind] = (count + tokens, total + iterations)  # becomes the last key; the first key is the oldest
        if len(self._depths) > _KINDS:
            del self._depths[next(iter(self._depths))]

    def expected_rows(self, sequence: Sequence) -> int:
        """Estimates the rows that a sequence will hold at its end, not counting shared rows."""
        prompt, new_tokens = len(sequence.submission.prompt), sequence.request.max_new_tokens
        tokens = prompt + new_tokens - 1 - sequence.kv.num_cached
        return int(tokens * self.width * self.expected_depth(sequence)) + 2 * self.pages.size

    def expected_depth(self, sequence: Sequence) -> float:
        """Estimates the passes per token of a sequence.

        Returns the mean of its forced depths if every slot has one; else the measured mean depth of its kind of request
        or, while too few tokens were measured, the maximum.
        """
        if sequence.submission.forced_mean is not None:
            return sequence.submission.forced_mean
        count, total = self._depths.get(sequence.submission.kind, (0, 0))
        return total / count if count >= _ENOUGH else float(sequence.passes)

    def schedule(self) -> Plan:
        """Returns the plan of the next launch; an empty plan must not be launched."""
        plan = Plan()
        self._admit()
        self._schedule_decode(plan)
        self._schedule_prefill(plan)
        plan.drop_preempted()
        plan.chunks.sort(key=attrgetter("iteration"))  # chunks at one iteration share a gate call
        if plan.empty and self.resident and not any(_in_flight(sequence) for sequence in self.resident.values()):
            # No resident can run, because waiting samples hold the pages: preempt the resident of the highest rank.
            self._preempt(max(self.resident.values(), key=_rank))
            plan.drop_preempted()
        plan.decoding.sort(key=lambda sequence: sequence.lane or 0)
        plan.pages = [entry for entry in plan.pages if entry[0] in self.resident]
        for sequence in plan.decoding:
            sequence.kv.in_flight += plan.ticks * self.width
            # Each tick in flight may have advanced the sequence by a token beyond the last known one.
            slots = (len(sequence.tokens) - 1) * self.width + sequence.kv.in_flight
            plan.context = max(plan.context, slots + max(self.width, self.shape.window))
        plan.resident = dict(self.resident)
        return plan

    def _admit(self) -> None:
        """Admits waiting sequences while there are lanes and the expected rows of all residents fit.

        A sequence may preempt residents of higher rank; an engine without residents admits any sequence.
        """
        self._rank_residents()
        if not any(self.queues.values()) or (not self._free_lanes and len(self.queues) == 1):
            return
        rows = {sequence: self._rows_of(sequence) for sequence in self.resident.values()}
        capacity = (self.pages.count - 1) * self.pages.size
        while (sequence := self._next()) is not None:
            rank = sum(other.client == sequence.client for other in self.resident.values())
            behind = [other for other in self.resident.values() if other.rank[0] > rank]
            waits = self._paused and bool(self.resident) and (rank > 0 or sequence.num_preemptions > 0)
            must_preempt = waits or not self._free_lanes
            if must_preempt and not behind:
                return
            namespace = sequence.submission.namespace
            if not sequence.kv.shared and namespace is not None:
                sequence.kv.shared = self.prefixes.find(namespace, sequence.tokens[: sequence.num_prefill])
            needed, room = self.expected_rows(sequence), capacity - sum(rows.values())
            preempted: list[Sequence] = []
            while self.resident and (needed > room or (must_preempt and not preempted)) and behind:
                other = max(behind, key=_rank)
                behind.remove(other)
                preempted.append(other)
                room += rows[other]
            if self.resident and needed > room:
                if sequence.leader is None:  # a sample keeps the prompt that its leader shared
                    self._release(sequence)
                return
            paused = self._paused  # these preemptions do not pause admission
            for other in preempted:
                self._preempt(other)
                del rows[other]
            self._paused = paused
            rows[sequence] = needed
            self._assign_lane(sequence)
            self._rank_residents()

    def _next(self) -> Sequence | None:
        """Returns the oldest ready sequence of the client with the fewest residents (ties: round-robin)."""
        residents = Counter(sequence.client for sequence in self.resident.values())
        ready = [sequence for queue in self.queues.values() if (sequence := next(filter(_is_ready, queue), None))]

        def priority(sequence: Sequence) -> tuple[int, int, tuple[int, int]]:
            return residents[sequence.client], self._turns[sequence.client], sequence.order

        return min(ready, key=priority, default=None)

    def _rank_residents(self) -> None:
        older: Counter[str] = Counter()
        for sequence in sorted(self.resident.values(), key=_order):
            sequence.rank = (older[sequence.client], sequence.order)
            older[sequence.client] += 1

    def _rows_of(self, sequence: Sequence) -> int:
        """Returns the rows that a resident holds now or will probably hold at its end, whichever is more."""
        return max(self.expected_rows(sequence), sequence.kv.held_rows)

    def _assign_lane(self, sequence: Sequence) -> None:
        """Moves a waiting sequence to a lane; its cached tokens need no prefill."""
        self.queues[sequence.client].remove(sequence)
        self._turn += 1
        self._turns[sequence.client] = self._turn
        sequence.lane = self._free_lanes.pop()
        self.resident[sequence.lane] = sequence
        self.most_resident = max(self.most_resident, len(self.resident))
        depths = [depth for span in sequence.kv.shared for depth in span.depths]
        sequence.depths[: len(depths)] = depths
        sequence.num_scheduled, sequence.state = len(depths), PREFILLING
        if sequence.leader is None:  # rows shared by a leader are not from the cache
            self.tokens_reused += len(depths)
            if not sequence.num_preemptions:
                sequence.completion.cached_tokens = len(depths)

    def _schedule_decode(self, plan: Plan) -> None:
        """Schedules a row per tick for each prefilled sequence; preempts a sequence if there are no pages for it."""
        ready = [sequence for sequence in self.resident.values() if sequence.state == DECODING or sequence.prefilled]
        longest = max((sequence.num_remaining * sequence.passes for sequence in ready), default=1)
        plan.ticks = max(1, min(self._burst_beside_prefill(), longest))
        for sequence in sorted(ready, key=_rank):
            if sequence.lane is None:
                continue  # preempted for a sequence of lower rank
            if not self._allocate_decode(sequence, plan):
                self._preempt(sequence)
                continue
            if sequence.state != DECODING:
                sequence.state = DECODING
                plan.starting.append(sequence)
                for sample in sequence.waiting_samples():
                    sample.leader = None  # no prefill ran, so nothing was shared with the sample
            plan.decoding.append(sequence)

    def _burst_beside_prefill(self) -> int:
        """Returns the number of ticks for the next launch: fewer, the more prefill rows are still to be computed."""
        tokens = sum(map(_prefill_left, self.resident.values()))
        share = min(1.0, tokens * self.width / self.shape.chunk)
        return max(1, round(self.shape.burst * (1.0 - share)))

    def _allocate_decode(self, sequence: Sequence, plan: Plan) -> bool:
        """Allocates pages for the rows that a sequence may use in this plan; returns False if there are too few."""
        stream = sequence.kv.decode
        rows = sequence.kv.in_flight + plan.ticks * self.width
        if self.shape.window > 1:  # a tick may start one more token, and each token has rows for all passes
            rows = min(rows + self.shape.window - 1, sequence.num_remaining) * self.shape.passes
        pages = self._take_pages(stream.pages_for(rows), sequence)
        if pages is None:
            return False
        plan.pages += [(sequence.lane_number, index, page) for index, page in enumerate(pages, len(stream.pages))]
        stream.pages += pages
        return True

    def _take_pages(self, count: int, sequence: Sequence) -> list[int] | None:
        """Allocates pages or returns ``None``; may evict prefixes, then preempt sequences of higher rank."""
        while not self.prefixes.make_room(count):
            behind = [other for other in self.resident.values() if other.rank > sequence.rank]
            if behind:
                self._preempt(max(behind, key=_rank))
                continue
            waiting = (other for queue in self.queues.values() for other in queue if other.kv.shared)
            sharing = [other for other in waiting if other.client != sequence.client or other.order > sequence.order]
            if not sharing:
                return None
            # Release the prompt shared with a waiting sample, which will prefill it itself.
            sample = max(sharing, key=_order)
            sample.leader = None
            self._release(sample)
        return self.pages.take(count)

    def _schedule_prefill(self, plan: Plan) -> None:
        """Divides prefill rows equally between clients; rows that a client does not need go to the others."""
        clients: dict[str, list[Sequence]] = {}
        for sequence in sorted(self.resident.values(), key=_order):
            if sequence.state == PREFILLING:
                clients.setdefault(sequence.client, []).append(sequence)
        room = self.shape.chunk
        shares = sorted(clients.values(), key=lambda sequences: sum(map(_prefill_left, sequences)))
        for number, sequences in enumerate(shares):
            share = min(room, max(self.width, room // (len(shares) - number)))
            room -= share - self._prefill(sequences, share, plan)

    def _prefill(self, sequences: list[Sequence], room: int, plan: Plan) -> int:
        """Schedules the next iteration of existing chunks, then new chunks in what is left of ``room``.

        ``room`` is a number of rows; returns what is left of it in the end.
        A chunk never overtakes an earlier chunk of its sequence, because it attends to the earlier chunk's rows.
        """
        for sequence in sequences:
            if sequence.lane is None:
                continue  # preempted for a sequence of lower rank
            reached = sequence.iterations  # the last iteration that all earlier chunks have launched
            for chunk in sequence.chunks:
                if not chunk.in_flight and chunk.iteration <= reached:
                    room -= self._schedule_chunk(chunk, plan)
                reached = min(reached, chunk.launched)
            remaining = sequence.num_prefill - sequence.num_scheduled
            if not remaining or room < self.width or reached < 0:
                continue
            count = min(remaining, room // self.width)
            chunk = Chunk(sequence, list(range(sequence.num_scheduled, sequence.num_scheduled + count)))
            if rows := self._schedule_chunk(chunk, plan):
                sequence.chunks.append(chunk)
                sequence.num_scheduled += count
                room -= rows
        return room

    def _schedule_chunk(self, chunk: Chunk, plan: Plan) -> int:
        """Schedules a chunk's next iteration; returns its number of rows, or 0 if there are too few pages."""
        kv, rows = chunk.sequence.kv, len(chunk.tokens) * self.width
        pages = self._take_pages(kv.prefill.pages_for(rows), chunk.sequence)
        if pages is None:
            return 0
        kv.prefill.pages += pages
        chunk.rows, chunk.in_flight = kv.take_prefill(chunk.tokens, rows), True
        plan.chunks.append(chunk)
        return rows


def _prefill_left(sequence: Sequence) -> int:
    """Returns the number of tokens that the next tick could prefill: those in no chunk, or in a chunk not in flight."""
    if sequence.state != PREFILLING:
        return 0
    active = sum(len(chunk.tokens) for chunk in sequence.chunks if not chunk.in_flight)
    return sequence.num_prefill - sequence.num_scheduled + active


def _in_flight(sequence: Sequence) -> bool:
    return sequence.kv.in_flight > 0 or any(chunk.in_flight for chunk in sequence.chunks)


def _is_ready(sequence: Sequence) -> bool:
    """Returns whether a sequence can be admitted: no other sample prefills its prompt, or that sample has shared it."""
    return sequence.leader is None or bool(sequence.kv.shared)
