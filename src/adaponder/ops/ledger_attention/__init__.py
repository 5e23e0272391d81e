"""Attention of rows at any iteration, through an index into pools of keys and values."""

from adaponder.ops.ledger_attention.choice import decode_attention, enter, ledger_attention
from adaponder.ops.ledger_attention.entry import Projection, Turn
from adaponder.ops.ledger_attention.scratch import Scratch, scratch_for
from adaponder.ops.ledger_attention.torch import Cohort, LedgerRows, Tiles

__all__ = [
    "Cohort",
    "LedgerRows",
    "Projection",
    "Scratch",
    "Tiles",
    "Turn",
    "decode_attention",
    "enter",
    "ledger_attention",
    "scratch_for",
]
