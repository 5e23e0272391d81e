"""Holds the version, which is written in no other place."""

__version__ = "0.2.0"
