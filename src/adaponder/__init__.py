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
    from adaponder.config import AdaPonderConfig
    from adaponder.ledger import Ledger
    from adaponder.methods import Iteration, Objective
    from adaponder.modeling import AdaPonderForCausalLM, AdaPonderOutput
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

# Where each public name lives; what is not listed is a policy.
_HOMES = {
    "AdaPonderConfig": "config",
    "AdaPonderForCausalLM": "modeling",
    "AdaPonderOutput": "modeling",
    "Iteration": "methods",
    "Ledger": "ledger",
    "Objective": "methods",
}
# Once the module on the left is imported, the one on the right is too, and registers what it defines.
_REGISTER_AFTER = {
    "transformers.models.auto.configuration_auto": "adaponder.config",
    "transformers.models.auto.modeling_auto": "adaponder.modeling",
}


def __getattr__(name: str) -> Any:
    """A public name, or a module that holds one, imported when it is first asked for."""
    if name in __all__:
        value = getattr(importlib.import_module(f"adaponder.{_HOMES.get(name, 'policies')}"), name)
    elif name in {*_HOMES.values(), "policies"}:
        value = importlib.import_module(f"adaponder.{name}")
    else:
        raise AttributeError(f"module 'adaponder' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _RegisterAfterImport(MetaPathFinder):
    """Finds what the usual finders find, and lets our module follow each module of ``_REGISTER_AFTER``."""

    def __init__(self, waiting: dict[str, str]):
        self.waiting = waiting

    def find_spec(self, fullname: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        ours = self.waiting.pop(fullname, None)
        if ours is None:
            return None
        spec = importlib.util.find_spec(fullname)  # asks this finder too, which waits for it no longer
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_register(module: ModuleType) -> None:
                execute(module)
                importlib.import_module(ours)

            spec.loader.exec_module = execute_and_register
        return spec


def _register_with_auto_classes() -> None:
    """Now, as far as transformers is imported; else when it is."""
    waiting = {theirs: ours for theirs, ours in _REGISTER_AFTER.items() if theirs not in sys.modules}
    if waiting:
        sys.meta_path.insert(0, _RegisterAfterImport(waiting))
    for theirs, ours in _REGISTER_AFTER.items():
        if theirs not in waiting:
            importlib.import_module(ours)


_register_with_auto_classes()
