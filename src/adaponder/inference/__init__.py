"""Continuous batching over sequences and depth: see :class:`adaponder.inference.engine.Engine`."""
