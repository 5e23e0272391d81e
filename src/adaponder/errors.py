"""What can go wrong, by name: each error says which field is at fault and what cures it."""


class AdaPonderError(ValueError):
    """The base of every error this package raises on purpose."""


class ConfigError(AdaPonderError):
    """A configuration that no model can be built from."""


class BackboneError(AdaPonderError):
    """A Hugging Face decoder that cannot be read again and again, and why."""


class CacheError(AdaPonderError):
    """A cache that does not belong to this model, this batch or this run."""


class CheckpointError(AdaPonderError):
    """A checkpoint that is incomplete, foreign or unsafe to load."""


class InputError(AdaPonderError):
    """An argument of ``forward`` or ``generate`` that cannot be honoured."""


class TrainingError(AdaPonderError):
    """A run that cannot start or must not go on."""


class EvaluationError(AdaPonderError):
    """A measurement that contradicts itself and must not be quoted."""


def in_one_line(problem: BaseException) -> str:
    """What a library says went wrong, without its line breaks and cut where it goes on for ever."""
    said = " ".join(str(problem).split()) or type(problem).__name__
    return said if len(said) <= 400 else said[:400] + " …"
