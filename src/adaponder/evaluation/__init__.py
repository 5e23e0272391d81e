"""What a checkpoint is worth and what it costs: the same tokens, the same meter, for every method."""
