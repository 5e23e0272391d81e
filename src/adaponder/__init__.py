"""AdaPonder: language models that read hard tokens more often."""

from adaponder.config import AdaPonderConfig
from adaponder.errors import AdaPonderError
from adaponder.ledger import Ledger
from adaponder.methods import Iteration, Objective
from adaponder.modeling import AdaPonderForCausalLM, AdaPonderOutput, register
from adaponder.policies import (
    Change,
    Divergence,
    Entropy,
    ExitThreshold,
    FixedDepth,
    ForcedDepths,
    Geometric,
    LearnedGate,
    Policy,
    PolicyInput,
    Random,
    Ranked,
    Uniform,
)
from adaponder.version import __version__

register()

__all__ = [
    "AdaPonderConfig",
    "AdaPonderError",
    "AdaPonderForCausalLM",
    "AdaPonderOutput",
    "Change",
    "Divergence",
    "Entropy",
    "ExitThreshold",
    "FixedDepth",
    "ForcedDepths",
    "Geometric",
    "Iteration",
    "LearnedGate",
    "Ledger",
    "Objective",
    "Policy",
    "PolicyInput",
    "Random",
    "Ranked",
    "Uniform",
    "__version__",
]
