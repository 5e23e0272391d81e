"""adaponder doctor: versions, devices, the kernels each would run, and our FLOP count against torch's."""

from __future__ import annotations

import importlib.util
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from adaponder.commands.options import DoctorOptions
from adaponder.evaluation.meter import check_all
from adaponder.ops.fused import HAS_TRITON
from adaponder.terminal import console, table, write_json
from adaponder.version import __version__

_PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "huggingface_hub", "triton", "lm_eval")
_FLOORS = {"torch": (2, 11), "transformers": (5, 17)}


def run(options: DoctorOptions) -> dict[str, Any]:
    """Prints and returns what ``examine`` does."""
    report = examine()
    rows = [
        (name, value or "not installed", report["problems"].get(name, "")) for name, value in report["versions"].items()
    ]
    console.print(table("Versions", ("package", "version", ""), rows))
    rows = [(device["name"], device["what"]) for device in report["devices"]]
    console.print(table("Devices", ("device", "what"), rows))
    rows = [(kernel["op"], kernel["device"], kernel["runs"]) for kernel in report["kernels"]]
    console.print(table("Kernels", ("operation", "device", "would run"), rows))
    rows = [
        (check["method"], f"{check['formula']:,}", f"{check['counted']:,}", f"{check['ratio']:.4f}")
        for check in report["flops"]
    ]
    console.print(table("FLOPs of a small forward", ("method", "our meter", "torch's counter", "ratio"), rows))
    if report["problems"]:
        console.print("; ".join(f"{name} {why}" for name, why in report["problems"].items()), style="red")
    else:
        console.print("all well", style="green")
    write_json(options.json, report)
    return report


def examine() -> dict[str, Any]:
    """Versions, devices, kernels and FLOP checks; ``problems`` has a sentence for each thing that is wrong."""
    versions = {"adaponder": __version__, "python": platform.python_version()}
    versions |= {name: _version(name) for name in _PACKAGES}
    problems = {
        name: f"is older than {'.'.join(map(str, floor))}"
        for name, floor in _FLOORS.items()
        if _numbers(versions[name]) < floor
    }
    devices = [{"name": "cpu", "what": f"{platform.machine()}, threads: {torch.get_num_threads()}"}]
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        devices.append({"name": f"cuda:{index}", "what": f"{about.name}, {about.total_memory / 2**30:.0f} GiB"})
    kernels = [
        {"op": op, "device": device["name"], "runs": would_run(op, device["name"])}
        for device in devices
        for op in operations()
    ]
    checks = [check._asdict() | {"ratio": check.ratio} for check in check_all()]
    if wrong := [str(check["method"]) for check in checks if abs(check["ratio"] - 1) > 0.01]:
        problems["meter"] = f"differs from torch's flop counter by more than 1 % for {', '.join(wrong)}"
    return {"versions": versions, "problems": problems, "devices": devices, "kernels": kernels, "flops": checks}


def operations() -> list[str]:
    """The names of the operations in ``adaponder.ops``, sorted."""
    spec = importlib.util.find_spec("adaponder.ops")
    folders = spec.submodule_search_locations if spec is not None else None
    folder = Path(next(iter(folders or [])))
    return sorted(path.parent.name for path in folder.glob("*/__init__.py"))


def would_run(op: str, device: str) -> str:
    """The implementation of an operation that would run on a device, in words."""
    written = importlib.util.find_spec(f"adaponder.ops.{op}.triton") is not None
    if device == "cpu" or not written:
        return "torch (reference)"
    return "Triton kernels in bf16 and fp16, torch in float32" if HAS_TRITON else "torch: Triton is not installed"


def _version(name: str) -> str | None:
    """The version of an installed package; ``None`` if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _numbers(text: str | None) -> tuple[int, ...]:
    """The first two numbers of a version: (2, 11) for ``2.11.0+cu130``."""
    return tuple(int(part) for part in (text or "0").split("+")[0].split(".")[:2] if part.isdigit())
