"""One thread owns the engine: its events reach the event loop, and a failure reaches only the requests it concerns."""

import asyncio
import threading

import pytest

from adaponder import Engine, Request
from adaponder.errors import InputError
from adaponder.inference.outputs import Event
from adaponder.serving.worker import UnavailableError, Worker
from benchmarks.stand_in import SleepingEngine
from serving_support import tiny_served
from support import tiny

MODEL, ENDLESS = tiny(), 10**9


class ScriptedEngine(SleepingEngine):
    """Takes requests of any length and does not sleep; the first ``broken_steps`` steps fail."""

    def __init__(self, *, broken_steps: int = 0):
        super().__init__(MODEL, tick=0.0)
        self.tokens = self.longest_request = 2 * ENDLESS
        self.broken_steps, self.threads = broken_steps, set()

    def submit(self, request):
        self.threads.add(threading.get_ident())
        return super().submit(request)

    def step(self):
        self.threads.add(threading.get_ident())
        if not self.broken_steps:
            return super().step()
        self.broken_steps -= 1
        for key, (completion, _) in list(self._samples.items()):
            completion.error = "engine: broken off"
            self._end(key, "error")
        raise RuntimeError("the device is gone")

    def generated(self) -> int:
        return len(next(iter(self._samples.values()))[0].tokens)


def dead():
    return ScriptedEngine(broken_steps=ENDLESS)


class Sink:
    """Keeps the events, and resolves ``end`` with the completion."""

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


def submit(worker, new_tokens=3, **settings):
    sink = Sink()
    return sink, worker.submit(Request([1], max_new_tokens=new_tokens, **settings), sink)


async def until(condition):
    while not condition():
        await asyncio.sleep(0.001)


def one_part(function):
    """Returns a job that calls the function in its only part."""
    return function()
    yield


def counted(name, parts, done):
    """A job of several parts; each appends the name to ``done``."""
    try:
        for _ in range(parts - 1):
            done.append(name)
            yield
        done.append(name)
        return name
    finally:
        done.append(f"{name} ends")


def with_worker(make=ScriptedEngine):
    """Runs an async test with a worker and its engine."""

    async def main(test):
        engine = make()
        worker = Worker(lambda: engine, tiny_served())
        worker.start()
        await until(lambda: worker.state != "starting")
        try:
            await asyncio.wait_for(test(worker, engine), 20)
        finally:
            await worker.stop()

    return lambda test: lambda: asyncio.run(main(test))


@with_worker()
async def test_events_arrive_and_only_one_thread_touches_the_engine(worker, engine):
    sinks = [submit(worker, count)[0] for count in (1, 2, 3)]
    assert worker.sequences == 3
    for sink in sinks:
        await sink.end
    assert [len(sink.events) for sink in sinks] == [2, 3, 4]
    assert await worker.drained(1)
    assert (worker.sequences, len(engine.threads), threading.get_ident() in engine.threads) == (0, 1, False)


@with_worker()
async def test_cancelled_request_gets_no_events_and_leaves_the_engine(worker, engine):
    sink, ticket = submit(worker, ENDLESS)
    await until(lambda: sink.events)
    worker.cancel(ticket)
    count = len(sink.events)
    assert await worker.drained(5)
    assert (len(sink.events), engine.busy, worker.sequences) == (count, False, 0)


@with_worker()
async def test_refusal_concerns_its_request_only(worker, engine):
    (refused, _), (other, _) = submit(worker, temperature=-1.0), submit(worker)
    with pytest.raises(InputError):
        await refused.end
    assert (await other.end).finish_reason == "length"


@with_worker()
async def test_failed_steps_that_are_not_in_a_row_do_not_stop_the_engine(worker, engine):
    for _ in range(4):
        engine.broken_steps = 1
        for error in ("engine: broken off", None):
            sink = submit(worker)[0]
            await asyncio.wait({sink.end})
            assert sink.end.exception() is None
            assert sink.end.result().error == error


@pytest.mark.parametrize(
    ("state", "fails", "after"),
    [
        ("draining", False, "draining"),
        ("draining", True, "broken"),
        ("stopped", False, "stopped"),
        ("stopped", True, "stopped"),
    ],
    ids=["draining-opens", "draining-fails", "stopped-opens", "stopped-fails"],
)
def test_an_engine_that_opens_late_does_not_change_a_worker_that_ends(state, fails, after):
    async def main():
        opened = threading.Event()

        def make():
            opened.wait(20)
            return 1 // 0 if fails else ScriptedEngine()

        worker = Worker(make, tiny_served())
        worker.start()
        end = asyncio.ensure_future(worker.drained(0) if state == "draining" else worker.stop())
        await until(lambda: worker.state == state)
        opened.set()
        await end
        if state == "draining":
            await until(lambda: worker.state == "broken" or worker.longest_request > ENDLESS)
        await asyncio.sleep(0.01)
        assert worker.state == after
        await worker.stop()

    asyncio.run(asyncio.wait_for(main(), 20))


@with_worker(dead)
async def test_dead_engine_is_given_up_and_nothing_waits_for_it(worker, engine):
    with pytest.raises(UnavailableError, match="the device is gone"):
        await submit(worker)[0].end
    assert (worker.state, worker.alive) == ("broken", False)
    for work in (lambda: submit(worker), lambda: worker.job(one_part(lambda: 1))):
        with pytest.raises(UnavailableError):
            work()


@with_worker(dead)
async def test_job_fails_when_the_engine_breaks_for_good(worker, engine):
    done = []
    job = worker.job(counted("long", ENDLESS, done))
    await until(lambda: len(done) >= 3)
    worker.submit(Request([1]), lambda events: None)
    finished, _ = await asyncio.wait({job}, timeout=5)
    assert finished, "the job still waits"
    assert isinstance(job.exception(), UnavailableError)
    assert await worker.drained(1)
    assert done[-1] == "long ends"


@with_worker()
async def test_sink_that_raises_fails_its_request_only(worker, engine):
    def raises(events):
        raise ValueError("cannot decode")

    worker.submit(Request([1], max_new_tokens=ENDLESS), raises)
    assert (await submit(worker, 5)[0].end).finish_reason == "length"
    assert await worker.drained(5)
    assert not engine.busy


@with_worker()
async def test_jobs_take_turns_with_steps_and_with_each_other(worker, engine):
    done, steps = [], []
    sink, ticket = submit(worker, ENDLESS)
    await until(lambda: sink.events)
    assert await worker.job(one_part(threading.get_ident)) != threading.get_ident()
    with pytest.raises(ZeroDivisionError):
        await worker.job(one_part(lambda: 1 // 0))

    def noting():
        for _ in range(20):
            steps.append(engine.generated())
            yield

    await worker.job(noting())
    assert len(set(steps)) == len(steps)
    jobs = [worker.job(counted(name, parts, done)) for name, parts in (("long", 60), ("a", 2), ("b", 1))]
    assert await asyncio.gather(*jobs) == ["long", "a", "b"]
    assert done.index("b ends") < done.index("a ends") < 12
    assert done[-1] == "long ends"
    worker.cancel(ticket)


@with_worker()
async def test_cancelled_job_ends_at_its_next_part(worker, engine):
    done = []
    job = worker.job(counted("long", ENDLESS, done))
    await until(lambda: len(done) >= 3)
    job.cancel()
    assert await worker.drained(5)
    await until(lambda: done[-1] == "long ends")


@with_worker()
async def test_stop_fails_unfinished_requests_and_jobs(worker, engine):
    done = []
    sink, _ = submit(worker, ENDLESS)
    job = worker.job(counted("long", ENDLESS, done))
    await until(lambda: len(done) >= 3)
    assert not await worker.drained(0.05)
    await worker.stop()
    for future in (job, sink.end):
        with pytest.raises(UnavailableError, match="stopping"):
            await asyncio.wait_for(future, 5)
    assert done[-1] == "long ends"


@with_worker()
async def test_engine_waits_for_an_event_loop_that_falls_behind(worker, engine):
    sink, ticket = submit(worker, ENDLESS)
    await until(lambda: sink.events)
    before = len(sink.events)
    threading.Event().wait(0.1)  # blocks the event loop
    assert engine.generated() - before <= 10
    worker.cancel(ticket)


@with_worker(lambda: Engine(tiny(), lanes=4))
async def test_one_sample_may_be_finished_before_the_others(worker, engine):
    sink, ticket = submit(worker, 40, samples=3, ignore_eos=True)
    await until(lambda: sink.events)
    worker.finish(ticket, 1)
    assert await worker.drained(20)
    ends = {event.sample: event.completion for event in sink.events if event.completion is not None}
    assert [ends[sample].finish_reason for sample in range(3)] == ["length", "cancelled", "length"]
    assert len(ends[1].tokens) < 40 == len(ends[0].tokens) == len(ends[2].tokens)
