"""Turns text and conversations into token ids, and generated ids into text."""

from adaponder.text.engine import TextEngine, TextEvent, Writing, start_writings
from adaponder.text.prompts import chat_ids, chat_text, encode, has_template
from adaponder.text.spelling import Spelled, TokenSpeller, token_texts
from adaponder.text.stream import Detokenizer, Piece, TextStream, pieces

__all__ = [
    "Detokenizer",
    "Piece",
    "Spelled",
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
    "token_texts",
]
