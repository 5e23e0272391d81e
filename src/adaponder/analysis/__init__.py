"""Measures texts into tables (traces), and draws figures from tables without running a model."""
