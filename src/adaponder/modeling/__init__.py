"""Defines the Hugging Face model, its outputs and ``generate``; importing it registers the Auto classes."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from adaponder.config import AdaPonderConfig
from adaponder.modeling.arguments import AdaPonderModelOutput, AdaPonderOutput, PolicyLike
from adaponder.modeling.model import AdaPonderForCausalLM, AdaPonderModel

AutoConfig.register("adaponder", AdaPonderConfig, exist_ok=True)
AutoModelForCausalLM.register(AdaPonderConfig, AdaPonderForCausalLM, exist_ok=True)
AutoModel.register(AdaPonderConfig, AdaPonderModel, exist_ok=True)

__all__ = [
    "AdaPonderConfig",
    "AdaPonderForCausalLM",
    "AdaPonderModel",
    "AdaPonderModelOutput",
    "AdaPonderOutput",
    "PolicyLike",
]
