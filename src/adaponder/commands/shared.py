"""Defines what commands share: common options, opening a checkpoint, and choosing the policy.

No module of a command imports torch or transformers at its top, so that ``--help`` is quick.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from adaponder.devices import DTYPES, WEIGHTS
from adaponder.errors import InputError, choice
from adaponder.fields import Range, option
from adaponder.terminal import STDOUT, console, number, table

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from adaponder.conversion.convert import Check
    from adaponder.evaluation.scoring import ScoringOptions
    from adaponder.evaluation.text import Text, Vocabulary, Windows
    from adaponder.modeling import AdaPonderForCausalLM
    from adaponder.policies import Policy

_STREAMS = (Path("/dev"), Path("/dev/fd"), Path("/proc/self/fd"))


def one_of(*names: str) -> Callable[[str | None], str | None]:
    """Returns an option's callback that accepts only these names, or ``None``."""

    def check(value: str | None) -> str | None:
        if value is not None and value not in names:
            raise typer.BadParameter(f"{value!r} is not {choice(value, names)}")
        return value

    return check


def within(interval: str) -> Callable[[float], float]:
    """Returns an option's callback that refuses numbers outside an interval such as ``(0, 1]``."""
    limits = Range.parse(interval)

    def check(value: float) -> float:
        if value not in limits:
            raise typer.BadParameter(f"{value:g} must be {limits}")
        return value

    return check


def output_folder(path: Path | None) -> Path | None:
    """Returns ``path``; raises unless it is a writable folder, or a new folder can be created there."""
    if path is not None:
        _refuse_unwritable(path)
        if path.exists() and not path.is_dir():
            raise typer.BadParameter(f"{path} is a file, not a folder")
    return path


def output_file(path: Path | None) -> Path | None:
    """Returns ``path``; raises unless a file can be written there. ``-`` is standard output."""
    if path is not None and path != STDOUT:
        _refuse_unwritable(path)
        if path.is_dir():
            raise typer.BadParameter(f"{path} is a folder, not a file")
        # Writing replaces the file at this path: with enough permissions, even /dev/stdout.
        if path.absolute().parent in _STREAMS or (path.exists() and not path.is_file()):
            raise typer.BadParameter(f"{path} is a device or a pipe, not a file; - is standard output")
    return path


def _refuse_unwritable(path: Path) -> None:
    try:
        nearest = next((folder for folder in (path, *path.absolute().parents) if folder.exists()), Path("/"))
    except OSError as error:  # too long a name, a folder without search permission
        raise typer.BadParameter(f"{path} cannot be written to: {error.strerror}") from None
    if nearest != path and not nearest.is_dir():
        raise typer.BadParameter(f"{path} cannot be created: {nearest} is a file, not a folder")
    if not os.access(nearest, os.W_OK):
        raise typer.BadParameter(f"{path} cannot be written to: permission denied for {nearest}")


def listed(flag: str, text: str | Sequence[Any] | None, kind: type = int, interval: str = "[1, inf)") -> tuple:
    """Parses ``1,2,3`` (or a sequence) as values of ``kind``; numbers must be within the interval."""
    words = text.split(",") if isinstance(text, str) else text or ()
    try:
        values = tuple(kind(word.strip() if isinstance(word, str) else word) for word in words)
    except ValueError:
        values = ("",)
    if "" in values:
        words_of_kind = {int: "whole numbers", float: "numbers", str: "names"}
        raise InputError(f"{flag} {text} must be {words_of_kind[kind]} separated by commas")
    limits = Range.parse(interval)
    if wrong := [value for value in values if not isinstance(value, str) and value not in limits]:
        raise InputError(f"{flag} {text}: {wrong[0]} must be {limits}")
    return values


def refuse(other: str, **options: object) -> None:
    """Raises if any of ``options`` is set: they have no effect together with ``other``, an option or argument."""
    if unused := [name for name, value in options.items() if value not in (None, ()) and value is not False]:
        raise InputError(f"--{unused[0].replace('_', '-')} has no effect with {other}: leave it out")


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
    """Returns the option for a command's parameter: ``Annotated[int, opt("Sequences at a time.", "N", min=1)]``."""
    flags = () if flag is None else (flag,)
    return typer.Option(*flags, help=help, metavar=metavar, rich_help_panel=panel, callback=check, min=min, max=max)


def folder(help: str) -> Any:
    """Returns an option that names a folder to write to."""
    return opt(help, "DIR", check=output_folder)


def arg(help: str, metavar: str) -> Any:
    """Returns a positional argument of a command."""
    return typer.Argument(help=help, metavar=metavar)


def command(function: Callable[..., Any]) -> Callable[..., Any]:
    """Replaces each parameter that is a dataclass of options by one parameter per field.

    ``def eval(checkpoint: Checkpoint, *, depth: Depth)`` gets the parameters ``checkpoint``, ``policy``, ``tau``, …
    A caller from Python may also pass the dataclass itself.
    """
    hints = typing.get_type_hints(function, include_extras=True)
    groups = {name: kind for name, kind in hints.items() if name != "return" and dataclasses.is_dataclass(kind)}
    parameters: dict[str, inspect.Parameter] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if name not in groups:
            parameters[name] = parameter.replace(annotation=hints[name])
            continue
        field_hints = typing.get_type_hints(groups[name], include_extras=True)
        for item in dataclasses.fields(groups[name]):
            parameters[item.name] = inspect.Parameter(
                item.name, inspect.Parameter.KEYWORD_ONLY, default=item.default, annotation=field_hints[item.name]
            )

    @wraps(function)
    def grouped(*args: Any, **options: Any) -> Any:
        for name, kind in groups.items():
            values = {item.name: options.pop(item.name) for item in dataclasses.fields(kind) if item.name in options}
            options.setdefault(name, kind(**values))
        return function(*args, **options)

    grouped.__signature__ = inspect.Signature(list(parameters.values()))
    grouped.__annotations__ = {name: parameter.annotation for name, parameter in parameters.items()}
    return grouped


POLICIES = (
    "gate:0.01  gate:0.1,0.2,0.3  fixed:2  entropy:2.5  kl:0.01  change:0.1  confidence:0.9  similarity:0.95  "
    "random:0.5  exit:0.9  sampled-exit  router  ranked-uniform:0.8  ranked-geometric:0.8"
)
DATA = "A folder written by prepare, text or .jsonl (compressed too), .parquet, stdlib, sample, hops:seed=3."

_CKPT = "A model, run or step folder, or a hub name. Checksums are verified, unless ADAPONDER_VERIFY=0."
Checkpoint = Annotated[str, arg(_CKPT, "CKPT")]
RecipeName = Annotated[str, arg("A name from adaponder recipes, or a YAML file.", "RECIPE")]
Overrides = Annotated[list[str] | None, opt("Change one field of the recipe; may be repeated.", "a.b=c", flag="--set")]
_RESULT = "Write the result as JSON; -: to standard output, all else to standard error."
Json = Annotated[Path | None, opt(_RESULT, "PATH", check=output_file)]

_MODEL, _TEXT, _DEPTH = "Model", "Text", "Depth (at most one of policy, tau and profile)"
_DTYPES = "float32, bfloat16, float16, float64; auto: as saved, on a CPU at least float32."
_WEIGHTS = "Narrower weights, to save memory: int8, fp8 (in the layers); on a GPU also bfloat16, float16."
Device = Annotated[str, opt("cpu, cuda, cuda:1, …", "NAME", panel=_MODEL)]
Dtype = Annotated[str, opt(_DTYPES, "NAME", check=one_of(*DTYPES), panel=_MODEL)]
Seed = Annotated[int, opt("Random seed.", "N", min=0, panel=_MODEL)]

_SPLIT = "Split of a prepared folder: train or validation."
_WINDOW = "Tokens per window; default: the backbone's positions, at most 2048."
_STRIDE = "Slide windows by this many tokens; default: disjoint windows."
_ACROSS = "Whether tokens attend to earlier documents."
_text = partial(opt, panel=_TEXT)


@dataclass(frozen=True, kw_only=True)
class Place:
    """Options for the device and precision of a model."""

    device: Device = "cpu"
    dtype: Dtype = "auto"


@dataclass(frozen=True, kw_only=True)
class Opening(Place):
    """Options for opening a checkpoint."""

    tokenizer: Annotated[
        str | None, opt("Folder or hub name; default: the checkpoint's own.", "NAME", panel=_MODEL)
    ] = None


@dataclass(frozen=True, kw_only=True)
class NarrowOpening(Opening):
    """Options for opening a checkpoint, including narrower weights such as ``int8``."""

    weights: Annotated[str | None, opt(_WEIGHTS, "NAME", check=one_of(*WEIGHTS), panel=_MODEL)] = None

    def generator(self, checkpoint: str) -> tuple[AdaPonderForCausalLM, Path, PreTrainedTokenizerBase]:
        """Opens a checkpoint for generation; returns its model, folder and tokenizer."""
        from adaponder.conversion.open import load

        with console.status(f"loading {checkpoint} …"):
            model, folder = load(checkpoint, dtype=self.dtype, device=self.device, weights=self.weights)
            return model, folder, open_tokenizer(model, folder, self.tokenizer)


@dataclass(frozen=True, kw_only=True)
class Reading:
    """Options for reading a text: its split, its length, and its windows and batches."""

    split: Annotated[str, _text(_SPLIT, "NAME", check=one_of("train", "validation"))] = "validation"
    window: Annotated[int | None, _text(_WINDOW, "N", min=1)] = None
    stride: Annotated[int | None, _text(_STRIDE, "N", min=1)] = None
    across_documents: Annotated[bool, _text(_ACROSS, flag="--across-documents/--by-document")] = True
    max_tokens: Annotated[int | None, _text("Use only the first N tokens of the text.", "N", min=1)] = None
    batch_size: Annotated[int, _text("Windows per forward; results do not depend on it.", "N", min=1)] = 8
    seed: Seed = 0

    def text(self, subject: Subject, data: str) -> Text:
        """Reads a text as tokens of the checkpoint; ``sample`` is a shipped text."""
        from adaponder.checkpoints.shipped import data_of
        from adaponder.evaluation.text import open_text

        data, limit = data_of(data), self.max_tokens
        with console.status(f"reading {data} …"):
            return open_text(data, subject.vocabulary, whose=subject.name, split=self.split, max_tokens=limit)

    def windows(self, subject: Subject) -> Windows:
        """Returns the windows to score, of ``default_length`` tokens unless ``--window`` is given."""
        from adaponder.evaluation.scoring import default_length
        from adaponder.evaluation.text import Windows

        return Windows(self.window or default_length(subject.model), self.stride, self.across_documents)

    def facts(self, data: str, windows: Windows) -> dict[str, Any]:
        """Returns the fields of a result that say what was read."""
        return {"data": data, "split": self.split, "windows": str(windows), "seed": self.seed}


@dataclass(frozen=True, kw_only=True)
class Depth:
    """Options that choose the policy and limit the depth."""

    policy: Annotated[str | None, opt(POLICIES, "RULE", panel=_DEPTH)] = None
    tau: Annotated[float | None, option("tau", rich_help_panel=_DEPTH)] = None
    profile: Annotated[str | None, opt("A profile stored by adaponder calibrate.", "NAME", panel=_DEPTH)] = None
    max_iterations: Annotated[int | None, option("max_iterations", rich_help_panel=_DEPTH)] = None

    def choose(self, model: AdaPonderForCausalLM, folder: Path, side: str = "") -> Policy | None:
        """Returns the policy, ``None`` for the method's default; raises if more than one option names a policy.

        ``side`` (``-a`` or ``-b`` of ``compare``) is appended to the names of options in errors.
        """
        limit, most = self.max_iterations, model.config.iterations
        if limit is not None and not 1 <= limit <= most:
            raise InputError(f"--max-iterations{side} {limit} must be between 1 and {most}, the model's iterations")
        from adaponder.evaluation.lab.profiles import stored
        from adaponder.policies import choose_policy

        return choose_policy(
            most,
            policy=self.policy,
            tau=self.tau,
            budget=self.profile,
            profiles={} if self.profile is None else stored(folder),
            name=lambda field: f"--{'profile' if field == 'budget' else field}{side}",
        )

    def scoring(self, subject: Subject, seed: int, *, execution: str | None = None, side: str = "") -> ScoringOptions:
        """Returns the options for scoring with this policy; raises if the model cannot run it."""
        from adaponder.evaluation.scoring import ScoringOptions

        policy = self.choose(subject.model, subject.folder, side)
        subject.model.check_policy(policy)  # before a text is read
        return ScoringOptions(policy=policy, max_iterations=self.max_iterations, execution=execution, seed=seed)


class Subject(NamedTuple):
    """A checkpoint that is evaluated: its name on the command line, its model, its folder and its vocabulary."""

    name: str
    model: AdaPonderForCausalLM
    folder: Path
    vocabulary: Vocabulary


def facts_of(checkpoint: str, model: AdaPonderForCausalLM) -> dict[str, Any]:
    """Returns the fields that every result has: checkpoint, method, dtype and device."""
    facts = {"checkpoint": checkpoint, "method": model.config.method}
    return facts | {"dtype": str(model.dtype).removeprefix("torch."), "device": str(model.device)}


def open_subject(checkpoint: str, opening: Place | None = None, *, weights: str | None = None) -> Subject:
    """Opens a checkpoint with its tokenizer; ``weights`` is the value of ``--weights``."""
    from adaponder.conversion.open import load
    from adaponder.evaluation.text import open_vocabulary

    opening = opening or Place()
    tokenizer = getattr(opening, "tokenizer", None)
    with console.status(f"loading {checkpoint} …"):
        model, folder = load(checkpoint, dtype=opening.dtype, device=opening.device, weights=weights)
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
        differing = sum(vocabulary.get(token) != token_id for token, token_id in trained_with.items())
        raise InputError(
            f"--tokenizer {named} is not the checkpoint's own ({differing or len(vocabulary) - len(trained_with):,} of "
            f"{len(trained_with):,} tokens have other ids); leave it out"
        )


def show_checks(title: str, checks: Sequence[Check]) -> None:
    """Prints a table of equality checks: the relative difference of each, and its bound."""
    rows = [(check.what, f"{check.difference:.1e}", number(check.bound, ".1e")) for check in checks]
    console.print(table(title, ("check", "relative difference", "allowed"), rows))
