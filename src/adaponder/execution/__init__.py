"""Runs the passes of a forward and stores their rows: over all tokens with masks, or over active tokens only."""
