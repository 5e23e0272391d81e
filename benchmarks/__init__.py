"""Measures speed and memory: ``python -m benchmarks train|prefill|decode|serve|ops`` from a checkout."""
