"""Turns token ids into text as they are generated: whole characters, up to a stop string."""

from adaponder.text.chat import chat_ids, chat_text, has_template, render_chat
from adaponder.text.detokenizer import Detokenizer, pieces
from adaponder.text.engine import TextEngine, TextEvent, Writing, Writings, encode
from adaponder.text.spelling import Spelled, TokenSpeller, token_texts
from adaponder.text.stops import StopStrings
from adaponder.text.stream import Piece, TextStream

__all__ = [
    "Detokenizer",
    "Piece",
    "Spelled",
    "StopStrings",
    "TextEngine",
    "TextEvent",
    "TextStream",
    "TokenSpeller",
    "Writing",
    "Writings",
    "chat_ids",
    "chat_text",
    "encode",
    "has_template",
    "pieces",
    "render_chat",
    "token_texts",
]
