"""Maps names to methods, each a short file of its own, and registers new ones."""

from adaponder.errors import ConfigError, shown
from adaponder.execution.base import Iteration as Iteration
from adaponder.fields import Recurrence
from adaponder.methods.act import AdaptiveComputationTime
from adaponder.methods.adaponder import AdaPonder
from adaponder.methods.anytime import Anytime, Relay, Reread
from adaponder.methods.base import Method
from adaponder.methods.base import State as State
from adaponder.methods.loop import Loop, Vanilla
from adaponder.methods.mor import MixtureOfRecursions
from adaponder.methods.objectives import Objective as Objective
from adaponder.methods.ouro import Ouro
from adaponder.methods.pause import Pause
from adaponder.methods.ponder import Ponder
from adaponder.methods.pondernet import PonderNet
from adaponder.registry import Scale, check_method, register_name
from adaponder.registry import method_names as method_names

# The names are those in adaponder.registry, which can be imported without torch.
_CLASSES: dict[str, type[Method]] = {
    "adaponder": AdaPonder,
    "ponder": Ponder,
    "loop": Loop,
    "pause": Pause,
    "mor": MixtureOfRecursions,
    "ouro": Ouro,
    "act": AdaptiveComputationTime,
    "pondernet": PonderNet,
    "anytime": Anytime,
    "relay": Relay,
    "reread": Reread,
    "vanilla": Vanilla,
}


def method_class(name: str) -> type[Method]:
    """Returns the class of the method ``name``."""
    return _CLASSES[check_method(name)]


def build_method(config: Recurrence) -> Method:
    """Builds the module that the config's method adds to a backbone, with initial weights."""
    method = method_class(config.method)(config)
    method.reset_parameters(getattr(config.backbone_config, "initializer_range", 0.02))
    return method


def register_method(name: str, method: type[Method], *, embedding_scale: Scale = "sqrt(d)") -> None:
    """Registers a subclass of :class:`Method` under a new name, for configs, recipes and commands of this process.

    ``embedding_scale`` is the default of models that are trained from scratch.
    """
    if not isinstance(name, str) or not name.isidentifier():
        raise ConfigError(f"register_method({shown(name)}, …): the name must consist of letters, digits and _")
    call = f"register_method({name!r}, {shown(method)})"
    if not (isinstance(method, type) and issubclass(method, Method)):
        raise ConfigError(f"{call}: the method must be a subclass of adaponder.methods.Method")
    if name in _CLASSES and _CLASSES[name] is not method:
        raise ConfigError(f"{call}: {_CLASSES[name].__qualname__} has that name; choose another")
    _CLASSES[name] = method
    register_name(name, embedding_scale)
