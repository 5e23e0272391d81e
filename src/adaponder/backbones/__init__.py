"""Hugging Face decoders as backbones: the wrapper, the rows that attention sees, and what is known of each family."""
