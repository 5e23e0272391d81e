"""Turns text and conversations into token ids, and generated ids into text."""

from adaponder.text.engine import TextEngine, TextEvent, Writing, start_writings
from adaponder.text.prompts import chat_ids, chat_text, encode, has_template
from adaponder.text.spelling import TokenSpeller
from adaponder.text.stream import Detokenizer, TextStream, pieces

__all__ = [
    "Detokenizer",
    "TextEngine",
    "TextEvent",
    "TextStream",
    "TokenSpeller",
    "Writing",
    "chat_ids",
    "chat_text",
    "encode",
    "has_template",
    "pieces",
    "start_writings",
]
