"""Checkpoints of other formats opened and converted, with an equality check."""
