"""What the benchmarks' tests share."""

from types import SimpleNamespace

import pytest

from adaponder.bench import timing


@pytest.fixture(autouse=True, scope="session")
def _no_collecting():
    """Between two figures of a benchmark everything is collected: half a second each, with all that tests import."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing, "gc", SimpleNamespace(collect=lambda: 0))
        yield
