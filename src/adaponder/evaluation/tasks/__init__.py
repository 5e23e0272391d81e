"""Runs tasks of lm-evaluation-harness: reads their records, implements the model interface, collects the scores."""
