"""Hugging Face decoders as backbones: the wrapper, the rows that attention reads, and facts about each family."""
