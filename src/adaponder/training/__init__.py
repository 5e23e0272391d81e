"""From shards to a checkpoint: the two-stage algorithm on torch's own distributed engine."""
