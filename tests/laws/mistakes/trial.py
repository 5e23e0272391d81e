"""Tests run against a copy of the source, each copy in a process forked from one that has its libraries loaded."""

import importlib
import json
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from mistakes.catalogue import FOLDERS, ROOT, TESTS, Mistake

# What the package and its tests load; adaponder itself must not be there before a child has chosen which one.
_LIBRARIES = ("hypothesis", "pytest", "rich.console", "tokenizers", "torch._dynamo", "triton", "typer")
_MODELS = ("gpt_neox", "llama")
WHOLE = "tests"  # what stands in the place of a test's name when the whole run broke
LIMIT = 180  # seconds for each named test: a mistake may make a loop endless


@dataclass
class Outcome:
    """What the tests did.

    Attributes:
        passed: tests that passed.
        refuted: tests that failed by an assertion, with its first line.
        broken: tests, or files, or the whole run, that failed in any other way, with the error's first line.
    """

    passed: list[str] = field(default_factory=list)
    refuted: dict[str, str] = field(default_factory=dict)
    broken: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    log: str = ""

    def survived(self, named: tuple[str, ...]) -> list[str]:
        """Why the mistake is not caught: each named test that did not fail by an assertion, and what it did."""
        caught = {name for name in named if WHOLE not in self.broken and self.of(name, self.refuted)}
        return [f"{name} {self._did(name)}" for name in named if name not in caught]

    def unsound(self, named: tuple[str, ...]) -> list[str]:
        """Why the tests say nothing: each named test that does not pass although nothing is wrong."""
        failed = self.refuted | self.broken
        wrong = (name for name in named if self.of(name, failed) or not self.of(name, self.passed))
        return [f"{name} {self._did(name)}" for name in wrong]

    def of(self, name: str, tests: list[str] | dict[str, str]) -> list[str]:
        """Those of ``tests`` that a name stands for: itself, all its parameters, or the file or run it belongs to."""
        full = f"tests/{name}"
        itself = (WHOLE, full.split("::")[0], full)
        return [test for test in tests if test in itself or test.startswith(f"{full}[")]

    def _did(self, name: str) -> str:
        for failed in (self.broken, self.refuted):
            if found := self.of(name, failed):
                return f"failed by {failed[found[0]]}"
        return "passed" if self.of(name, self.passed) else "did not run"


class Watch:
    """A pytest plugin that writes down how each test ended."""

    def __init__(self) -> None:
        self.outcome = Outcome()

    def pytest_runtest_logreport(self, report) -> None:
        if report.passed and report.when == "call":
            self.outcome.passed.append(report.nodeid)

    def pytest_exception_interact(self, node, call, report) -> None:
        error = call.excinfo.value
        kind = self.outcome.refuted if call.when == "call" and _asserts(error) else self.outcome.broken
        kind[node.nodeid] = f"{type(error).__name__}: {error}".splitlines()[0]


class FirstExample:
    """A pytest plugin: that a test fails is asked, not on which smallest example of hypothesis."""

    def pytest_configure(self) -> None:
        from hypothesis import Phase, settings

        phases = (Phase.explicit, Phase.generate)
        settings.register_profile("mistakes", settings.get_profile("adaponder"), phases=phases)
        settings.load_profile("mistakes")


def _asserts(error: BaseException) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return all(_asserts(one) for one in error.exceptions)
    # pytest's own: an exception that was expected and did not come, or an explicit failure.
    return isinstance(error, AssertionError) or type(error).__name__ == "Failed"


def warm() -> None:
    """Loads what every child would load for itself."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRITON_INTERPRET", "1")  # as tests/conftest.py does without a GPU
    for name in (*_LIBRARIES, *(f"transformers.models.{model}.modeling_{model}" for model in _MODELS)):
        importlib.import_module(name)
    if "adaponder" in sys.modules:
        raise RuntimeError("adaponder is loaded already: a copy of it could not be")


def run(trials: list[tuple[Mistake | None, tuple[str, ...]]], jobs: int) -> Iterator[tuple[int, Outcome]]:
    """(index, outcome) of each trial as it ends, ``jobs`` at a time: a mistake, or none, and the tests to run."""
    waiting = list(enumerate(trials))[::-1]
    running: dict[int, tuple[int, _Child]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                index, (mistake, tests) = waiting.pop()
                child = _Child(mistake, tests)
                running[child.process.sentinel] = (index, child)
            ended = wait(list(running), timeout=1.0)
            late = [key for key, (_, child) in running.items() if time.monotonic() > child.deadline]
            for key in {*ended, *late}:
                index, child = running.pop(key)
                yield index, child.end(stop=key not in ended)
    finally:
        for _, child in running.values():
            child.end(stop=True)


class _Child:
    """A process with a copy of the source of its own."""

    def __init__(self, mistake: Mistake | None, tests: tuple[str, ...]):
        self.folder = Path(tempfile.mkdtemp(prefix="mistake-"))
        self.began = time.monotonic()
        self.deadline = self.began + LIMIT * len(tests)
        context = multiprocessing.get_context("fork")
        self.process: BaseProcess = context.Process(target=_child, args=(self.folder, mistake, tests))
        self.process.start()

    def end(self, *, stop: bool) -> Outcome:
        """What it found; a child that still runs is stopped."""
        if stop:
            with suppress(ProcessLookupError):  # it had no time yet to lead a group of its own
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.kill()
        self.process.join()
        result, log = self.folder / "outcome.json", self.folder / "log"
        if result.exists() and not stop:
            outcome = Outcome(**json.loads(result.read_text()))
        else:
            limit, code = self.deadline - self.began, self.process.exitcode
            outcome = Outcome(broken={WHOLE: f"no end within {limit:.0f} s" if stop else f"death, exit code {code}"})
        outcome.seconds = time.monotonic() - self.began
        outcome.log = log.read_text(errors="replace") if log.exists() else ""
        shutil.rmtree(self.folder)
        return outcome


def _child(folder: Path, mistake: Mistake | None, tests: tuple[str, ...]) -> None:
    os.setsid()  # so that it can be stopped with whatever its tests start
    with open(folder / "log", "wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    for code in FOLDERS.values():
        shutil.copytree(ROOT / code, folder / code, ignore=shutil.ignore_patterns("__pycache__"))
    if mistake is not None:
        mistake.plant(folder)
    source = folder / "src"
    sys.path[:0] = [str(source), str(folder)]
    os.environ["PYTHONPATH"] = os.pathsep.join((str(source), str(folder)))  # for the processes that tests start
    os.chdir(ROOT)
    for package in filter(None, FOLDERS):  # now: pytest will put the checkout, which has them too, first on the path
        importlib.import_module(package)
    import pytest

    watch = Watch()
    quiet = ["-q", "--tb=short", "--disable-warnings", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "not gpu"]
    pytest.main([*quiet, f"--rootdir={ROOT}", *(str(TESTS / name) for name in tests)], plugins=[watch, FirstExample()])
    loaded = sys.modules.get("adaponder")
    if loaded is None or not str(loaded.__file__).startswith(str(source)):
        watch.outcome.broken[WHOLE] = "the tests did not load the copy of the source"
    found = {name: getattr(watch.outcome, name) for name in ("passed", "refuted", "broken")}
    (folder / "outcome.json").write_text(json.dumps(found))
