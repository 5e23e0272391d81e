"""Tests scheduling without a device: a stand-in returns results like one, at once or a launch late."""

import random
from collections import Counter

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
SHAPE = {"lanes": 3, "iterations": 3, "tokens": 100, "width": 1, "passes": 3, "window": 1, "burst": 1, "chunk": 8}


class StandIn:
    """A scheduler with its pages, and a stand-in for the device whose only result is each token's depth."""

    width, drafts, eos_ids = 1, None, ()

    def __init__(self, *, rows=100, block=4, late=False, share=False, depth=None, **shape):
        self.pages = Pages(rows // SIZE + 1, SIZE)
        self.prefixes = PrefixCache(self.pages, block)
        self.scheduler = Scheduler(EngineShape(**SHAPE | shape, page_size=SIZE), self.prefixes)
        self.postprocessor = Postprocessor(self, self.scheduler)
        self.late, self.namespace = late, "namespace" if share else None
        self.depth = depth or (lambda sequence, index: min(sequence.iterations, 1 + index % 3))
        self.in_flight, self.progress = None, {}
        self.preempted, self.finished, self.lost = [], [], []
        self.requests, self.clients = 0, {}
        self._preempt, self.scheduler._preempt = self.scheduler._preempt, self._record_preemption

    @property
    def waiting(self):
        return [sequence for queue in self.scheduler.queues.values() for sequence in queue]

    def add(self, prompt, new, *, iterations=3, samples=1, depths=None, client=""):
        tokens = prompt if isinstance(prompt, list) else [self.requests + 10] * prompt
        request = Request(tokens, max_new_tokens=new, samples=samples, depths=depths, client=client)
        number, self.requests = self.requests, self.requests + 1
        self.clients[number] = client
        submission = Submission(request, number, FixedDepth(3), iterations, self.namespace, self.scheduler.shape)
        self.scheduler.add(submission.samples)
        return submission.samples

    def step(self):
        plan = self.scheduler.schedule()
        self.check(plan)
        launch = None if plan.empty else self.launch(plan)
        before, self.in_flight = self.in_flight, launch
        events = [] if before is None else self.postprocessor.process(before)
        if launch is not None and not self.late:
            self.in_flight = None
            events += self.postprocessor.process(launch)
        self.finished += [event.request for event in events if event.completion is not None]
        return plan

    def launch(self, plan):
        for sequence in plan.starting:
            self.progress[sequence] = (len(sequence.tokens) - 1, 0)
        ticks = [[self.decode(sequence) for sequence in plan.decoding] for _ in range(plan.ticks)]
        tokens = torch.tensor(ticks, dtype=torch.long).view(plan.ticks, len(plan.decoding))
        decoding = [(sequence, sequence.kv) for sequence in plan.decoding]
        launch = Launch(decoding, plan.ticks, (tokens, Extras()))
        for chunk in plan.chunks:
            active = [chunk.iteration + 1 < self.depth(chunk.sequence, index) for index in chunk.tokens]
            launch.chunks.append((chunk, torch.tensor(active), None))
        return launch

    def decode(self, sequence):
        index, iteration = self.progress[sequence]
        halts = iteration + 1 >= self.depth(sequence, index)
        self.progress[sequence] = (index + 1, 0) if halts else (index, iteration + 1)
        return 1 if halts else -1

    def check(self, plan):
        """Asserts the invariants of every plan."""
        resident, waiting = self.scheduler.resident, self.waiting
        assert plan.resident == resident
        assert {sequence.lane for sequence in resident.values()} == set(resident)
        assert not set(resident) & set(self.scheduler._free_lanes)
        for sequence in [*resident.values(), *waiting]:
            assert all(self.pages._holders[page] for page in sequence.kv.pages()), "a page in use was freed"
        own = [page for sequence in resident.values() for page in sequence.kv.prefill.pages + sequence.kv.decode.pages]
        assert len(own) == len(set(own)), "two sequences write to one page"
        rows = [row for chunk in plan.chunks for row in chunk.rows]
        assert len(rows) == len(set(rows))
        assert sum(len(chunk.rows) for chunk in plan.chunks if not chunk.iteration) <= self.scheduler.shape.chunk
        for chunk in plan.chunks:
            assert all(row // SIZE in chunk.sequence.kv.prefill.pages for row in chunk.rows)
            assert chunk.sequence.lane is not None
            earlier = chunk.sequence.chunks[: chunk.sequence.chunks.index(chunk)]
            assert all(other.launched >= chunk.iteration for other in earlier), "a chunk overtakes an earlier one"
        for sequence in plan.decoding:
            assert not sequence.chunks, "it decodes before its prefill is complete"
            assert sequence.num_scheduled == sequence.num_prefill or sequence not in plan.starting
            assert sequence.kv.decode.room >= sequence.kv.in_flight, "rows that it may use are not allocated"

    def run(self, limit=3000):
        for _ in range(limit):
            if not self.waiting and not self.scheduler.resident and self.in_flight is None:
                break
            self.step()
        else:
            pytest.fail("it never ends")
        self.prefixes.clear()
        assert self.pages.held == 0
        assert not self.scheduler.queues
        assert not self.scheduler._turns

    def _record_preemption(self, sequence):
        self.preempted.append((sequence.order, [other.order for other in self.scheduler.resident.values()]))
        self.lost.append(sequence)
        self._preempt(sequence)

    def span(self, sequence, start, stop, pages):  # the runner's, for the postprocessor
        return Span(torch.zeros(3, stop - start), sequence.depths[start:stop], pages)


@pytest.mark.parametrize("seed", range(25))
def test_every_sequence_finishes(seed):
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
    sequences, cancelled = [], []
    for _ in range(14):
        prompt = draw.choice([draw.randint(1, 14), list(range(draw.randint(1, 14)))])
        client = draw.choice("aab" if seed % 2 else "a")
        sequences += stand.add(prompt, draw.randint(1, 8), samples=draw.choice([1, 1, 2]), client=client)
        for _ in range(draw.randint(0, 6)):
            stand.step()
        sequence = draw.choice(sequences)
        if draw.random() < 0.2 and sequence.state != FINISHED:
            stand.postprocessor.finish(sequence, "cancelled")
            cancelled.append(sequence)
    stand.run()
    assert len(stand.scheduler._free_lanes) == len(set(stand.scheduler._free_lanes))
    for sequence in sequences:
        assert sequence.state == FINISHED
        depths = [stand.depth(sequence, index) for index in range(len(sequence.depths))]
        partly = sequence in cancelled and all(map(lambda found, true: found in (0, true), sequence.depths, depths))
        assert sequence.depths == depths or partly


@pytest.mark.parametrize("sizes", [[(3, 4), (9, 4), (1, 4), (5, 4), (2, 4)], [(8, 4), (20, 8), (1, 1)]])
def test_sequences_get_lanes_in_order_of_arrival(sizes):
    """A small sequence does not overtake a larger one that does not fit yet."""
    stand = StandIn(lanes=2)
    sequences = [stand.add(prompt, new)[0] for prompt, new in sizes]
    while stand.waiting:
        stand.step()
        admitted = [sequence.state != WAITING for sequence in sequences]
        assert admitted == sorted(admitted, reverse=True)
    stand.run()


def test_smaller_depths_admit_more_sequences():
    def residents(mean):
        stand = StandIn(lanes=20, rows=200)
        for _ in range(12):
            stand.add(8, 5)
        stand.scheduler.record_depth(stand.waiting[0].submission.kind, 100, int(100 * mean))
        stand.step()
        return len(stand.scheduler.resident)

    assert [residents(3), residents(2), residents(1)] == [4, 6, 10]


def test_expected_rows():
    """The maximum depth until 32 tokens of the kind are known, then their mean; forced depths are known at once."""
    stand = StandIn()
    (sequence,) = stand.add(8, 5)
    (forced,) = stand.add(8, 5, depths=[1, 2] * 6)
    assert stand.scheduler.expected_rows(forced) == 18 + 2 * SIZE
    assert stand.scheduler.expected_rows(sequence) == 12 * 3 + 2 * SIZE
    stand.scheduler.record_depth(sequence.submission.kind, 31, 31)
    assert stand.scheduler.expected_depth(sequence) == 3
    stand.scheduler.record_depth(sequence.submission.kind, 1, 1)
    assert stand.scheduler.expected_rows(sequence) == 12 + 2 * SIZE


def test_slots_computed_in_one_pass_hold_one_row_each():
    """Pause tokens are such slots: a token has three of them where its request allows three iterations."""
    stand = StandIn(width=3, passes=1, burst=8)
    (sequence,) = stand.add(1, 2, iterations=3)
    assert stand.scheduler.expected_rows(sequence) == 2 * 3 + 2 * SIZE
    assert stand.scheduler.schedule().ticks == 2, "one for each token"


def test_mean_depths_are_kept_for_the_latest_kinds():
    stand = StandIn()
    (sequence,) = stand.add(8, 5)
    stand.scheduler.record_depth(sequence.submission.kind, 32, 32)
    for number in range(3000):
        stand.scheduler.record_depth(("another tau", number), 1, 1)
        stand.scheduler.record_depth(sequence.submission.kind, 0, 0)  # a chunk in which no token halts
    assert stand.scheduler.expected_depth(sequence) == 1
    assert len(stand.scheduler._depths) == 1024


@pytest.mark.parametrize("options", [{}, {"late": True, "burst": 2}, {"rows": 200}], ids=["at once", "late", "few"])
def test_a_short_request_takes_as_many_steps_as_alone_however_much_another_client_has_queued(options):
    def steps(load):
        stand = StandIn(**{"lanes": 3, "rows": 400, "chunk": 8} | options)
        stand.scheduler.expected_rows = lambda sequence: 0
        for _ in range(load):
            stand.add(20, 30, samples=4, client="greedy")
        for _ in range(40 if load else 0):
            stand.step()
        (short,) = stand.add(3, 4, client="modest")
        for number in range(1, 60):
            stand.step()
            if short.state == FINISHED:
                assert short not in stand.lost
                return number
        return 60

    assert steps(load=12) <= steps(load=0) + 1


def test_clients_take_turns():
    """With one lane, which no newcomer takes away; a new client is served before the one that has just been."""
    stand = StandIn(lanes=1, depth=lambda sequence, index: 1)
    for client, requests in (("a", 4), ("b", 2)):
        for _ in range(requests):
            stand.add(2, 2, client=client)
    stand.step()
    for _ in range(2):
        stand.add(2, 2, client="c")
    stand.run()
    assert [stand.clients[number] for number in stand.finished] == list("abcabcaa")
    assert stand.preempted == []


def test_lanes_are_shared_equally_and_a_client_alone_has_them_all():
    stand = StandIn(lanes=6, rows=2000, chunk=40)
    for client, requests in (("a", 20), ("b", 20), ("c", 1)):
        for _ in range(requests):
            stand.add(2, 40, client=client)
        stand.step()
    residents = Counter(sequence.client for sequence in stand.scheduler.resident.values())
    assert residents == {"a": 3, "b": 2, "c": 1}
    assert len(stand.preempted) == 4, "three for b, one more for c"


def test_pages_are_taken_from_the_client_with_the_most_sequences():
    stand = StandIn(lanes=3, rows=140, chunk=40)
    stand.scheduler.expected_rows = lambda sequence: 0
    for client in "aab":
        stand.add(12, 14, client=client)
    stand.run()
    assert {sequence.client for sequence in stand.lost} == {"a"}


def test_prefill_rows_are_shared_equally():
    stand = StandIn(lanes=3, rows=2000, chunk=8)
    stand.add(60, 1, client="a")
    stand.add(60, 1, client="a")
    stand.step()
    stand.add(30, 1, client="b")
    rows = {chunk.sequence.client: len(chunk.rows) for chunk in stand.step().chunks}
    assert rows["b"] == 4, "half of a tick's rows"
    stand.run()
    assert stand.finished[0] == 2


@pytest.mark.parametrize(("requests", "samples", "waiting", "resident"), [(3, 1, 1, 2), (1, 2, 1, 1)])
def test_most_resident_does_not_count_waiting_sequences(requests, samples, waiting, resident):
    stand = StandIn(lanes=4)
    for _ in range(requests):
        stand.add(8, 4, samples=samples)
    stand.step()
    assert (len(stand.waiting), stand.scheduler.most_resident) == (waiting, resident)


def test_cached_tokens_are_counted_once():
    stand = StandIn(lanes=2, share=True)
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


@pytest.mark.parametrize("late", [False, True])
def test_the_youngest_is_preempted_and_none_is_admitted_before_one_finishes(late):
    stand = StandIn(lanes=4, rows=64, late=late, burst=2)
    stand.scheduler.expected_rows = lambda sequence: 0
    for _ in range(6):
        stand.add(9, 9)
    stand.run()
    assert len(stand.preempted) >= 2
    assert all(order == max(residents) for order, residents in stand.preempted)
    assert stand.finished == sorted(stand.finished), "the older ones finish first"
    assert stand.scheduler.preemptions == len(stand.preempted) < 20


def test_a_waiting_sample_does_not_keep_pages_from_the_only_resident():
    """The sample is older, so it keeps its pages; the resident is preempted instead of waiting for ever."""
    stand = StandIn(lanes=2, rows=44, chunk=6)
    _, sample = stand.add(10, 1, samples=2)
    (other,) = stand.add(14, 6)
    stand.scheduler.expected_rows = lambda sequence: 10**6 if sequence is sample else 0
    stand.run(400)
    assert {other.state, sample.state} == {FINISHED}


def test_results_from_before_a_preemption_are_ignored():
    stand = StandIn(lanes=1, late=True)
    (sequence,) = stand.add(1, 5)
    stand.step()
    assert stand.in_flight is not None
    stand.scheduler._preempt(sequence)
    stand.step()
    assert sequence.completion.tokens == []
    stand.run()
    assert len(sequence.completion.tokens) == 5


def test_a_launch_has_one_tick_while_a_prompt_is_prefilled():
    stand = StandIn(lanes=2, rows=400, burst=4, depth=lambda sequence, index: 1)
    stand.add(1, 30)
    assert stand.step().ticks == 4
    stand.add(9, 12)
    assert stand.step().ticks == 1
    while any(sequence.state == PREFILLING for sequence in stand.scheduler.resident.values()):
        stand.step()
    assert stand.step().ticks == 4
    stand.run()


def test_a_chunk_waits_while_an_earlier_one_finds_no_page():
    """The earlier one needs three rows, of which two are left; the later one needs one at a time."""
    stand = StandIn(lanes=1, chunk=5, depth=lambda sequence, index: 3 if index in (2, 3, 4, 6) else 1)
    stand.add(8, 1)
    stand.step()
    stand.step()
    spare = stand.pages.take(stand.pages.free)
    (late,) = stand.step().chunks
    assert (late.tokens, late.launched) == ([6], 1)
    assert stand.step().chunks == []
    stand.pages.release(spare)
    stand.run()


def test_samples_wait_for_their_prompt_and_share_it():
    stand = StandIn(chunk=4, rows=200)
    samples = stand.add(9, 3, samples=3)
    stand.step()
    assert [sample.lane is not None for sample in samples] == [True, False, False]
    while samples[1].lane is None:
        stand.step()
    assert samples[1].kv.shared[0].pages == samples[2].kv.shared[0].pages
    assert samples[1].num_scheduled == 8
    assert samples[1].depths == samples[0].depths[:8]
    stand.run()
