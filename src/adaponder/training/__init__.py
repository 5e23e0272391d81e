"""Trains a model from token shards to a checkpoint: the two-stage algorithm, on ``torch.distributed``."""
