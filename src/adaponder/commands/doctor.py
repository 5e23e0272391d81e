"""adaponder doctor: checks the installation or a checkpoint; --seal rewrites the checkpoint's manifest."""

from __future__ import annotations

import importlib.util
import platform
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import typer

from adaponder.commands.shared import Json, arg, opt, show_checks
from adaponder.errors import AdaPonderError, CheckpointError, InputError, listed
from adaponder.terminal import console, table, write_json
from adaponder.version import __version__

_PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "huggingface_hub", "triton", "lm_eval")
_SEAL = "Accept the files as they are: copy end and padding ids from the tokenizer, rewrite the checksums."
_AGAINST = "Compare logits and exits with a file written by examples/save_published_outputs.py."
_FLOORS = {"torch": "2.11", "transformers": "5.17"}


def doctor(
    checkpoint: Annotated[str | None, arg("Examine this checkpoint instead of the installation.", "CKPT")] = None,
    *,
    seal: Annotated[bool, opt(_SEAL, flag="--seal")] = False,
    against: Annotated[Path | None, opt(_AGAINST, "FILE")] = None,
    json: Json = None,
) -> dict[str, Any]:
    """Show versions, devices, which kernels would run, and whether our FLOP counts agree with torch's.

    With CKPT, check that its files are unchanged and safe to open, and that its settings agree.
    """
    if checkpoint is None and (seal or against):
        raise InputError("--seal: name the checkpoint to seal" if seal else "--against: name the checkpoint to compare")
    report = check_installation() if checkpoint is None else check_checkpoint(checkpoint, seal=seal)
    if checkpoint is not None and against is not None and not report["problems"]:
        report |= check_against(checkpoint, against)
    write_json(json, report)
    if report["problems"]:
        raise typer.Exit(1)
    return report


def check_installation() -> dict[str, Any]:
    """Prints and returns versions, devices, kernels and FLOP checks; ``problems`` maps names to what is wrong."""
    import torch
    from packaging.version import Version

    from adaponder.evaluation.meter import check_all

    versions: dict[str, Any] = {"adaponder": __version__, "python": platform.python_version()}
    versions |= dict.fromkeys(_PACKAGES)
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    problems = {
        name: f"is older than {floor}"
        for name, floor in _FLOORS.items()
        if Version(versions[name]).release < Version(floor).release
    }
    devices = [{"name": "cpu", "what": f"{platform.machine()}, threads: {torch.get_num_threads()}"}]
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        devices.append({"name": f"cuda:{index}", "what": f"{about.name}, {about.total_memory / 2**30:.0f} GiB"})
    operations = sorted(path.parent.name for path in Path(__file__).parents[1].glob("ops/*/torch.py"))
    kernels = [
        {"op": op, "device": device["name"], "runs": would_run(op, device["name"])}
        for device in devices
        for op in operations
    ]
    checks = [check._asdict() | {"ratio": check.ratio} for check in check_all()]
    if wrong := [str(check["method"]) for check in checks if abs(check["ratio"] - 1) > 0.01]:
        problems["meter"] = f"differs from torch's flop counter by more than 1 % for {', '.join(wrong)}"
    rows = [(name, value or "not installed", problems.get(name, "")) for name, value in versions.items()]
    console.print(table("Versions", ("package", "version", ""), rows))
    console.print(table("Devices", ("device", "what"), [device.values() for device in devices]))
    console.print(table("Kernels", ("operation", "device", "would run"), [kernel.values() for kernel in kernels]))
    flops = [(row["method"], f"{row['formula']:,}", f"{row['counted']:,}", f"{row['ratio']:.4f}") for row in checks]
    console.print(table("FLOPs of a small forward", ("method", "our meter", "torch's counter", "ratio"), flops))
    if problems:
        console.print("; ".join(f"{name} {problem}" for name, problem in problems.items()), style="red")
    else:
        console.print("all well", style="green")
    return {"versions": versions, "problems": problems, "devices": devices, "kernels": kernels, "flops": checks}


def would_run(op: str, device: str) -> str:
    """Returns the implementation of an operation that would run on a device, in words."""
    from adaponder.ops.dispatch import HAS_TRITON

    has_kernel = importlib.util.find_spec(f"adaponder.ops.{op}.triton") is not None
    if device == "cpu" or not has_kernel:
        return "torch (reference)"
    return "Triton kernels in bf16 and fp16, torch in float32" if HAS_TRITON else "torch: Triton is not installed"


def check_checkpoint(checkpoint: str, *, seal: bool = False) -> dict[str, Any]:
    """Examines a checkpoint, prints the checks and returns them; ``problems`` is empty if all succeed."""
    from adaponder.checkpoints.loading import fetch

    folder = fetch(checkpoint)
    changes = seal_folder(folder) if seal else []
    report = {"checkpoint": str(folder), "changes": changes, **examine_checkpoint(folder)}
    rows = [(name, "wrong" if name in report["problems"] else result) for name, result in report["checks"].items()]
    console.print(table(str(folder), ("", ""), rows))
    for change in changes:
        console.print(change, soft_wrap=True)
    for problem in report["problems"].values():
        console.print(problem, style="red", soft_wrap=True)
    if not report["problems"]:
        console.print("all well", style="green")
    return report


def check_against(checkpoint: str, file: Path) -> dict[str, Any]:
    """Compares a checkpoint's outputs with the published code's, saved in ``file``; prints and returns the checks."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    from adaponder.conversion.checks import compare_with_saved
    from adaponder.conversion.open import load

    try:
        saved = load_file(file)
        dtype = str(saved["logits"].dtype).removeprefix("torch.")
        model, _ = load(checkpoint, dtype=dtype)
        checks, depths = compare_with_saved(model, saved)
    except (OSError, SafetensorError, KeyError) as error:
        raise InputError(f"--against {file} was not written by save_published_outputs.py: {error}") from error
    show_checks(f"{checkpoint} against {file}", checks)
    if depths:
        names = ("published", "reusing keys and values", "near ties")
        rows = [(threshold, *(f"{mean[name]:.4g}" for name in names)) for threshold, mean in depths.items()]
        console.print(table("Mean depth by exit threshold", ("threshold", *names), rows))
    failed = [check.what for check in checks if not check.holds]
    console.print(f"differs: {', '.join(failed)}" if failed else "equal", style="red" if failed else "green")
    against = {"checks": {check.what: check.difference for check in checks}, "depths": depths}
    return {"against": against, "problems": {"against": ", ".join(failed)} if failed else {}}


def examine_checkpoint(folder: Path) -> dict[str, Any]:
    """Returns the result of each check by name (``checks``), and the errors of failed checks (``problems``)."""
    checks: dict[str, str] = {}
    problems: dict[str, str] = {}
    for what, check in _CHECKS.items():
        try:
            checks[what] = check(folder)
        except AdaPonderError as error:
            checks[what] = problems[what] = str(error)
    return {"checks": checks, "problems": problems}


def seal_folder(folder: Path) -> list[str]:
    """Sets the configs' end and padding tokens to the tokenizer's, writes a new manifest, and returns the changes."""
    from adaponder.checkpoints.loading import refuse_unsafe
    from adaponder.checkpoints.manifest import MANIFEST, read_manifest, write_manifest
    from adaponder.checkpoints.special_tokens import mend
    from adaponder.conversion.open import describe

    if folder.resolve().parent.name == "snapshots":
        raise InputError(f"--seal: {folder} is in the hub's cache; copy it to a folder of your own first")
    refuse_unsafe(folder)
    describe(str(folder), verify=False)
    changes = mend(folder)
    try:
        facts = {key: value for key, value in read_manifest(folder).items() if key == "step"}
    except AdaPonderError:  # no manifest, or a damaged one
        facts = {}
    write_manifest(folder, **facts)
    return [*changes, f"sealed: {MANIFEST} lists {len(read_manifest(folder)['files'])} files as they are now"]


def _safe(folder: Path) -> str:
    from adaponder.checkpoints.loading import refuse_unsafe
    from adaponder.checkpoints.looped import layout_of
    from adaponder.conversion.export import CODE
    from adaponder.conversion.exported import modeling_adaponder
    from adaponder.files import read_json

    refuse_unsafe(folder)
    if layout_of(read_json(folder / "config.json")) is not None:
        return "nothing outside the folder; code of the release is never run"
    code = {path.name: path.read_bytes() for path in folder.glob("*.py")}
    if not code:
        return "no code, nothing outside the folder"
    exported = {name: Path(modeling_adaponder.__file__).with_name(name).read_bytes() for name in CODE}
    if changed := [name for name in code if code[name] != exported.get(name)]:
        raise CheckpointError(
            f"{folder}: {listed(sorted(changed))} differs from what this version exports, and trust_remote_code=True "
            "would run it: read it, or export the checkpoint again"
        )
    return "nothing outside the folder; code that only trust_remote_code=True runs, as adaponder export writes it"


def _config(folder: Path) -> str:
    from adaponder.conversion.open import describe

    config = describe(str(folder), verify=False)
    return f"{config.backbone_config.model_type}, {config.method}, K = {config.iterations}"


def _checksums(folder: Path) -> str:
    from adaponder.checkpoints.loading import NOT_NEEDED
    from adaponder.checkpoints.manifest import MANIFEST, read_manifest, verify_files

    if not (folder / MANIFEST).exists():
        return f"unverified: there is no {MANIFEST} to compare with; --seal writes one"
    verify_files(folder, may_be_missing=NOT_NEEDED)
    return f"{len(read_manifest(folder)['files'])} files, unchanged since they were written"


def _tokenizer(folder: Path) -> str:
    from adaponder.checkpoints.loading import has_tokenizer, tokenizer_of
    from adaponder.conversion.open import describe

    if not has_tokenizer(folder):
        return "none"
    vocabulary, size = tokenizer_of(folder, verify=False).get_vocab(), describe(str(folder), verify=False).vocab_size
    if (highest := max(vocabulary.values(), default=0)) >= size:
        raise InputError(f"the tokenizer has ids up to {highest}, but the model's vocabulary ends at {size - 1}")
    return f"{len(vocabulary):,} tokens"


def _special_tokens(folder: Path) -> str:
    from adaponder.checkpoints.special_tokens import disagreements

    if problems := disagreements(folder):
        raise InputError("; ".join(problems))
    return "config, generation config and tokenizer agree"


def _profiles(folder: Path) -> str:
    from adaponder.evaluation.lab.profiles import stored

    return ", ".join(stored(folder)) or "none"


_CHECKS: dict[str, Callable[[Path], str]] = {
    "files": _safe,
    "config": _config,
    "checksums": _checksums,
    "tokenizer": _tokenizer,
    "special tokens": _special_tokens,
    "profiles": _profiles,
}
