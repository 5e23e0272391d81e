"""Every test starts from the same place: no hub, one thread, silent libraries, kernels that run anywhere."""

import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parent))

import pytest
import torch
import transformers
from hypothesis import settings

torch.set_num_threads(1)
if not torch.cuda.is_available():
    # Without a GPU the kernels run in Triton's interpreter, which must be chosen before they are defined.
    os.environ.setdefault("TRITON_INTERPRET", "1")
transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
# Examples are derived from the test's name: the same on every machine and every run.
settings.register_profile("adaponder", deadline=None, derandomize=True, max_examples=20)
settings.load_profile("adaponder")
# A GPU machine may have the model's libraries alone; these files need others, and none has a test marked gpu.
_NEEDED = {
    "fastapi": ("browser", "serving", "unit/serving", "unit/benchmarks/test_serve.py", "unit/test_fields.py"),
    "lm_eval": ("unit/conversion/test_looped_use.py",),
    "peft": ("unit/checkpoints/test_manifest.py",),
    "accelerate": ("unit/conversion/test_exported.py",),
    "httpx": ("docs/test_commands.py",),
    "scipy": ("unit/experiments/test_demand_section.py",),
    "openai": ("contract/test_openai_client.py",),
    "datasets": ("unit/training/test_sft.py",),
}
collect_ignore = [path for library, paths in _NEEDED.items() if find_spec(library) is None for path in paths]


def pytest_configure(config: pytest.Config) -> None:
    """Leaves further cases out of ``-m gpu``, as ``make test`` does; ``-m "gpu and every"`` runs them."""
    if config.option.markexpr == "gpu":
        config.option.markexpr = "gpu and not every"


def pytest_report_header() -> str | None:
    return f"libraries are missing, left out: {', '.join(collect_ignore)}" if collect_ignore else None


@pytest.hookimpl(tryfirst=True)  # before cases are left out by their markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks all but each n-th case of a test marked ``one_of(n)`` with ``every``."""
    seen: Counter[str] = Counter()
    for item in items:
        if (marker := item.get_closest_marker("one_of")) is not None:
            test = item.nodeid.partition("[")[0]
            if seen[test] % marker.args[0]:
                item.add_marker("every")
            seen[test] += 1


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Lets SIGINT interrupt, also where the tests were started in the background, which leaves it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The prepared folder of made-up documents, which tests only read."""
    from training_support import corpus

    return corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> Callable[..., tuple[int, str, str]]:
    """Runs the command line's entry point; returns its exit code, standard output and standard error."""
    from adaponder import cli

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["adaponder", *arguments])
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            cli.main()
        return int(end.value.code or 0), *capsys.readouterr()

    return run
