"""The inference engine, :class:`adaponder.inference.engine.Engine`: continuous batching over sequences and depth."""

from adaponder.inference.engine import Engine
from adaponder.inference.outputs import Completion, Event, PromptToken, Token
from adaponder.inference.request import Request

__all__ = ["Completion", "Engine", "Event", "PromptToken", "Request", "Token"]
