"""A checkpoint folder on disk: read safely, verified by checksums, with one end token."""
