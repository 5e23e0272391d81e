"""Checkpoints of other formats: opened, converted, narrowed and exported, each with an equality check."""
