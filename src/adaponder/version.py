"""Holds the version, which is written in no other place."""

__version__ = "0.1.0"
