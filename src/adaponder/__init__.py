"""AdaPonder: language models that read hard tokens more often.

Importing this package imports neither torch nor transformers: a name is imported when it is first used, and the family
registers with Hugging Face's Auto classes as soon as both are there, in whichever order they are imported.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from adaponder.errors import AdaPonderError
from adaponder.version import __version__

if TYPE_CHECKING:
    from adaponder.checkpoints.shipped import sample_path
    from adaponder.config import AdaPonderConfig
    from adaponder.evaluation.lab.profiles import load_profile
    from adaponder.execution.ledger import Ledger
    from adaponder.inference import Engine, Request
    from adaponder.methods import Iteration, Method, Objective, register_method
    from adaponder.modeling import AdaPonderForCausalLM, AdaPonderOutput
    from adaponder.policies import (
        Change,
        Confidence,
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
        SampledExit,
        Similarity,
        Uniform,
    )

__all__ = [
    "AdaPonderConfig",
    "AdaPonderError",
    "AdaPonderForCausalLM",
    "AdaPonderOutput",
    "Change",
    "Confidence",
    "Divergence",
    "Engine",
    "Entropy",
    "ExitThreshold",
    "FixedDepth",
    "ForcedDepths",
    "Geometric",
    "Iteration",
    "LearnedGate",
    "Ledger",
    "Method",
    "Objective",
    "Policy",
    "PolicyInput",
    "Random",
    "Ranked",
    "Request",
    "SampledExit",
    "Similarity",
    "Uniform",
    "__version__",
    "load_profile",
    "register_method",
    "sample_path",
]

# Where each public name lives; what is not listed is a policy.
_HOMES = {
    "AdaPonderConfig": "modeling",  # not config alone: whoever has one may give it to AutoModelForCausalLM
    "AdaPonderForCausalLM": "modeling",
    "AdaPonderOutput": "modeling",
    "Engine": "inference",
    "Iteration": "methods",
    "Ledger": "execution.ledger",
    "Method": "methods",
    "Objective": "methods",
    "Request": "inference",
    "load_profile": "evaluation.lab.profiles",
    "register_method": "methods",
    "sample_path": "checkpoints.shipped",
}
_MODULES = ("config", "inference", "methods", "modeling", "policies")
_AUTO = "transformers.models.auto.configuration_auto"


def __getattr__(name: str) -> Any:
    """A public name, or a module that holds one, imported when it is first asked for."""
    if name in __all__:
        value = getattr(importlib.import_module(f"adaponder.{_HOMES.get(name, 'policies')}"), name)
    elif name in _MODULES:
        value = importlib.import_module(f"adaponder.{name}")
    else:
        raise AttributeError(f"module 'adaponder' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _ConfigOnDemand:
    """Stands for AdaPonderConfig in the table of the Auto classes until it is asked for something.

    Then ``adaponder.modeling`` is imported, which puts config and model there themselves.
    """

    __name__ = "AdaPonderConfig"

    def __getattr__(self, name: str) -> Any:
        return getattr(__getattr__("AdaPonderConfig"), name)

    def __call__(self, *args: Any, **options: Any) -> Any:
        return __getattr__("AdaPonderConfig")(*args, **options)


class _AfterImport(MetaPathFinder):
    """Finds what the usual finders find, and lets the family be known as soon as the Auto classes are there.

    Nothing is imported then: Hugging Face imports its modules in the middle of one another, and of ours.
    """

    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != _AUTO or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_register(module: ModuleType) -> None:
                execute(module)
                _register(module)

            spec.loader.exec_module = execute_and_register
        return spec


def _register(auto: ModuleType) -> None:
    auto.CONFIG_MAPPING.register("adaponder", _ConfigOnDemand(), exist_ok=True)


if _AUTO in sys.modules:
    _register(sys.modules[_AUTO])
else:
    sys.meta_path.insert(0, _AfterImport())
