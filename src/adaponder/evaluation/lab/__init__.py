"""Compares policies at equal mean depth, calibrates thresholds, and stores them as profiles."""
