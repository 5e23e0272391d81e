"""AdaPonder: language models that read hard tokens more often.

Importing this package imports neither torch nor transformers: public names are imported on first use. The model type
is registered with Hugging Face's Auto classes whether transformers is imported before or after this package.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from adaponder.errors import AdaPonderError as AdaPonderError
from adaponder.version import __version__ as __version__

if TYPE_CHECKING:
    from adaponder.checkpoints.shipped import sample_path as sample_path
    from adaponder.evaluation.lab.profiles import load_profile as load_profile
    from adaponder.execution.ledger import Ledger as Ledger
    from adaponder.inference import Engine as Engine
    from adaponder.inference import Request as Request
    from adaponder.methods import Iteration as Iteration
    from adaponder.methods import Method as Method
    from adaponder.methods import Objective as Objective
    from adaponder.methods import register_method as register_method
    from adaponder.modeling import AdaPonderConfig as AdaPonderConfig
    from adaponder.modeling import AdaPonderForCausalLM as AdaPonderForCausalLM
    from adaponder.modeling import AdaPonderOutput as AdaPonderOutput
    from adaponder.policies import Change as Change
    from adaponder.policies import Confidence as Confidence
    from adaponder.policies import Divergence as Divergence
    from adaponder.policies import Entropy as Entropy
    from adaponder.policies import ExitThreshold as ExitThreshold
    from adaponder.policies import FixedDepth as FixedDepth
    from adaponder.policies import ForcedDepths as ForcedDepths
    from adaponder.policies import Geometric as Geometric
    from adaponder.policies import LearnedGate as LearnedGate
    from adaponder.policies import Policy as Policy
    from adaponder.policies import PolicyInput as PolicyInput
    from adaponder.policies import Random as Random
    from adaponder.policies import Ranked as Ranked
    from adaponder.policies import SampledExit as SampledExit
    from adaponder.policies import Similarity as Similarity
    from adaponder.policies import Uniform as Uniform

# The public names of each module. AdaPonderConfig comes from modeling, which registers it with AutoModelForCausalLM.
_PUBLIC = {
    "checkpoints.shipped": "sample_path",
    "evaluation.lab.profiles": "load_profile",
    "execution.ledger": "Ledger",
    "inference": "Engine Request",
    "methods": "Iteration Method Objective register_method",
    "modeling": "AdaPonderConfig AdaPonderForCausalLM AdaPonderOutput",
    "policies": "Change Confidence Divergence Entropy ExitThreshold FixedDepth ForcedDepths Geometric LearnedGate "
    "Policy PolicyInput Random Ranked SampledExit Similarity Uniform",
}
_HOMES = {name: module for module, names in _PUBLIC.items() for name in names.split()}
__all__ = sorted(["AdaPonderError", "__version__", *_HOMES])  # pyright: ignore[reportUnsupportedDunderAll]
_MODULES = ("config", "inference", "methods", "modeling", "policies")
_AUTO = "transformers.models.auto.configuration_auto"


def __getattr__(name: str) -> Any:
    """Imports a public name, or a module of ``_MODULES``, when it is first used."""
    if name in _HOMES:
        value = getattr(importlib.import_module(f"adaponder.{_HOMES[name]}"), name)
    elif name in _MODULES:
        value = importlib.import_module(f"adaponder.{name}")
    else:
        raise AttributeError(f"module 'adaponder' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _ConfigOnDemand:
    """Placeholder for AdaPonderConfig in the mapping of the Auto classes.

    Calling it or reading an attribute imports ``adaponder.modeling``, which registers the config and the model.
    """

    __name__ = "AdaPonderConfig"

    def __getattr__(self, name: str) -> Any:
        return getattr(__getattr__("AdaPonderConfig"), name)

    def __call__(self, *args: Any, **options: Any) -> Any:
        return __getattr__("AdaPonderConfig")(*args, **options)


class _AfterImport(MetaPathFinder):
    """Import hook: registers :class:`_ConfigOnDemand` right after the module of the Auto classes has been executed.

    The hook itself imports nothing, because transformers and this package may be only partly imported at that time.
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
