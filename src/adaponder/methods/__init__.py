"""The family: one short file per method, all on the same backbone wrapper."""

from adaponder.config import AdaPonderConfig
from adaponder.methods.adaponder import AdaPonder
from adaponder.methods.base import Iteration, Method, Objective
from adaponder.methods.loop import Loop
from adaponder.methods.mor import MixtureOfRecursions
from adaponder.methods.ouro import Ouro
from adaponder.methods.pause import Pause
from adaponder.methods.ponder import Ponder

BY_NAME: dict[str, type[Method]] = {
    "adaponder": AdaPonder,
    "ponder": Ponder,
    "loop": Loop,
    "pause": Pause,
    "mor": MixtureOfRecursions,
    "ouro": Ouro,
    "vanilla": Loop,  # the loop of one: config sets iterations to 1
}


def build_method(config: AdaPonderConfig) -> Method:
    method = BY_NAME[config.method](config)
    method.reset_parameters(getattr(config.backbone_config, "initializer_range", 0.02))
    return method


__all__ = ["BY_NAME", "Iteration", "Method", "Objective", "build_method"]
