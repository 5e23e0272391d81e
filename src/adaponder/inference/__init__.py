"""Continuous batching over sequences and depth: see :class:`adaponder.inference.engine.Engine`."""

from adaponder.inference.engine import Engine
from adaponder.inference.outputs import Completion, Event, PromptToken, Token
from adaponder.inference.request import Request

__all__ = ["Completion", "Engine", "Event", "PromptToken", "Request", "Token"]
