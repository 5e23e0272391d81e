"""Tests scheduling without a device: a stand-in returns results like one, at once or a launch late."""

import random

import pytest
import torch

from adaponder import FixedDepth
from adaponder.inference import Request
from adaponder.inference.config import EngineShape
from adaponder.inference.kv_cache import Pages, PrefixCache, Span
from adaponder.inference.postprocess import Postprocessor
from adaponder.inference.runner import Launch
from adaponder.inference.scheduler import Scheduler
from adaponder.inference.sequence import FINISHED, PREFILLING, WAITING, Submission
from adaponder.inference.tick import Extras

SIZE = 4


class StandIn:
    """A scheduler with its pages, and a stand-in for the device whose only result is each token's depth."""

    def __init__(self, lanes=3, rows=100, *, chunk=8, burst=1, block=4, late=False, share=False, depth=None, **shape):
        self.pages = Pages(rows // SIZE + 1, SIZE)
        self.prefixes = PrefixCache(self.pages, block)
        sizes = {"iterations": 3, "tokens": 100, "width": 1, "passes": 3, "window": 1, "page_size": SIZE} | shape
        shape = EngineShape(lanes=lanes, chunk=chunk, burst=burst, **sizes)
        self.scheduler = Scheduler(shape, self.prefixes)
        self.postprocessor = Postprocessor(self, self.scheduler)
        self.width, self.late, self.share, self.drafts, self.eos_ids = 1, late, share, None, ()
        self.depth = depth or (lambda sequence, place: min(sequence.iterations, 1 + place % 3))
        self.in_flight, self.stands, self.occupants = None, {}, {}
        self.admitted, self.preempted, self.ended = [], [], []
        self.numbers = 0
        self._preempt = self.scheduler._preempt
        self.scheduler._preempt = self._note_preemption

    def add(self, prompt, new, *, iterations=3, samples=1, depths=None):
        tokens = prompt if isinstance(prompt, list) else [self.numbers + 10] * prompt
        submission = Submission(
            Request(tokens, max_new_tokens=new, samples=samples, depths=depths),
            self.numbers,
            policy=FixedDepth(3),
            iterations=iterations,
            namespace="namespace" if self.share else None,
            shape=self.scheduler.shape,
        )
        self.scheduler.waiting.extend(submission.samples)
        self.numbers += 1
        return submission.samples

    def step(self):
        plan = self.scheduler.schedule()
        self.check(plan)
        self.admitted += [one.order for one in plan.admitted]
        launch = None if plan.empty else self.launch(plan)
        before, self.in_flight = self.in_flight, launch
        events = [] if before is None else self.postprocessor.process(before)
        if launch is not None and not self.late:
            self.in_flight = None
            events += self.postprocessor.process(launch)
        self.ended += [event.request for event in events if event.completion is not None]
        return plan

    def launch(self, plan):
        for lane in plan.freed:
            self.occupants.pop(lane, None)
        self.occupants |= {one.lane: (one, one.num_preemptions) for one in plan.admitted}
        residents = {lane: (one, one.num_preemptions) for lane, one in self.scheduler.resident.items()}
        assert self.occupants == residents, "the device was not told who came and who left"
        for one in plan.starting:
            self.stands[one] = (len(one.tokens) - 1, 0)
        said = [[self.read(one) for one in plan.decoding] for _ in range(plan.ticks)]
        tokens = torch.tensor(said, dtype=torch.long).view(plan.ticks, len(plan.decoding))
        launch = Launch([(one, one.num_preemptions) for one in plan.decoding], plan.ticks, (tokens, Extras()))
        for chunk in plan.chunks:
            on = [chunk.iteration + 1 < self.depth(chunk.sequence, place) for place in chunk.tokens]
            launch.chunks.append((chunk, chunk.sequence.num_preemptions, torch.tensor(on), None))
        return launch

    def read(self, sequence):
        place, iteration = self.stands[sequence]
        halts = iteration + 1 >= self.depth(sequence, place)
        self.stands[sequence] = (place + 1, 0) if halts else (place, iteration + 1)
        return 1 if halts else -1

    def check(self, plan):
        """Asserts the invariants of every plan."""
        scheduler = self.scheduler
        lanes = [one.lane for one in scheduler.resident.values()]
        assert len(lanes) == len(set(lanes))
        assert set(lanes) == set(scheduler.resident)
        assert not set(lanes) & set(scheduler._free_lanes)
        for one in [*scheduler.resident.values(), *scheduler.waiting]:
            assert all(self.pages._holders[page] for page in one.kv.pages()), "a page was freed while it is in use"
        own = [page for one in scheduler.resident.values() for page in one.kv.prefill.pages + one.kv.decode.pages]
        assert len(own) == len(set(own)), "two sequences write to one page"
        rows = [row for chunk in plan.chunks for row in chunk.rows]
        assert len(rows) == len(set(rows))
        assert all(row // SIZE in chunk.sequence.kv.prefill.pages for chunk in plan.chunks for row in chunk.rows)
        for chunk in plan.chunks:
            assert chunk.sequence.lane is not None
            earlier = chunk.sequence.chunks[: chunk.sequence.chunks.index(chunk)]
            assert all(one.launched >= chunk.iteration for one in earlier), "a chunk overtakes an earlier one"
        for one in plan.decoding:
            assert not one.chunks, "it decodes before its prompt is read"
            assert one.num_scheduled == one.num_prefill or one not in plan.starting
            assert one.kv.decode.room >= one.kv.in_flight, "rows that it may use are not there"

    def run(self, limit=3000):
        for _ in range(limit):
            if not self.scheduler.waiting and not self.scheduler.resident and self.in_flight is None:
                break
            self.step()
        else:
            pytest.fail("it never ends")
        self.prefixes.clear()
        assert self.pages.held == 0

    def _note_preemption(self, sequence):
        self.preempted.append((sequence.order, [one.order for one in self.scheduler.resident.values()]))
        self._preempt(sequence)

    # The runner's methods that the postprocessor calls.

    def span(self, sequence, start, stop, pages):
        return Span(torch.zeros(3, stop - start), sequence.depths[start:stop], pages)

    def compact(self, chunk, which):
        chunk.tokens = [chunk.tokens[number] for number in which]


@pytest.mark.parametrize("seed", range(40))
def test_everybody_finishes_whatever_comes(seed):
    draw = random.Random(seed)
    stand = StandIn(
        lanes=draw.randint(1, 5),
        rows=draw.choice([100, 120, 400]),
        chunk=draw.choice([1, 3, 8, 40]),
        burst=draw.choice([1, 2, 4]),
        block=draw.choice([2, 4]),
        late=draw.random() < 0.6,
        share=draw.random() < 0.6,
    )
    if draw.random() < 0.6:
        stand.scheduler.expected_rows = lambda sequence: 0
    live, cancelled = [], []
    for _ in range(14):
        prompt = draw.choice([draw.randint(1, 14), list(range(draw.randint(1, 14)))])
        live += stand.add(prompt, draw.randint(1, 8), samples=draw.choice([1, 1, 2]))
        for _ in range(draw.randint(0, 6)):
            stand.step()
        if draw.random() < 0.2:
            one = draw.choice(live)
            if one.state != FINISHED:
                stand.postprocessor.finish(one, "cancelled")
                cancelled.append(one)
    stand.run()
    assert len(stand.scheduler._free_lanes) == len(set(stand.scheduler._free_lanes))
    for one in live:
        assert one.state == FINISHED
        true = [stand.depth(one, place) for place in range(len(one.depths))]
        assert one.depths == true or (one in cancelled and all(map(lambda x, y: x in (0, y), one.depths, true)))


def test_the_first_to_come_is_the_first_to_get_a_lane():
    stand = StandIn(lanes=2)
    for length in (3, 9, 1, 5, 2):
        stand.add(length, 4)
    stand.run()
    assert stand.admitted == [(0, 0), (1, 0), (2, 0), (3, 0), (4, 0)]


def test_one_that_does_not_fit_is_not_overtaken():
    stand = StandIn(lanes=3, rows=100)
    stand.add(8, 4)
    stand.add(20, 8)
    stand.add(1, 1)
    stand.step()
    assert stand.admitted == [(0, 0)]
    stand.run()
    assert stand.admitted == [(0, 0), (1, 0), (2, 0)]


def test_halting_means_more_residents():
    def most(mean):
        stand = StandIn(lanes=20, rows=200)
        for _ in range(12):
            stand.add(8, 5)
        stand.scheduler.record_depth(stand.scheduler.waiting[0].submission.kind, 100, int(100 * mean))
        stand.step()
        return len(stand.scheduler.resident)

    assert [most(3), most(2), most(1)] == [4, 6, 10]


def test_the_greatest_depth_is_expected_until_enough_tokens_were_seen():
    stand = StandIn()
    (one,) = stand.add(8, 5)
    assert stand.scheduler.expected_rows(one) == 12 * 3 + 2 * SIZE
    stand.scheduler.record_depth(one.submission.kind, 31, 31)
    assert stand.scheduler.expected_depth(one) == 3
    stand.scheduler.record_depth(one.submission.kind, 1, 1)
    assert stand.scheduler.expected_rows(one) == 12 + 2 * SIZE


def test_forced_depths_are_expected():
    stand = StandIn()
    (one,) = stand.add(8, 5, depths=[1, 2] * 6)
    assert stand.scheduler.expected_rows(one) == 18 + 2 * SIZE


def test_slots_that_are_read_in_one_pass_hold_one_row_each():
    """As those of pause tokens are: three slots of a token, whose request allows three iterations."""
    stand = StandIn(width=3, passes=1, burst=8)
    (one,) = stand.add(1, 2, iterations=3)
    assert stand.scheduler.expected_rows(one) == 2 * 3 + 2 * SIZE
    assert stand.scheduler.schedule().ticks == 2, "one for each token"


def test_depths_are_remembered_of_those_kinds_that_came_last():
    stand = StandIn()
    (one,) = stand.add(8, 5)
    stand.scheduler.record_depth(one.submission.kind, 32, 32)
    for number in range(3000):
        stand.scheduler.record_depth(("another tau", number), 1, 1)
        stand.scheduler.record_depth(one.submission.kind, 0, 0)  # a chunk of which all tokens go on
    assert stand.scheduler.expected_depth(one) == 1
    assert len(stand.scheduler._depths) == 1024


def test_the_most_residents_are_counted_where_others_have_to_wait():
    stand = StandIn(lanes=4, rows=100)
    for _ in range(3):
        stand.add(8, 4)
    stand.step()
    assert len(stand.scheduler.waiting) == 1
    assert stand.scheduler.most_resident == 2
    stand = StandIn(lanes=4, rows=100)
    stand.add(8, 4, samples=2)
    stand.step()
    assert stand.scheduler.most_resident == 1, "the other sample waits for the prompt"


def test_shared_tokens_are_counted_once_however_long_a_request_waits():
    stand = StandIn(lanes=2, rows=100, share=True)
    (first,) = stand.add(list(range(9)), 1)
    while first.state != FINISHED:
        stand.step()
    stand.add(20, 8)
    (same,) = stand.add(list(range(9)), 2)
    stand.step()
    stand.step()
    assert (same.state, stand.scheduler.tokens_reused) == (WAITING, 0)
    stand.run()
    assert stand.scheduler.tokens_reused == same.completion.cached_tokens == 8


def test_whoever_is_too_large_for_the_rest_comes_in_alone():
    stand = StandIn(lanes=2, rows=100)
    stand.scheduler.expected_rows = lambda sequence: 10**6
    for _ in range(3):
        stand.add(5, 3)
    stand.run()
    assert stand.scheduler.most_resident == 1


@pytest.mark.parametrize("late", [False, True])
def test_the_youngest_gives_way_and_nobody_comes_in_before_somebody_has_left(late):
    stand = StandIn(lanes=4, rows=64, late=late, burst=2)
    stand.scheduler.expected_rows = lambda sequence: 0
    for _ in range(6):
        stand.add(9, 9)
    stand.run()
    assert len(stand.preempted) >= 2
    assert all(number == max(residents) for number, residents in stand.preempted)
    assert stand.ended == sorted(stand.ended), "the older ones end first"
    assert stand.scheduler.preemptions == len(stand.preempted) < 20


def test_a_waiting_sample_does_not_keep_the_pages_that_the_only_resident_needs():
    """The sample is older, so it need not part; the resident steps back instead of waiting for ever."""
    stand = StandIn(lanes=2, rows=44, chunk=6)
    _, sample = stand.add(10, 1, samples=2)
    (other,) = stand.add(14, 6)
    stand.scheduler.expected_rows = lambda sequence: 10**6 if sequence is sample else 0
    stand.run(400)
    assert {other.state, sample.state} == {FINISHED}


def test_chunks_of_one_prompt_follow_each_other_iteration_by_iteration():
    stand = StandIn(lanes=1, chunk=4, late=True, depth=lambda sequence, place: 3)
    (one,) = stand.add(13, 1)
    read = []
    while one.state != FINISHED:
        plan = stand.step()
        read += [(min(chunk.tokens), chunk.iteration) for chunk in plan.chunks]
    assert sorted(read) == [(start, iteration) for start in (0, 4, 8) for iteration in range(3)]
    for start, iteration in read:
        if start:
            assert read.index((start - 4, iteration)) < read.index((start, iteration))


def test_a_tick_reads_no_more_prompt_rows_than_it_may():
    stand = StandIn(lanes=4, rows=400, chunk=6, depth=lambda sequence, place: 1)
    for _ in range(4):
        stand.add(11, 2)
    while stand.scheduler.waiting or stand.scheduler.resident:
        assert sum(len(chunk.rows) for chunk in stand.step().chunks) <= 6


def test_ticks_follow_each_other_only_while_nothing_but_decoding_goes_on():
    stand = StandIn(lanes=2, rows=400, burst=4, depth=lambda sequence, place: 1)
    stand.add(1, 30)
    assert stand.step().ticks == 4
    stand.add(9, 12)
    assert stand.step().ticks == 1, "a prompt is read"
    while any(one.state == PREFILLING for one in stand.scheduler.resident.values()):
        stand.step()
    assert stand.step().ticks == 4
    stand.run()


def test_an_answer_to_an_earlier_stay_is_not_heard():
    stand = StandIn(lanes=1, late=True)
    (one,) = stand.add(1, 5)
    stand.step()
    assert stand.in_flight is not None
    stand.scheduler._preempt(one)
    stand.step()
    assert one.completion.tokens == []
    stand.run()
    assert len(one.completion.tokens) == 5


def test_samples_wait_for_the_one_that_reads_their_prompt_and_share_it():
    stand = StandIn(lanes=3, chunk=4, rows=200)
    samples = stand.add(9, 3, samples=3)
    stand.step()
    assert [one.lane is not None for one in samples] == [True, False, False]
    while samples[1].lane is None:
        stand.step()
    assert samples[1].kv.shared[0].pages == samples[2].kv.shared[0].pages
    assert samples[1].num_scheduled == 8
    assert samples[1].depths == samples[0].depths[:8]
    stand.run()


def test_a_sample_whose_leader_was_cancelled_reads_the_prompt_itself():
    stand = StandIn(lanes=3, chunk=2)
    first, second = stand.add(9, 3, samples=2)
    stand.step()
    stand.postprocessor.finish(first, "cancelled")
    stand.run()
    assert len(second.completion.tokens) == 3


def test_who_left_is_told_even_where_a_plan_was_empty_in_between():
    stand = StandIn(lanes=3, late=True)
    for _ in range(3):
        stand.add(1, 2)
    stand.run()
    assert stand.step().empty
    stand.add(1, 2)
    assert set(stand.step().freed) == {0, 1, 2}
    stand.run()


def test_who_came_is_told_even_where_there_was_nothing_to_read():
    """All pages are in use by a chunk in flight."""
    stand = StandIn(lanes=2, rows=60, chunk=40, late=True, depth=lambda sequence, place: 2)
    stand.scheduler.expected_rows = lambda sequence: 0
    stand.add(25, 1)
    stand.step()
    spare = stand.pages.take(stand.pages.free)
    stand.add(5, 1)
    assert stand.step().empty
    stand.pages.release(spare)
    plan = stand.step()
    assert [one.order for one in plan.admitted] == [(1, 0)]
    stand.run()


def test_a_chunk_waits_while_an_earlier_one_finds_no_page():
    """The earlier one wants three rows, of which two are left; the later one wants one at a time."""
    deep = (2, 3, 4, 6)
    stand = StandIn(lanes=1, chunk=5, depth=lambda sequence, place: 3 if place in deep else 1)
    stand.add(8, 1)
    stand.step()
    stand.step()
    spare = stand.pages.take(stand.pages.free)
    (late,) = stand.step().chunks
    assert (late.tokens, late.launched) == ([6], 1)
    assert stand.step().chunks == []
    stand.pages.release(spare)
    stand.run()
