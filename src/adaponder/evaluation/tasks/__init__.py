"""Tasks of lm-evaluation-harness: their data, the model that answers, and the scores."""
