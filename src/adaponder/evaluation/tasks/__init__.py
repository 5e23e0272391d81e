"""Tasks of lm-evaluation-harness: their records, the model interface, and the scores."""
