"""Runs the passes of a forward and keeps their rows: computes all tokens with masks, or active tokens only."""
