"""The family: one short file per method, all on the same backbone wrapper."""

from adaponder.config import AdaPonderConfig
from adaponder.execution.base import Iteration
from adaponder.methods.base import Method, State
from adaponder.methods.objectives import Objective
from adaponder.registry import method_class, method_names, register_method


def build_method(config: AdaPonderConfig) -> Method:
    """What the config's method adds to a backbone, freshly initialised."""
    method = method_class(config.method)(config)
    method.reset_parameters(getattr(config.backbone_config, "initializer_range", 0.02))
    return method


__all__ = [
    "Iteration",
    "Method",
    "Objective",
    "State",
    "build_method",
    "method_class",
    "method_names",
    "register_method",
]
