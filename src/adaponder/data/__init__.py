"""Turns text into tokens, tokens into shards, shards into batches; each step can be stopped, repeated and checked."""

from adaponder.data.manifest import DataError, Manifest
from adaponder.data.sampler import Batch, Sampler, read_windows
from adaponder.data.shards import Shards

__all__ = ["Batch", "DataError", "Manifest", "Sampler", "Shards", "read_windows"]
