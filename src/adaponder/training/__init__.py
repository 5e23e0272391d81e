"""Trains a model on token shards, on one process or many: stage 1 with cross-entropy, stage 2 with ponder loss too."""
