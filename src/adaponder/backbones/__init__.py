"""Hugging Face decoders as backbones: the wrapper, the cache views, and facts about decoder families."""
