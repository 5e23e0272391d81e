"""Checkpoint folders on disk: finds and loads them safely, verifies checksums, and aligns special tokens."""
