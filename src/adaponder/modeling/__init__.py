"""The Hugging Face model: forward, generate, losses, save and load."""

from adaponder.config import AdaPonderConfig
from adaponder.modeling.model import AdaPonderForCausalLM, AdaPonderModel, AdaPonderModelOutput, AdaPonderOutput

__all__ = ["AdaPonderConfig", "AdaPonderForCausalLM", "AdaPonderModel", "AdaPonderModelOutput", "AdaPonderOutput"]
