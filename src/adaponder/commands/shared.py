"""What several commands share: their common options, opening a checkpoint, and choosing the policy.

Importing this module, as every module of commands, imports neither torch nor transformers: ``--help`` is quick.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from adaponder.devices import DTYPES, WEIGHTS
from adaponder.errors import InputError
from adaponder.fields import LARGEST_INT, option
from adaponder.terminal import STDOUT, console

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from adaponder.evaluation.scoring import ScoringOptions
    from adaponder.evaluation.text import Text, Vocabulary, Windows
    from adaponder.modeling import AdaPonderForCausalLM
    from adaponder.policies import Policy

# --- checks of one option ------------------------------------------------------------------------------------------

_STREAMS = (Path("/dev"), Path("/dev/fd"), Path("/proc/self/fd"))


def one_of(*names: str) -> Callable[[str | None], str | None]:
    """Returns a callback that refuses every other word."""

    def check(value: str | None) -> str | None:
        if value is not None and value not in names:
            raise typer.BadParameter(f"{value!r} is not one of {', '.join(names)}")
        return value

    return check


def above_zero(most: float = float("inf")) -> Callable[[float], float]:
    """Returns a callback that refuses numbers that are not greater than 0, or greater than ``most``."""

    def check(value: float) -> float:
        if not 0 < value <= most:
            limit = "" if most == float("inf") else f" and at most {most:g}"
            raise typer.BadParameter(f"{value:g} must be greater than 0{limit}")
        return value

    return check


def output_folder(path: Path | None) -> Path | None:
    """Refuses a path that is no folder and cannot become one."""
    if path is not None:
        _refuse_unwritable(path)
        if path.exists() and not path.is_dir():
            raise typer.BadParameter(f"{path} is a file, not a folder")
    return path


def output_file(path: Path | None) -> Path | None:
    """Refuses a path where no file can be written; ``-`` is standard output."""
    if path is not None and path != STDOUT:
        _refuse_unwritable(path)
        if path.is_dir():
            raise typer.BadParameter(f"{path} is a folder, not a file")
        # A result replaces the file as a whole: even /dev/stdout itself, where the user may do that.
        if path.absolute().parent in _STREAMS or (path.exists() and not path.is_file()):
            raise typer.BadParameter(f"{path} is a device or a pipe, not a file; - is standard output")
    return path


def _refuse_unwritable(path: Path) -> None:
    try:
        nearest = next((folder for folder in (path, *path.absolute().parents) if folder.exists()), Path("/"))
    except OSError as error:  # a name too long, a folder that may not be looked into
        raise typer.BadParameter(f"{path} cannot be written to: {error.strerror}") from None
    if nearest != path and not nearest.is_dir():
        raise typer.BadParameter(f"{path} cannot be made: {nearest} is a file, not a folder")
    if not os.access(nearest, os.W_OK):
        raise typer.BadParameter(f"{path} cannot be written to: permission denied for {nearest}")


def numbers(flag: str, text: str | Sequence[int] | None, *, least: int = 1, most: int = LARGEST_INT) -> tuple[int, ...]:
    """Reads ``1,2,3`` as whole numbers; a sequence of them is returned as it is."""
    return _listed(flag, text, int, least, most, "whole numbers separated by commas, as in 1,2,3")


def decimals(
    flag: str, text: str | Sequence[float] | None, *, least: float = 0.0, most: float = LARGEST_INT
) -> tuple[float, ...]:
    """Reads ``1.5,2`` as numbers; a sequence of them is returned as it is."""
    return _listed(flag, text, float, least, most, "numbers separated by commas, as in 1.5,2.5")


def _listed(
    flag: str, text: str | Sequence[Any] | None, kind: Callable[[str], Any], least: float, most: float, wanted: str
) -> tuple[Any, ...]:
    if text is None:
        return ()
    try:
        values = tuple(kind(word) for word in text.split(",")) if isinstance(text, str) else tuple(text)
    except ValueError:
        raise InputError(f"{flag} {text} must be {wanted}") from None
    if wrong := [value for value in values if not least <= value <= most]:
        limit = f"at least {least:g}" if most == LARGEST_INT else f"between {least:g} and {most:g}"
        raise InputError(f"{flag} {text}: {wrong[0]} must be {limit}")
    return values


def names(flag: str, text: str | Sequence[str] | None) -> tuple[str, ...]:
    """Reads ``a,b`` as names; a sequence of them is returned as it is."""
    if text is None:
        return ()
    values = tuple(word.strip() for word in text.split(",")) if isinstance(text, str) else tuple(text)
    if not all(values):
        raise InputError(f"{flag} {text} must be names separated by commas, as in a,b")
    return values


def refuse(beside: str, **options: object) -> None:
    """Raises if an option is set that would be ignored."""
    if unused := [name for name, value in options.items() if value]:
        raise InputError(f"--{unused[0].replace('_', '-')} has no effect with {beside}: leave it out")


# --- options -------------------------------------------------------------------------------------------------------


def opt(
    help: str,
    metavar: str | None = None,
    *,
    flag: str | None = None,
    panel: str | None = None,
    check: Callable[[Any], Any] | None = None,
    min: float | None = None,
    max: float | None = None,
) -> Any:
    """Returns an option of a command's parameter: ``Annotated[int, opt("Sequences at a time.", "N", min=1)]``."""
    flags = () if flag is None else (flag,)
    return typer.Option(*flags, help=help, metavar=metavar, rich_help_panel=panel, callback=check, min=min, max=max)


def arg(help: str, metavar: str) -> Any:
    """Returns a positional argument of a command."""
    return typer.Argument(help=help, metavar=metavar)


# --- shared options ------------------------------------------------------------------------------------------------

POLICIES = (
    "gate:0.01  gate:0.1,0.2,0.3  fixed:2  entropy:2.5  kl:0.01  change:0.1  confidence:0.9  similarity:0.95  "
    "random:0.5  exit:0.9  sampled-exit  router  ranked-uniform:0.8  ranked-geometric:0.8"
)
DATA = "A folder made by prepare, text or .jsonl (compressed too), .parquet, stdlib, sample, hops:seed=3."

Checkpoint = Annotated[
    str,
    arg(
        "A model folder, a run folder, a step folder or a hub name. Its checksums are compared first, a second "
        "or two for each gigabyte; ADAPONDER_VERIFY=0 leaves that out.",
        "CKPT",
    ),
]
RecipeName = Annotated[str, arg("A name from adaponder recipes, or a YAML file.", "RECIPE")]
Overrides = Annotated[list[str] | None, opt("Change one field of the recipe; may be repeated.", "a.b=c", flag="--set")]
OutFolder = Annotated[Path | None, opt("Write here.", "DIR", check=output_folder)]
Json = Annotated[
    Path | None,
    opt(
        "Write the result here as JSON too; -: to standard output, and all else to standard error.",
        "PATH",
        check=output_file,
    ),
]

_MODEL = "Model"
Device = Annotated[str, opt("cpu, cuda, cuda:1, …", "NAME", panel=_MODEL)]
Dtype = Annotated[
    str,
    opt(
        "float32, bfloat16, float16, float64, or auto: as saved, on a CPU at least float32.",
        "NAME",
        check=one_of(*DTYPES),
        panel=_MODEL,
    ),
]
Weights = Annotated[
    str | None,
    opt(
        "int8, fp8 (in the layers), on a GPU bfloat16, float16: less memory. eval says what it changes.",
        "NAME",
        check=one_of(*WEIGHTS),
        panel=_MODEL,
    ),
]
Tokenizer = Annotated[str | None, opt("Folder or hub name; default: the checkpoint's own.", "NAME", panel=_MODEL)]
Seed = Annotated[int, opt("Seed of everything random.", "N", min=0, panel=_MODEL)]

_TEXT = "Text"
Split = Annotated[
    str, opt("Of a prepared folder: train or validation.", "NAME", check=one_of("train", "validation"), panel=_TEXT)
]
Window = Annotated[
    int | None, opt("Tokens per window; default: the backbone's positions, at most 2048.", "N", min=1, panel=_TEXT)
]
Stride = Annotated[
    int | None, opt("Slide windows by this many tokens; default: disjoint windows.", "N", min=1, panel=_TEXT)
]
AcrossDocuments = Annotated[
    bool, opt("Whether tokens attend to earlier documents.", flag="--across-documents/--by-document", panel=_TEXT)
]
MaxTokens = Annotated[int | None, opt("Use only the first N tokens of the text.", "N", min=1, panel=_TEXT)]
BatchSize = Annotated[int, opt("Windows at a time; results do not depend on it.", "N", min=1, panel=_TEXT)]

_DEPTH = "Depth (at most one of policy, tau and profile)"
PolicyText = Annotated[str | None, opt(POLICIES, "RULE", panel=_DEPTH)]
Tau = Annotated[float | None, option("tau", rich_help_panel=_DEPTH)]
Profile = Annotated[str | None, opt("A budget that adaponder calibrate stored.", "NAME", panel=_DEPTH)]
MaxIterations = Annotated[int | None, option("max_iterations", rich_help_panel=_DEPTH)]


# --- a checkpoint that is evaluated --------------------------------------------------------------------------------


class Subject(NamedTuple):
    """A checkpoint that is evaluated: its name on the command line, its model, its folder and its vocabulary."""

    name: str
    model: AdaPonderForCausalLM
    folder: Path
    vocabulary: Vocabulary

    def text(self, data: str, *, split: str = "validation", max_tokens: int | None = None) -> Text:
        """Reads a text as the checkpoint's tokens; ``sample`` is a text that comes with the package."""
        from adaponder.checkpoints.shipped import data_of
        from adaponder.evaluation.text import open_text

        data = data_of(data)
        with console.status(f"reading {data} …"):
            return open_text(data, self.vocabulary, whose=self.name, split=split, max_tokens=max_tokens)

    def windows(self, length: int | None = None, stride: int | None = None, across_documents: bool = True) -> Windows:
        """Returns the windows to score; without a length, those of ``default_length``."""
        from adaponder.evaluation.scoring import default_length
        from adaponder.evaluation.text import Windows

        return Windows(default_length(self.model) if length is None else length, stride, across_documents)

    def scoring(
        self,
        *,
        policy: Policy | str | None = None,
        tau: float | None = None,
        profile: str | None = None,
        max_iterations: int | None = None,
        execution: str | None = None,
        seed: int = 0,
        side: str = "",
    ) -> ScoringOptions:
        """Returns how to score, with the policy of :func:`choose_policy`; raises if the model cannot run it."""
        from adaponder.evaluation.scoring import ScoringOptions

        chosen = choose_policy(
            self.model, self.folder, policy=policy, tau=tau, profile=profile, max_iterations=max_iterations, side=side
        )
        self.model.check_policy(chosen)  # before a text is read
        return ScoringOptions(policy=chosen, max_iterations=max_iterations, execution=execution, seed=seed)


def open_subject(
    checkpoint: str,
    *,
    tokenizer: str | None = None,
    dtype: str = "auto",
    device: str = "cpu",
    weights: str | None = None,
) -> Subject:
    """Opens a checkpoint with its tokenizer; ``weights`` makes its weights narrower, as ``--weights`` does."""
    from adaponder.conversion.open import load
    from adaponder.evaluation.text import open_vocabulary

    with console.status(f"loading {checkpoint} …"):
        model, folder = load(checkpoint, dtype=dtype, device=device, weights=weights)
        vocabulary = open_vocabulary(tokenizer or str(folder))
        refuse_other_tokenizer(model, folder, tokenizer, vocabulary.tokenizer.get_vocab())
        return Subject(checkpoint, model, folder, vocabulary)


def open_tokenizer(model: AdaPonderForCausalLM, folder: Path, named: str | None) -> PreTrainedTokenizerBase:
    """Opens the tokenizer of the checkpoint in ``folder``, or the named one (folder, hub name, ``tokenizer.json``)."""
    from adaponder.checkpoints.loading import tokenizer_of

    name = named or str(folder)
    if Path(name).is_file():
        from transformers import PreTrainedTokenizerFast

        from adaponder.data.tokenizers import load_tokenizer

        backend, end = load_tokenizer(name)
        tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=backend.id_to_token(end))
    else:
        tokenizer = tokenizer_of(name)
    refuse_other_tokenizer(model, folder, named, tokenizer.get_vocab())
    return tokenizer


def refuse_other_tokenizer(
    model: AdaPonderForCausalLM, folder: Path, named: str | None, vocabulary: dict[str, int]
) -> None:
    """Raises if ``vocabulary`` has ids that the model lacks, or differs from the checkpoint's own tokenizer."""
    from adaponder.checkpoints.loading import has_tokenizer
    from adaponder.evaluation.text import open_vocabulary

    highest, size = max(vocabulary.values(), default=-1), model.config.vocab_size
    if highest >= size:
        raise InputError(
            f"--tokenizer {named or folder} has ids up to {highest}, but the model's vocabulary ends at {size - 1}: "
            "name the tokenizer that the checkpoint was trained with"
        )
    if named is None or not has_tokenizer(folder):
        return
    trained_with = open_vocabulary(str(folder)).tokenizer.get_vocab()
    if trained_with != vocabulary:
        differing = sum(vocabulary.get(token) != number for token, number in trained_with.items())
        raise InputError(
            f"--tokenizer {named} is not the checkpoint's own ({differing or len(vocabulary) - len(trained_with):,} of "
            f"{len(trained_with):,} tokens have other ids); leave it out"
        )


def choose_policy(
    model: AdaPonderForCausalLM,
    folder: Path,
    *,
    policy: Policy | str | None = None,
    tau: float | None = None,
    profile: str | None = None,
    max_iterations: int | None = None,
    side: str = "",
) -> Policy | None:
    """Returns the policy of ``--policy``, ``--tau`` or ``--profile``, or ``None`` for the method's own.

    Raises if two of them are given, or if ``max_iterations`` exceeds the model's. ``side`` follows the options' names
    in errors, for commands that have them twice.
    """
    most = model.config.iterations
    if max_iterations is not None and not 1 <= max_iterations <= most:
        raise InputError(
            f"--max-iterations{side} {max_iterations} must be between 1 and {most}, the model's iterations"
        )
    ways = {"policy": policy, "tau": tau, "profile": profile}
    given = [f"--{name}{side}" for name, value in ways.items() if value is not None]
    if len(given) > 1:
        raise InputError(f"{' and '.join(given)} both choose the policy: give one of them")
    if profile is not None:
        from adaponder.evaluation.lab.profiles import load_profile

        return load_profile(folder, profile, option=f"--profile{side}")
    if tau is not None:
        from adaponder.policies import LearnedGate

        return LearnedGate(tau)
    return read_policy(policy, f"--policy{side}")


def read_policy(policy: Policy | str | None, flag: str = "--policy") -> Policy | None:
    """Reads a policy from the text that an option takes; a policy is returned as it is."""
    if not isinstance(policy, str):
        return policy
    from adaponder.policies import parse_policy

    try:
        return parse_policy(policy)
    except InputError as error:
        raise InputError(str(error).replace("--policy", flag, 1)) from None
