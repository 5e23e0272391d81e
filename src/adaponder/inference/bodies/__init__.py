"""Backbones as the engine reads them: through their stock layers, or fused."""
