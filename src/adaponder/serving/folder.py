"""Writes the page with a model as a folder of static files: any web host can serve it, and a browser runs the model."""

from __future__ import annotations

import json
import shutil
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from adaponder.backbones.shape import Shape
from adaponder.checkpoints.manifest import saving
from adaponder.config import AdaPonderConfig
from adaponder.conversion.convert import require_empty
from adaponder.errors import InputError
from adaponder.methods import method_class, method_names
from adaponder.policies.choice import calibrated
from adaponder.serving.served import Served

# The policies that local/policies.js implements.
POLICIES = ("gate", "exit", "fixed", "entropy", "kl", "change", "random")
MOST_BYTES = 50_000_000
_CURE = "serve it with adaponder serve"


def require_runnable(config: AdaPonderConfig, source: str) -> None:
    """Raises :class:`InputError`, which names ``source``, unless local/model.js supports this config."""
    backbone = config.backbone_config
    _refuse(source, "backbone", backbone.model_type, ("gpt_neox",))
    _refuse(source, "method", config.method, methods())
    _refuse(source, "reuse", config.reuse, ("state",))
    _refuse(source, "expectation_top_k", config.expectation_top_k, (None,))
    _refuse(source, "hidden_act", backbone.hidden_act, ("gelu",))
    _refuse(source, "rope_type", backbone.rope_parameters["rope_type"], ("default",))


def methods() -> tuple[str, ...]:
    """Returns the names of the methods that local/model.js supports."""
    return tuple(name for name in method_names() if "browser_update" in vars(method_class(name)))


def _refuse(source: str, field: str, value: Any, supported: tuple[Any, ...]) -> None:
    if value not in supported:
        names = ", ".join(map(str, supported))
        raise InputError(f"{source}: {field}={value} cannot be computed in a browser, only {names}; {_CURE}")


def require_tokenizer(content: dict[str, Any], source: str) -> None:
    """Raises :class:`InputError` unless local/tokenizer.js supports all features of this ``tokenizer.json``.

    With an unsupported feature, the page would encode texts to other ids.
    """
    model, splits = content["model"], content["pre_tokenizer"] or {}
    kind = f"{model['type']} after {splits.get('type')}"
    _refuse(source, "tokenizer", kind, ("BPE after ByteLevel", "WordLevel after WhitespaceSplit"))
    _refuse(source, "tokenizer.normalizer", (content["normalizer"] or {}).get("type"), (None, "NFC"))
    post = content["post_processor"] or {}
    adds_tokens = any("SpecialToken" in piece for piece in post.get("single", ()))
    if not adds_tokens and post.get("type") != "TemplateProcessing":
        _refuse(source, "tokenizer.post_processor", post.get("type"), (None, "ByteLevel"))
    _refuse(source, "tokenizer.decoder", (content["decoder"] or {}).get("type"), (None, "ByteLevel"))
    off = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk", "byte_fallback", "ignore_merges")
    flags = {name: model.get(name) for name in off}
    flags |= {"add_prefix_space": splits.get("add_prefix_space"), "no regex": not splits.get("use_regex", True)}
    flags["tokens around a text"] = adds_tokens
    flags |= {f"added {name}": any(token[name] for token in content["added_tokens"]) for name in ("lstrip", "rstrip")}
    flags["added single_word"] = any(token["single_word"] for token in content["added_tokens"])
    if used := [name for name, value in flags.items() if value]:
        raise InputError(f"{source}: a tokenizer with {used[0]} cannot run in a browser; {_CURE}")


def narrowed(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor in bfloat16 or float16 if this changes no value, else in float32."""
    wide = tensor.detach().cpu().float()
    for dtype in (torch.bfloat16, torch.float16):
        if torch.equal(wide.to(dtype).float(), wide):
            return wide.to(dtype).contiguous()
    return wide.contiguous()


def facts_of(served: Served) -> dict[str, Any]:
    """Returns the facts of ``/v1/models``, with only the policies of local/policies.js.

    The field ``local`` holds further facts that local/model.js needs.
    """
    model, config, shape = served.model, served.model.config, served.shape
    assert isinstance(shape, Shape)
    backbone, method = config.backbone_config, type(model.method)
    body: Any = model.wrapped.body
    facts = served.facts()
    facts["policies"] = [word for word in facts["policies"] if word in POLICIES]
    local = {
        "update": method.browser_update,
        "iterations": served.iterations,
        "halts": method.halts,
        "exits": method.signal == "exit",
        "mixes": method.mixes_vocabulary,
        "input_scale": config.input_scale,
        "table_scale": config.table_scale,
        "state_scale": config.state_scale,
        "default_policy": model.method.default_policy(training=False).as_line(),
        "calibrated": calibrated(served.profiles, served.iterations),
        "gates_asked": method.gates_asked(served.iterations),
        "gate_flops": method.gate_flops(config),
        "end_ids": sorted(served.eos_ids),
        "unknown_id": served.unknown_id,
        "backbone": {
            "layers": shape.layers,
            "hidden": shape.hidden,
            "heads": backbone.num_attention_heads,
            "intermediate": backbone.intermediate_size,
            "vocabulary": shape.vocabulary,
            "positions": served.tokens,
            "epsilon": backbone.layer_norm_eps,
            "parallel": backbone.use_parallel_residual,
            "frequencies": body.rotary_emb.inv_freq.tolist(),
        },
        "cost": {"body": shape.body, "attention": sum(shape.attention), "kv": shape.kv},
    }
    return {"name": served.name, **facts, "local": local}


def write_page(served: Served, out: Path, *, source: str) -> dict[str, int]:
    """Writes the page and the model to ``out``, a new or empty folder; returns the bytes of ``weights`` and ``other``.

    Raises :class:`InputError`, which names ``source``, if the model or its tokenizer cannot run in a browser.
    """
    require_empty(out)
    require_runnable(served.model.config, source)
    if (backend := getattr(served.tokenizer, "backend_tokenizer", None)) is None:
        raise InputError(f"{source}: its tokenizer is written in Python and cannot run in a browser; {_CURE}")
    tokenizer = json.loads(backend.to_str())
    require_tokenizer(tokenizer, source)
    tied = served.model.config.backbone_config.tie_word_embeddings
    state = served.model.state_dict().items()
    weights = save({name: narrowed(value) for name, value in state if not (tied and name.endswith("lm_head.weight"))})
    if len(weights) > MOST_BYTES:
        megabytes = f"{len(weights) / 1e6:,.0f} MB of weights; a page takes at most {MOST_BYTES // 1_000_000}"
        raise InputError(f"{source}: {megabytes}; {_CURE}")
    with saving(out, intact="nothing was written") as partial:
        with as_file(files("adaponder.serving")) as serving:
            # local/api.js replaces page/api.js, which calls a server.
            for folder in ("page", "local"):
                shutil.copytree(serving / folder, partial / "page", dirs_exist_ok=True)
        (partial / "page" / "index.html").rename(partial / "index.html")
        (partial / "model").mkdir()
        for name, content in (("model.json", facts_of(served)), ("tokenizer.json", tokenizer)):
            (partial / "model" / name).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
        (partial / "model" / "model.safetensors").write_bytes(weights)
    total = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    return {"weights": len(weights), "other": total - len(weights)}
