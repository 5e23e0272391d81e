"""Recipes: one complete run as data, and the recipes that ship."""
