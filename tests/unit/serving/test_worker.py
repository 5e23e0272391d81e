"""One thread owns the engine: its events reach the event loop, its failures reach only those they concern."""

from __future__ import annotations

import asyncio
import threading

import pytest

from adaponder import Engine, Request
from adaponder.errors import InputError
from adaponder.inference.outputs import Completion, Event, Token
from adaponder.serving.worker import UnavailableError, Worker
from serving_support import tiny_served
from support import tiny


class ScriptedEngine:
    """Says token 1 of each request in each step, and fails where it is told to."""

    eos_ids = frozenset()
    longest_request = 64

    def __init__(self, *, broken_steps: int = 0):
        self.broken_steps, self.requests, self.ended = broken_steps, {}, []
        self.threads: set[int] = set()

    @property
    def busy(self) -> bool:
        return bool(self.requests or self.ended)

    @property
    def statistics(self):
        return {"resident": len(self.requests)}

    def submit(self, request):
        self.threads.add(threading.get_ident())
        if request.salt == "refused":
            raise InputError("prompt: no")
        number = len(self.requests) + 100
        self.requests[number] = Completion(request, 0, list(request.prompt))
        return number

    def cancel(self, number, sample=None):
        completion = self.requests.pop(number, None)
        if completion is not None:
            completion.finish_reason = "cancelled"
            self.ended.append(Event(number, 0, completion=completion))

    def step(self):
        self.threads.add(threading.get_ident())
        if self.broken_steps:
            self.broken_steps -= 1
            for number in list(self.requests):
                completion = self.requests.pop(number)
                completion.finish_reason, completion.error = "error", "engine: broken off"
                self.ended.append(Event(number, 0, completion=completion))
            raise RuntimeError("a kernel failed")
        events, self.ended = self.ended, []
        for number, completion in list(self.requests.items()):
            completion.tokens.append(Token(1, 1))
            events.append(Event(number, 0, Token(1, 1)))
            if len(completion.tokens) == completion.request.max_new_tokens:
                completion.finish_reason = "length"
                events.append(Event(number, 0, completion=self.requests.pop(number)))
        return events


class Dead(ScriptedEngine):
    """Fails in every step."""

    def step(self):
        raise RuntimeError("the device is gone")


class Told:
    """A sink that keeps the events, and resolves ``end`` with the completion."""

    def __init__(self):
        self.events: list[Event] = []
        self.end = asyncio.get_running_loop().create_future()

    def __call__(self, events):
        if isinstance(events, Exception):
            self.end.set_exception(events)
            return
        self.events += events
        if any(event.completion is not None for event in events) and not self.end.done():
            self.end.set_result(self.events[-1].completion)


def one_part(function):
    """A job that does it all at once."""
    return function()
    yield


def counted(name, parts, done):
    """A job of so many parts; each says its name in ``done``."""
    try:
        for _ in range(parts - 1):
            done.append(name)
            yield
        done.append(name)
        return name
    finally:
        done.append(f"{name} ends")


def run(function, engine=None, **options):
    """Runs an async function with a worker over this engine."""

    async def main():
        worker = Worker(engine or (lambda: ScriptedEngine(**options)), tiny_served())
        worker.start()
        while worker.state == "starting":
            await asyncio.sleep(0.001)
        try:
            return await asyncio.wait_for(function(worker), 20)
        finally:
            await worker.stop()

    return asyncio.run(main())


def test_events_arrive_and_only_one_thread_touches_the_engine():
    engine = ScriptedEngine()

    async def main(worker):
        told = [Told() for _ in range(3)]
        for number, one in enumerate(told):
            worker.submit(Request([1], max_new_tokens=number + 1), one)
        assert worker.sequences == 3
        for one in told:
            await one.end
        assert [len(one.events) for one in told] == [2, 3, 4]
        assert worker.sequences == 0
        assert await worker.drained(1)

    run(main, engine)
    assert len(engine.threads) == 1
    assert threading.get_ident() not in engine.threads


def test_a_cancelled_request_is_told_no_more_and_leaves_the_engine():
    engine = ScriptedEngine()

    async def main(worker):
        told = Told()
        number = worker.submit(Request([1], max_new_tokens=10**9), told)
        while not told.events:
            await asyncio.sleep(0.001)
        worker.cancel(number)
        said = len(told.events)
        assert await worker.drained(5)
        assert len(told.events) == said
        assert not engine.busy
        assert worker.sequences == 0

    run(main, engine)


def test_what_the_engine_refuses_is_told_to_that_request_alone():
    async def main(worker):
        refused, other = Told(), Told()
        worker.submit(Request([1], salt="refused"), refused)
        worker.submit(Request([1], max_new_tokens=3), other)
        with pytest.raises(InputError, match="prompt: no"):
            await refused.end
        assert (await other.end).finish_reason == "length"

    run(main)


def test_a_step_that_breaks_ends_its_requests_and_the_engine_goes_on():
    async def main(worker):
        first = Told()
        worker.submit(Request([1], max_new_tokens=3), first)
        assert (await first.end).error == "engine: broken off"
        again = Told()
        worker.submit(Request([1], max_new_tokens=3), again)
        assert (await again.end).finish_reason == "length"
        assert worker.alive

    run(main, broken_steps=1)


def test_an_engine_that_breaks_for_good_is_given_up_and_nobody_waits():
    async def main(worker):
        told = Told()
        worker.submit(Request([1], max_new_tokens=3), told)
        with pytest.raises(UnavailableError, match="the device is gone"):
            await told.end
        assert worker.state == "broken"
        assert not worker.alive
        with pytest.raises(UnavailableError):
            worker.submit(Request([1]), Told())
        with pytest.raises(UnavailableError):
            await worker.job(one_part(lambda: 1))

    run(main, Dead)


def test_a_job_under_way_when_the_engine_breaks_for_good_is_told_so():
    done = []

    async def main(worker):
        job = worker.job(counted("long", 10**9, done))
        while len(done) < 3:
            await asyncio.sleep(0.001)
        worker.submit(Request([1], max_new_tokens=3), lambda events: None)
        finished, _ = await asyncio.wait({job}, timeout=5)
        assert finished, "the job still waits"
        assert isinstance(job.exception(), UnavailableError)
        assert await worker.drained(1)

    run(main, Dead)
    assert done[-1] == "long ends"


def test_an_engine_that_cannot_be_opened_says_why():
    def fails():
        raise InputError("rows=3: too few")

    async def main(worker):
        assert worker.state == "broken"
        assert "rows=3: too few" in worker.problem

    run(main, fails)


def test_a_sink_that_raises_harms_nobody_else():
    engine = ScriptedEngine()

    async def main(worker):
        def raises(events):
            raise ValueError("a fault of the text's")

        worker.submit(Request([1], max_new_tokens=10**9), raises)
        other = Told()
        worker.submit(Request([1], max_new_tokens=5), other)
        assert (await other.end).finish_reason == "length"
        assert await worker.drained(5)
        assert not engine.busy

    run(main, engine)


def test_jobs_run_between_steps_and_their_errors_come_back():
    async def main(worker):
        told = Told()
        number = worker.submit(Request([1], max_new_tokens=10**9), told)
        assert await worker.job(one_part(threading.get_ident)) != threading.get_ident()
        with pytest.raises(ZeroDivisionError):
            await worker.job(one_part(lambda: 1 // 0))
        worker.cancel(number)
        assert worker.jobs == 0

    run(main)


def test_between_two_parts_of_a_job_the_engine_steps_and_others_take_their_turn():
    engine = ScriptedEngine()

    async def main(worker):
        told, done, steps = Told(), [], []
        number = worker.submit(Request([1], max_new_tokens=10**9), told)
        while not told.events:
            await asyncio.sleep(0.001)

        def noting():
            for _ in range(20):
                steps.append(len(next(iter(engine.requests.values())).tokens))
                yield

        await worker.job(noting())
        assert len(set(steps)) == len(steps)
        jobs = [worker.job(counted(name, parts, done)) for name, parts in (("long", 60), ("a", 2), ("b", 1))]
        assert await asyncio.gather(*jobs) == ["long", "a", "b"]
        assert done.index("b ends") < done.index("a ends") < 12
        assert done[-1] == "long ends"
        worker.cancel(number)

    run(main, engine)


def test_a_job_whose_caller_left_ends_at_its_next_part():
    async def main(worker):
        done = []
        task = worker.job(counted("long", 10**9, done))
        while len(done) < 3:
            await asyncio.sleep(0.001)
        task.cancel()
        assert await worker.drained(5)
        while done[-1] != "long ends":
            await asyncio.sleep(0.001)

    run(main)


def test_requests_and_jobs_that_outlast_the_server_are_told_so():
    running, done = [], []

    async def main(worker):
        running.append(Told())
        worker.submit(Request([1], max_new_tokens=10**9), running[0])
        job = worker.job(counted("long", 10**9, done))
        while len(done) < 3:
            await asyncio.sleep(0.001)
        assert not await worker.drained(0.05)
        await worker.stop()
        with pytest.raises(UnavailableError, match="stopping"):
            await asyncio.wait_for(job, 5)

    run(main)
    with pytest.raises(UnavailableError, match="stopping"):
        running[0].end.result()
    assert done[-1] == "long ends"


def test_the_model_waits_for_an_event_loop_that_falls_behind():
    engine = ScriptedEngine()

    async def main(worker):
        told = Told()
        number = worker.submit(Request([1], max_new_tokens=10**9), told)
        while not told.events:
            await asyncio.sleep(0.001)
        before = len(told.events)
        threading.Event().wait(0.3)  # the loop does nothing else
        made = len(next(iter(engine.requests.values())).tokens)
        assert made - before <= 10
        worker.cancel(number)

    run(main, engine)


def test_one_sample_may_be_finished_before_the_others():
    async def main(worker):
        told = Told()
        number = worker.submit(Request([1, 2, 3], max_new_tokens=40, samples=3, ignore_eos=True), told)
        while not told.events:
            await asyncio.sleep(0.001)
        worker.finish(number, 1)
        assert await worker.drained(20)
        ends = {event.sample: event.completion for event in told.events if event.completion is not None}
        assert [ends[sample].finish_reason for sample in range(3)] == ["length", "cancelled", "length"]
        assert len(ends[1].tokens) < 40 == len(ends[0].tokens) == len(ends[2].tokens)

    run(main, Engine(tiny(), lanes=4))
