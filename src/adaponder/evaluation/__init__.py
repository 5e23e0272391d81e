"""Measures the loss and the cost of any checkpoint, on the same tokens and by the same meter for every method."""
