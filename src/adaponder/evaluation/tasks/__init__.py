"""Runs tasks of lm-evaluation-harness: reads their data, implements the model interface, collects the scores."""
