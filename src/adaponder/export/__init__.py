"""Folders for the hub: a checkpoint that transformers opens without this package, with its own code and a model card.

``configuration_adaponder.py`` and ``modeling_adaponder.py`` are copied into such a folder as they are: they import
torch and transformers alone, and nothing of this package.
"""
