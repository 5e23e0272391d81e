"""Opens, converts, quantises and exports checkpoints, stock decoders and PonderLM included."""
