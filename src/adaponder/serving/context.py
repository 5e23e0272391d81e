"""What every route is given: the worker, its model, the limits and the figures."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import Request as HttpRequest

from adaponder.serving.metrics import Metrics
from adaponder.serving.scores import Scores
from adaponder.serving.served import Served
from adaponder.serving.settings import Limits, Settings
from adaponder.serving.worker import Worker

# Where access.py leaves what it knows of a client.
SALT = "adaponder.salt"


@dataclass(frozen=True, eq=False)
class Context:
    """All that a route needs.

    Attributes:
        lanes: of the engine.
        scores: texts that have been scored; the worker's thread alone uses it.
    """

    worker: Worker
    settings: Settings
    lanes: int
    metrics: Metrics
    scores: Scores

    @property
    def served(self) -> Served:
        return self.worker.served

    @property
    def limits(self) -> Limits:
        return self.settings.limits


def salt_of(request: HttpRequest) -> str:
    """Of the client's key; whose prefixes it may share."""
    return request.scope.get(SALT, "")
