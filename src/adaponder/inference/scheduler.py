"""Who takes part in the next tick: admission by expected rows, chunks of prompts beside decoding, preemption."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field

from adaponder.inference.drafting import Drafting
from adaponder.inference.pages import Pages
from adaponder.inference.prefixes import Prefixes
from adaponder.inference.sequence import DECODING, FINISHED, PREFILLING, WAITING, Chunk, Sequence


@dataclass
class Plan:
    """What the device is told to do.

    Attributes:
        left: lanes that somebody has left.
        admitted: sequences that have just got a lane.
        entering: sequences whose prompt is read and whose last token begins to be decoded.
        decoding: sequences that give one row per tick, in the order of their lanes.
        chunks: chunks of prompts that are read in the first tick, each with its pool rows.
        pages: (lane, index, page): what the lanes' page tables get at that index.
        ticks: how many ticks follow each other before the host looks again.
        longest: a bound on the slots of the sequences that decode.
    """

    left: list[int] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)
    entering: list[Sequence] = field(default_factory=list)
    decoding: list[Sequence] = field(default_factory=list)
    chunks: list[tuple[Chunk, list[int]]] = field(default_factory=list)
    pages: list[tuple[int, int, int]] = field(default_factory=list)
    ticks: int = 1
    longest: int = 0

    @property
    def empty(self) -> bool:
        return not (self.decoding or self.chunks)

    def drop_preempted(self) -> None:
        """Takes out who has lost its lane since the plan took it in."""
        self.admitted, self.entering, self.decoding = (
            [one for one in part if one.lane is not None] for part in (self.admitted, self.entering, self.decoding)
        )
        self.chunks = [(chunk, rows) for chunk, rows in self.chunks if chunk.sequence.lane is not None]


class Scheduler:
    """Shares lanes, pages and the rows of a tick among sequences; knows nothing of the device.

    Args:
        lanes: sequences that can be on the device at a time.
        pages: the pool's pages.
        prefixes: shared prompts.
        chunk: rows of prompts in one tick, at most.
        burst: ticks in a row, at most, while nothing but decoding goes on.
        width: slots, and so rows per pass, of a token.
        passes: in which a token is read, at most.

    Attributes:
        drafts: the windows of an engine that drafts: their tokens need rows too.
        preemptions: how often a sequence gave its rows up.
        most_resident: sequences that were on the device at a time.
        tokens_reused: tokens of those that came in whose rows an earlier request had left.
    """

    def __init__(
        self, lanes: int, pages: Pages, prefixes: Prefixes, *, chunk: int, burst: int, width: int, passes: int
    ):
        self.pages, self.prefixes = pages, prefixes
        self.chunk, self.burst, self.width, self.passes = chunk, burst, width, passes
        self.waiting: deque[Sequence] = deque()
        self.resident: dict[int, Sequence] = {}
        self._free_lanes = list(range(lanes - 1, -1, -1))
        self._depths: dict[Hashable, tuple[int, int]] = {}
        self._full = False
        self._left: list[int] = []
        self._untold: list[Sequence] = []
        self.drafts: Drafting | None = None
        self.preemptions = self.most_resident = self.tokens_reused = 0

    # --- sequences come and go ----------------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Takes a sequence out, wherever it is, and gives back what it holds."""
        if sequence.lane is None:
            self.waiting.remove(sequence)
            self.pages.release(sequence.pages())
            sequence.forget_rows()
        else:
            self._vacate(sequence)
        self._full = False
        sequence.state = FINISHED

    def _vacate(self, sequence: Sequence) -> None:
        assert sequence.lane is not None
        del self.resident[sequence.lane]
        self._left.append(sequence.lane)
        self._free_lanes.append(sequence.lane)
        self._free_lanes.sort(reverse=True)  # the lowest next, so that the lanes in use lie close together
        self.pages.release(sequence.pages())
        sequence.forget_rows()
        sequence.lane, sequence.stay = None, sequence.stay + 1

    def _preempt(self, sequence: Sequence) -> None:
        """Its rows are given up; it will read all its tokens again."""
        self._vacate(sequence)
        sequence.state, sequence.leader = WAITING, None
        sequence.preemptions += 1
        self.preemptions += 1
        self._full = True  # nobody comes in before somebody has left, or the two would take turns for ever
        older = sum(other.number < sequence.number for other in self.waiting)  # they wait in the order of their numbers
        self.waiting.insert(older, sequence)

    def clear(self) -> None:
        """Forgets every sequence; the pages must have been freed."""
        lanes = sorted({*self._free_lanes, *self.resident}, reverse=True)
        self.waiting.clear()
        self.resident.clear()
        self._free_lanes, self._left, self._full = lanes, list(lanes), False
        self._untold = []

    # --- expectations -------------------------------------------------------------------------------------------

    def saw_depth(self, kind: Hashable, tokens: int, total: int) -> None:
        """So many tokens of sequences of this kind were read in so many passes in all."""
        count, depth = self._depths.pop(kind, (0, 0))
        self._depths[kind] = (count + tokens, depth + total)  # the last to be seen is the last in order
        if len(self._depths) > _KINDS:
            del self._depths[next(iter(self._depths))]

    def expected_rows(self, sequence: Sequence) -> int:
        """How many rows of its own a sequence will hold when it is done, shared ones left out."""
        shared = sum(len(span.depths) for span in sequence.shared)
        tokens = sequence.prompt_length + sequence.request.max_new_tokens - 1 - shared
        return int(tokens * self.width * self.expected_depth(sequence)) + 2 * self.pages.size

    def expected_depth(self, sequence: Sequence) -> float:
        """Passes of a token: what its request says, else the mean of its kind; the most while too few were seen."""
        if sequence.forced_depth is not None:
            return sequence.forced_depth
        count, depth = self._depths.get(sequence.kind, (0, 0))
        return depth / count if count >= _ENOUGH else float(self._most_passes(sequence))

    def _most_passes(self, sequence: Sequence) -> int:
        return min(self.passes, sequence.iterations)

    # --- the plan -----------------------------------------------------------------------------------------------

    def plan(self) -> Plan:
        plan = Plan(admitted=self._untold)
        self._admit(plan)
        self._continue_decoding(plan)
        self._read_prompts(plan)
        plan.drop_preempted()
        plan.chunks.sort(key=lambda entry: entry[0].iteration)  # chunks at one iteration ask its gate together
        if plan.empty and self.resident and not any(_in_flight(one) for one in self.resident.values()):
            # What waits holds the pages that they lack: the youngest gives way.
            self._preempt(max(self.resident.values(), key=lambda one: one.number))
            plan.drop_preempted()
        self._settle(plan)
        self._untold = plan.admitted if plan.empty else []  # an empty plan goes to nobody
        if not plan.empty:
            plan.left, self._left = self._left, []
        return plan

    def _admit(self, plan: Plan) -> None:
        """Lets in those that wait, in their order, as long as there are lanes and the rows expected of all fit."""
        if not self.waiting or not self._free_lanes:
            return
        expected = sum(max(self.expected_rows(one), one.held_rows) for one in self.resident.values())
        room = (self.pages.count - 1) * self.pages.size
        while self.waiting and self._free_lanes and not (self._full and self.resident):
            sequence = next((one for one in self.waiting if _ready(one)), None)
            if sequence is None:
                return
            if not sequence.shared and sequence.root is not None:
                sequence.shared = self.prefixes.find(sequence.root, sequence.tokens[: sequence.to_prefill])
            wanted = self.expected_rows(sequence)
            if self.resident and expected + wanted > room:
                if sequence.leader is None:  # a sample's share of its prompt stays
                    self.pages.release(sequence.pages())
                    sequence.shared = []
                return
            expected += wanted
            self._occupy(sequence)
            plan.admitted.append(sequence)

    def _occupy(self, sequence: Sequence) -> None:
        """A sequence that waited gets a lane; the tokens whose rows it shares are read already."""
        self.waiting.remove(sequence)
        sequence.lane = self._free_lanes.pop()
        self.resident[sequence.lane] = sequence
        self.most_resident = max(self.most_resident, len(self.resident))
        depths = [depth for span in sequence.shared for depth in span.depths]
        sequence.depths[: len(depths)] = depths
        sequence.begun, sequence.state = len(depths), PREFILLING
        if sequence.leader is None:  # what a sample has of its leader is of the same request
            self.tokens_reused += len(depths)
            if not sequence.preemptions:
                sequence.cached_tokens = len(depths)

    def _continue_decoding(self, plan: Plan) -> None:
        """Every sequence whose prompt is read gives a row per tick; those that find no memory give way."""
        ready = [one for one in self.resident.values() if one.state == DECODING or one.prefilled]
        lasts = max((one.left * self._most_passes(one) for one in ready), default=1)
        plan.ticks = max(1, min(self._burst(), lasts))
        for sequence in sorted(ready, key=lambda one: one.number):
            if sequence.lane is None:
                continue  # an older one needed its pages
            if not self._supply(sequence, plan):
                self._preempt(sequence)
                continue
            if sequence.state != DECODING:
                sequence.state = DECODING
                plan.entering.append(sequence)
                for other in sequence.waiting_samples():
                    other.leader = None  # there was no prompt to read for them, or it was found
            plan.decoding.append(sequence)

    def _burst(self) -> int:
        """How many ticks follow each other: the fewer, the more rows of prompts are to be read beside them."""
        prompts = (one for one in self.resident.values() if one.state == PREFILLING)
        tokens = sum(
            one.to_prefill - one.begun + sum(len(chunk.tokens) for chunk in one.chunks if not chunk.in_flight)
            for one in prompts
        )
        share = min(1.0, tokens * self.width / self.chunk)
        return max(1, round(self.burst * (1.0 - share)))

    def _supply(self, sequence: Sequence, plan: Plan) -> bool:
        """Gives a sequence the pages for the rows that it may use in this plan."""
        stream = sequence.rows
        rows = sequence.ahead + plan.ticks * self.width
        if self.drafts is not None:
            rows = self.drafts.rows_ahead(sequence, rows)
        count = stream.pages_for(rows)
        if not count:
            return True
        pages = self._pages(count, sequence)
        if pages is None:
            return False
        assert sequence.lane is not None
        plan.pages += [(sequence.lane, index, page) for index, page in enumerate(pages, len(stream.pages))]
        stream.pages += pages
        return True

    def _pages(self, count: int, sequence: Sequence) -> list[int] | None:
        """Pages that are free, or that unused prompts or younger sequences give up; ``None`` if there are too few."""
        while not self.prefixes.make_room(count):
            younger = [one for one in self.resident.values() if one.number > sequence.number]
            sharing = [one for one in self.waiting if one.number > sequence.number and one.shared]
            if younger:
                self._preempt(max(younger, key=lambda one: one.number))
            elif sharing:
                self._part(sharing[-1])
            else:
                return None
        return self.pages.take(count)

    def _part(self, sequence: Sequence) -> None:
        """A sample that waits gives up its share of the prompt, and will read it for itself."""
        self.pages.release(sequence.pages())
        sequence.shared, sequence.leader = [], None

    def _read_prompts(self, plan: Plan) -> None:
        """Chunks go on, and begin while the tick has room; a chunk never overtakes an earlier one of its sequence."""
        room = self.chunk
        prompts = [one for one in self.resident.values() if one.state == PREFILLING]
        for sequence in sorted(prompts, key=lambda one: one.number):
            if sequence.lane is None:
                continue  # an older one needed its pages
            reached = sequence.iterations
            for chunk in sequence.chunks:
                if not chunk.in_flight and chunk.iteration <= reached:
                    room -= self._read_chunk(chunk, plan)
                    if sequence.lane is None:
                        break
                reached = min(reached, chunk.issued)
            left = sequence.to_prefill - sequence.begun
            if sequence.lane is None or not left or room < self.width or reached < 0:
                continue
            count = min(left, room // self.width)
            chunk = Chunk(sequence, list(range(sequence.begun, sequence.begun + count)))
            if self._pages_for_chunk(chunk):
                sequence.chunks.append(chunk)
                sequence.begun += count
                room -= self._read_chunk(chunk, plan)

    def _read_chunk(self, chunk: Chunk, plan: Plan) -> int:
        """Puts the chunk's next iteration into the plan; returns its rows, 0 if there is no memory for them."""
        if not self._pages_for_chunk(chunk):
            return 0
        rows = chunk.sequence.prompt_rows.take(len(chunk.tokens) * self.width)
        chunk.sequence.wrote(chunk.tokens, rows)
        plan.chunks.append((chunk, rows))
        chunk.in_flight = True
        return len(rows)

    def _pages_for_chunk(self, chunk: Chunk) -> bool:
        stream = chunk.sequence.prompt_rows
        pages = self._pages(stream.pages_for(len(chunk.tokens) * self.width), chunk.sequence)
        stream.pages += pages or []
        return pages is not None

    def _settle(self, plan: Plan) -> None:
        plan.decoding.sort(key=lambda one: one.lane or 0)
        lanes = {one.lane for one in self.resident.values()}
        plan.pages = [entry for entry in plan.pages if entry[0] in lanes]
        for sequence in plan.decoding:
            sequence.ahead += plan.ticks * self.width
            # It stands at its last known token, and each tick in flight may have taken it one further.
            window = self.width if self.drafts is None else self.drafts.size
            plan.longest = max(plan.longest, (len(sequence.tokens) - 1) * self.width + sequence.ahead + window)


# Tokens after which the mean depth of their kind is believed.
_ENOUGH = 32
# Kinds whose mean depths are kept: a request may bring a threshold of its own.
_KINDS = 1024


def _in_flight(sequence: Sequence) -> bool:
    return sequence.ahead > 0 or any(chunk.in_flight for chunk in sequence.chunks)


def _ready(sequence: Sequence) -> bool:
    """Whether nobody is reading its prompt for it."""
    return sequence.leader is None or sequence.leader is sequence or bool(sequence.shared)
