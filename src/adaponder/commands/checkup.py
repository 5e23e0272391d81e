"""adaponder doctor CKPT: whether a checkpoint is complete, safe and consistent; --seal writes its manifest anew."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from adaponder.checkpoints.loading import NOT_NEEDED, fetch, has_tokenizer, refuse_unsafe, tokenizer_of
from adaponder.checkpoints.manifest import MANIFEST, read_manifest, verify_files, write_manifest
from adaponder.checkpoints.special_tokens import disagreements, mend
from adaponder.commands.options import DoctorOptions
from adaponder.conversion.open import describe
from adaponder.errors import AdaPonderError, InputError
from adaponder.evaluation.lab.profiles import stored
from adaponder.export import modeling_adaponder
from adaponder.export.folder import CODE
from adaponder.terminal import console, table, write_json


def run(options: DoctorOptions) -> dict[str, Any]:
    """Examines a checkpoint and prints what is wrong with it; ``problems`` of the result is empty if nothing is."""
    if options.checkpoint is None:
        raise InputError("CKPT: name the checkpoint to examine")
    folder = fetch(options.checkpoint)
    changes = seal_folder(folder) if options.seal else []
    report = {"checkpoint": str(folder), "changes": changes, **examine(folder)}
    rows = [(what, "wrong" if what in report["problems"] else said) for what, said in report["checks"].items()]
    console.print(table(str(folder), ("", ""), rows))
    for change in changes:
        console.print(change, soft_wrap=True)
    for problem in report["problems"].values():
        console.print(problem, style="red", soft_wrap=True)
    if not report["problems"]:
        console.print("all well", style="green")
    write_json(options.json, report)
    return report


def examine(folder: Path) -> dict[str, Any]:
    """``checks``: the result of each check, by name; ``problems``: the error of each one that failed."""
    checks: dict[str, str] = {}
    problems: dict[str, str] = {}
    for what, check in _CHECKS.items():
        try:
            checks[what] = check(folder)
        except AdaPonderError as error:
            checks[what] = problems[what] = str(error)
    return {"checks": checks, "problems": problems}


def seal_folder(folder: Path) -> list[str]:
    """Takes the end and padding tokens from the tokenizer and writes a new manifest; returns what changed, in words."""
    if folder.resolve().parent.name == "snapshots":
        raise InputError(f"--seal: {folder} is the hub's cache; name a folder of your own")
    refuse_unsafe(folder)
    describe(str(folder), verify=False)
    changes = mend(folder)
    try:
        facts = {key: value for key, value in read_manifest(folder).items() if key == "step"}
    except AdaPonderError:  # there is none, or a damaged one: the new one does without
        facts = {}
    write_manifest(folder, **facts)
    return [*changes, f"sealed: {MANIFEST} lists {len(read_manifest(folder)['files'])} files as they are now"]


def _safe(folder: Path) -> str:
    refuse_unsafe(folder)
    code = {path.name: path.read_bytes() for path in folder.glob("*.py")}
    if not code:
        return "no code, nothing outside the folder"
    ours = code == {name: Path(modeling_adaponder.__file__).with_name(name).read_bytes() for name in CODE}
    whose = "as adaponder export writes it" if ours else "not as this version exports it: read before you trust it"
    return f"nothing outside the folder; code that only trust_remote_code=True runs, {whose}"


def _config(folder: Path) -> str:
    config = describe(str(folder), verify=False)
    return f"{config.backbone_config.model_type}, {config.method}, K = {config.iterations}"


def _checksums(folder: Path) -> str:
    if not (folder / MANIFEST).exists():
        return "no manifest to compare with; --seal writes one"
    verify_files(folder, may_be_missing=NOT_NEEDED)
    return f"{len(read_manifest(folder)['files'])} files as they were written"


def _tokenizer(folder: Path) -> str:
    if not has_tokenizer(folder):
        return "none"
    vocabulary, size = tokenizer_of(folder, verify=False).get_vocab(), describe(str(folder), verify=False).vocab_size
    if (highest := max(vocabulary.values(), default=0)) >= size:
        raise InputError(f"the tokenizer's ids go up to {highest}, the model's vocabulary ends at {size - 1}")
    return f"{len(vocabulary):,} tokens"


def _special_tokens(folder: Path) -> str:
    if problems := disagreements(folder):
        raise InputError("; ".join(problems))
    return "config, generation config and tokenizer agree"


def _profiles(folder: Path) -> str:
    return ", ".join(stored(folder)) or "none"


_CHECKS: dict[str, Callable[[Path], str]] = {
    "files": _safe,
    "config": _config,
    "checksums": _checksums,
    "tokenizer": _tokenizer,
    "special tokens": _special_tokens,
    "profiles": _profiles,
}
