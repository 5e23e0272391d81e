"""From token ids to text as they come: whole characters only, and nothing beyond a stop string."""

from adaponder.text.chat import chat_ids, chat_text, has_template, written
from adaponder.text.detokenizer import Detokenizer, pieces
from adaponder.text.engine import TextEngine, TextEvent, Writing, Writings, encode
from adaponder.text.stops import StopStrings
from adaponder.text.stream import Piece, TextStream

__all__ = [
    "Detokenizer",
    "Piece",
    "StopStrings",
    "TextEngine",
    "TextEvent",
    "TextStream",
    "Writing",
    "Writings",
    "chat_ids",
    "chat_text",
    "encode",
    "has_template",
    "pieces",
    "written",
]
