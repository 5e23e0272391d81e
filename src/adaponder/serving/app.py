"""Builds the ASGI app: access control, metrics and body limits around FastAPI's routes, and errors in OpenAI's form."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import ASGIApp

from adaponder.errors import AdaPonderError
from adaponder.serving.access import AccessControl, BodyLimits
from adaponder.serving.metrics import Metrics, RequestMetrics
from adaponder.serving.protocol import ApiError, as_api_error
from adaponder.serving.routes import Context, add_routes
from adaponder.serving.scores import ScoreWriter
from adaponder.serving.settings import Settings
from adaponder.serving.worker import Worker
from adaponder.version import __version__


def make_app(worker: Worker, settings: Settings | None = None) -> ASGIApp:
    """Returns the server as an ASGI app; its lifespan starts the worker, and at the end waits for running requests."""
    settings = settings or Settings()
    metrics = Metrics(worker, settings.lanes)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        worker.start()
        yield
        await worker.drained(settings.limits.drain_seconds)
        await worker.stop()

    app = FastAPI(
        title="AdaPonder",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    add_routes(app, Context(worker, settings, metrics, ScoreWriter(worker.served)))
    for kind in (ApiError, AdaPonderError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, _on_error)
    routes: list[Any] = app.routes
    with_body = {route.path for route in routes if "POST" in route.methods}
    limited = BodyLimits(app, with_body, settings.limits)
    measured = RequestMetrics(limited, metrics, {route.path for route in routes if "{" not in route.path})
    return AccessControl(measured, settings, worker)


async def _on_error(request: HttpRequest, problem: Exception) -> Response:
    return as_api_error(problem).response()
