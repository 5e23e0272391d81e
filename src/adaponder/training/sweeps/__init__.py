"""Sweeps: many runs of one recipe, planned, run and compared."""
