"""One folder per operation: the same signature in every implementation, the plain one first."""
