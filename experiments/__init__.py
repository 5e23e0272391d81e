"""Tests the paper's claims with a queue of training runs: trains runs, records them, and judges the claims.

Run: one training with one seed. Setting: the recipe, changed fields, corpus and source run that seeds share. Claim: a
named sentence in ``queue.yaml`` with the runs that test it. Statement: a sentence in ``claims.yaml`` with tests that
judge it. Record: the JSON file that a run leaves. Curve: the losses of models trained separately at fixed depths,
joined by lines. Dial: the halting policy of one trained checkpoint, tuned to other mean depths.
"""
