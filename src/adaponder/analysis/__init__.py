"""Records the scores of a text in a table (trace), and draws figures from tables without running a model."""
