"""Bad weights, configs, caches and requests are refused by name, before they do harm (promises 20 to 24)."""

import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, GenerationConfig

import support
from adaponder import AdaPonderConfig, AdaPonderError, AdaPonderForCausalLM, Ledger

NAN = math.nan
INDEX = "model.safetensors.index.json"
WEIGHTS = "model.safetensors"
MANIFEST = "manifest.json"
load = AdaPonderForCausalLM.from_pretrained


def refused(*fields: str):
    """Expects this package's error, a ValueError, that names each of ``fields``."""
    everything = "".join(rf"(?=.*{field})" for field in fields)
    assert issubclass(AdaPonderError, ValueError)
    return pytest.raises(AdaPonderError, match=rf"(?s){everything}")


@pytest.fixture(scope="module")
def model() -> AdaPonderForCausalLM:
    return support.tiny().requires_grad_(False)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A checkpoint in one file and one in shards; tests break copies of them."""
    folder = tmp_path_factory.mktemp("saved")
    support.tiny(dtype=torch.float32).save_pretrained(folder / "whole")
    support.tiny(dtype=torch.float32).save_pretrained(folder / "shards", max_shard_size="10KB")
    return folder


@pytest.fixture
def folder(saved, tmp_path) -> Path:
    return Path(shutil.copytree(saved / "whole", tmp_path / "checkpoint"))


@pytest.fixture
def shards(saved, tmp_path) -> Path:
    return Path(shutil.copytree(saved / "shards", tmp_path / "checkpoint"))


def edit_weights(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    (folder / MANIFEST).unlink(missing_ok=True)  # it would be the first to object
    state = load_file(folder / WEIGHTS)
    change(state)
    save_file(state, folder / WEIGHTS, metadata={"format": "pt"})


def edit_json(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    (path.parent / MANIFEST).unlink(missing_ok=True)
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


GATE = "method.gates.0.out.weight"
LAYER = "backbone.gpt_neox.layers.1.mlp.dense_h_to_4h.weight"


def test_wrong_keys_are_all_listed(folder):
    extra = "backbone.gpt_neox.layers.2.mlp.bias"

    def change(state: dict[str, Tensor]) -> None:
        state.pop("method.gates.1.out.weight")
        state |= {extra: torch.zeros(1), GATE: torch.zeros(1, 7), LAYER: torch.zeros(24, 17)}

    edit_weights(folder, change)
    shapes = (r"\(1, 7\)", r"\(1, 64\)", r"\(24, 17\)", r"\(24, 16\)")
    for loader in (load, AutoModelForCausalLM.from_pretrained):
        with refused("method.gates.1.out.weight", extra, GATE, LAYER, *shapes):
            loader(folder)


def test_the_missing_embedding_of_a_tied_model_is_listed_and_its_tied_head_may_be_absent(tmp_path):
    support.tiny(family="gpt2", dtype=torch.float32).save_pretrained(tmp_path)
    assert not [key for key in load_file(tmp_path / WEIGHTS) if "lm_head" in key]
    assert load(tmp_path)(support.ids()).logits.isfinite().all()
    edit_weights(tmp_path, lambda state: state.pop("backbone.transformer.wte.weight"))
    with refused("missing", "backbone.transformer.wte.weight"):
        load(tmp_path)


@pytest.mark.parametrize("fault", ["missing", "cut-in-the-header", "header-of-2^62", "cut-in-the-tensors"])
def test_the_missing_or_broken_shard_is_named(shards, fault):
    path = sorted(shards.glob("*.safetensors"))[1]
    content = path.read_bytes()
    path.unlink()
    if fault != "missing":
        path.write_bytes(BROKEN[fault](content))
    with refused(path.name):
        load(shards)


SIZES = {"vocab_size": support.VOCABULARY, "max_position_embeddings": support.POSITIONS}
BACKBONE = support.SHAPE | SIZES | {"model_type": "gpt_neox"}
# The range of every field is walked in tests/unit/recipes/test_recipe_ranges.py; here are those that need more.
NONSENSE: dict[str, dict[str, list[Any]]] = {
    "": {  # fields of our own; those of the backbone follow by its family
        "iterations": [0, 2.5, True, 10**5],
        "embedding_scale": [NAN],
        "method": ["magic", ["ponder"], 3],
        "backbone_config": [None, {}, {"hidden_size": 16}, "gpt2", 5, [1]],
        "capacities": [[1.0, NAN], [1.0, 0.0], [0.5, 1.0], [1.0]],  # with method mor and iterations 2
        "pause_token_id": [support.VOCABULARY, -1],  # with method pause
    },
    "gpt_neox": {
        "num_hidden_layers": [-1, 0, 10**6],
        "num_attention_heads": [3, 0, -2],
        "hidden_size": [0, -16, NAN, "16", 10**12],
        "vocab_size": [0, -61, 4 * 10**7],
        "intermediate_size": [-5, 10**15],
        "max_position_embeddings": [-1, 10**30],
        "model_type": [5, ["gpt_neox"], "no-such-family"],
    },
    "llama": {"num_attention_heads": [3], "num_key_value_heads": [3, 0]},
    "qwen2": {"num_hidden_layers": [-1], "num_attention_heads": [3]},
    "gpt2": {"num_attention_heads": [3]},
    "qwen3": {"head_dim": [-8]},
    "qwen3_moe": {"num_experts": [-2]},
}
WITH = {"capacities": {"method": "mor", "iterations": 2}, "pause_token_id": {"method": "pause"}}


class _NothingIsMade(TorchDispatchMode):
    """Fails at the first tensor that has an element."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        assert not any(isinstance(leaf, Tensor) and leaf.numel() for leaf in tree_leaves(result)), function
        return result


@pytest.mark.parametrize(
    ("family", "field", "value"),
    [
        (family, field, value)
        for family, fields in NONSENSE.items()
        for field, values in fields.items()
        for value in values
    ],
)
def test_the_nonsense_config_is_refused_by_its_field_before_anything_is_made(family, field, value):
    given = {"backbone_config": BACKBONE, field: value}
    if family:
        heads = {"num_attention_heads": 4} if field == "num_key_value_heads" else {}
        given = {"backbone_config": BACKBONE | {"model_type": family} | heads | {field: value}}
    with _NothingIsMade(), refused(rf"\b{field}\b"):
        AdaPonderConfig(**given | WITH.get(field, {}))


@pytest.mark.parametrize(("typo", "meant"), [("iteratons", "iterations"), ("taau", "tau"), ("xyzzy", "xyzzy")])
def test_an_unknown_field_is_refused_with_the_one_that_was_meant(typo, meant):
    with refused(rf"\b{typo}\b", rf"\b{meant}\b"):
        AdaPonderConfig(backbone_config=BACKBONE, **{typo: 3})


def test_a_setting_given_at_load_is_checked_too(folder):
    with refused(r"\biterations\b"):
        load(folder, iterations=0)


CODE = {"AutoConfig": "modeling_evil.Config", "AutoModelForCausalLM": "modeling_evil.Model"}


@pytest.mark.parametrize("place", ["config", "backbone_config"])
def test_the_auto_map_is_refused_and_its_code_never_runs(folder, tmp_path, place):
    marker = tmp_path / "marker"
    lines = ["import os", f"os.mkdir({str(marker)!r})", "class Config: pass", "class Model: pass"]
    (folder / "modeling_evil.py").write_text("\n".join(lines))
    edit_json(folder / "config.json", lambda config: config.get(place, config).update(auto_map=CODE))
    for loader in (load, AutoModelForCausalLM.from_pretrained, AutoConfig.from_pretrained):
        for trust in ({}, {"trust_remote_code": True}):
            # Asking to run it is refused even before it is looked for.
            with refused("trust_remote_code" if trust and loader is load else "auto_map"):
                loader(folder, **trust)
    assert not marker.exists()


def test_the_code_for_generation_that_a_checkpoint_brings_is_not_run_by_loading(folder, tmp_path):
    marker = tmp_path / "marker"
    (folder / "custom_generate").mkdir()
    (folder / "custom_generate" / "generate.py").write_text(
        f"import os\nos.mkdir({str(marker)!r})\ndef generate(model, *args, **kwargs): ...\n"
    )
    load(folder).generate(support.ids(), max_new_tokens=1, do_sample=False)
    assert not marker.exists()


@pytest.mark.parametrize("names", [None, ["a"], *({GATE: name} for name in ("..", 5, None, ["a"]))])
def test_an_index_that_names_no_files_of_the_folder_is_refused(shards, names):
    edit_json(shards / INDEX, lambda index: index.update(weight_map=names))
    with refused(INDEX):
        load(shards)


def header_size(content: bytes) -> int:
    return int.from_bytes(content[:8], "little")


def with_offsets_beyond_the_end(content: bytes) -> bytes:
    size = header_size(content)
    header = json.loads(content[8 : 8 + size])
    header[GATE]["data_offsets"] = [0, 10**12]
    written = json.dumps(header).encode()
    return len(written).to_bytes(8, "little") + written + content[8 + size :]


BROKEN: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "cut-in-the-size": lambda content: content[:5],
    "cut-in-the-header": lambda content: content[: 8 + header_size(content) // 2],
    "cut-in-the-tensors": lambda content: content[:-100],
    "longer-than-it-says": lambda content: content + b"surplus",
    "header-of-2^62": lambda content: (2**62).to_bytes(8, "little") + content[8:],
    "header-of-2^64-1": lambda content: b"\xff" * 8 + content[8:],
    "header-longer-than-the-file": lambda content: len(content).to_bytes(8, "little") + content[8:],
    "header-of-0": lambda content: bytes(8) + content[8:],
    "header-not-json": lambda content: content[:8] + b"x" * header_size(content) + content[8 + header_size(content) :],
    "tensor-beyond-the-end": with_offsets_beyond_the_end,
}


@pytest.mark.parametrize("fault", BROKEN)
def test_the_broken_safetensors_file_is_refused_by_name(folder, fault):
    path = folder / WEIGHTS
    path.write_bytes(BROKEN[fault](path.read_bytes()))
    with refused(re.escape(str(path))):
        load(folder)


def test_the_folder_without_config_or_weights_is_refused(folder, tmp_path):
    with refused("config.json"):
        load(tmp_path)
    config = (folder / "config.json").read_text()
    for content in ("", "{", "[]", "\x00"):
        (folder / "config.json").write_text(content)
        with refused("config.json"):
            load(folder)
    (folder / "config.json").write_text(config)
    (folder / WEIGHTS).unlink()
    with refused("safetensors"):
        load(folder)


def ledger_of(model: AdaPonderForCausalLM, ids: Tensor | None = None, **asked) -> Ledger:
    return model(support.ids() if ids is None else ids, use_cache=True, **asked).past_key_values


NEXT = torch.tensor([[5], [7]])
FOREIGN: dict[str, tuple[str, Callable[[AdaPonderForCausalLM], Any]]] = {
    "dynamic": ("past_key_values", lambda model: DynamicCache()),
    "legacy-tuple": ("past_key_values", lambda model: ((torch.zeros(2, 2, 9, 8),) * 2,) * 2),
    "other-layers": ("past_key_values", lambda model: ledger_of(support.wrap(support.stock(num_hidden_layers=3)))),
    "empty-other-layers": ("past_key_values", lambda model: Ledger(layers=3, iterations=3)),
    "other-heads": ("past_key_values", lambda model: ledger_of(support.tiny(family="llama"))),
    "other-precision": ("past_key_values", lambda model: ledger_of(support.tiny(dtype=torch.float32))),
    "mor": ("past_key_values", lambda model: ledger_of(support.tiny("mor"))),
    "pause": ("past_key_values", lambda model: ledger_of(support.tiny("pause"))),
    "fewer-iterations": ("max_iterations", lambda model: ledger_of(model, max_iterations=2)),
    "wrong-batch": ("input_ids", lambda model: ledger_of(model, support.ids(3))),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_the_foreign_cache_is_refused_by_forward_and_generate(model, kind):
    field, make = FOREIGN[kind]
    with refused(field):
        model(NEXT, past_key_values=make(model))
    with refused(field):
        prompt = torch.cat([support.ids(), NEXT], dim=1)
        model.generate(prompt, past_key_values=make(model), max_new_tokens=2, do_sample=False)


def test_the_cache_that_leaves_nothing_of_the_prompt_to_read_is_refused_by_generate(model):
    for held in (9, 12):
        ledger = ledger_of(model, support.ids(2, held))
        with refused("past_key_values"):
            model.generate(support.ids(), past_key_values=ledger, max_new_tokens=2, do_sample=False)


def test_the_attention_mask_that_contradicts_the_cache_is_refused(model):
    shown = torch.ones(2, 10, dtype=torch.long)
    hidden = shown.clone()
    hidden[0, :3] = 0
    with refused("attention_mask"):
        model(NEXT, past_key_values=ledger_of(model), attention_mask=hidden)
    with refused("attention_mask"):
        model(NEXT, past_key_values=ledger_of(model, attention_mask=hidden[:, :9]), attention_mask=shown)
    for wrong in (shown[:, :9], shown[:1], shown[:, None, None]):
        with refused("attention_mask"):
            model(NEXT, past_key_values=ledger_of(model), attention_mask=wrong)


def test_the_refused_request_leaves_the_cache_as_it_was(model):
    ids = support.ids()
    expected = model(torch.cat([ids, NEXT], dim=1)).logits[:, -1]
    ledger = ledger_of(model)
    wrong = torch.zeros(2, 10, dtype=torch.long)
    requests: list[dict[str, Any]] = [
        {"input_ids": NEXT[:1]},
        {"input_ids": NEXT, "attention_mask": wrong},
        {"input_ids": NEXT, "max_iterations": 2},
        {"input_ids": NEXT, "policy": "fast"},
        {"input_ids": support.ids(2, support.POSITIONS)},
    ]
    for request in requests:
        with pytest.raises(AdaPonderError):
            model(**request, past_key_values=ledger)
    assert ledger.get_seq_length() == 9
    assert float((model(NEXT, past_key_values=ledger).logits[:, -1] - expected).abs().max()) <= 1e-12


# gpt_neox and llama turn positions into angles; gpt2 and opt look them up in a table that ends.
@pytest.mark.parametrize("family", ["gpt_neox", "llama", "gpt2", "opt"])
def test_the_last_position_is_the_last(family):
    model = support.tiny(family=family).requires_grad_(False)
    last = support.POSITIONS
    assert model(support.ids(1, last)).logits.shape[1] == last
    mask = torch.ones(1, last + 6, dtype=torch.long)
    mask[:, :10] = 0  # padding takes no position
    assert model(support.ids(1, last + 6), attention_mask=mask).logits.isfinite().all()
    ledger = ledger_of(model, support.ids(2, last - 1))
    too_long: list[dict[str, Any]] = [
        {"input_ids": support.ids(1, last + 1), "execution": "dense"},
        {"input_ids": support.ids(1, last + 1), "execution": "compact"},
        {"input_ids": support.ids(2, 2), "past_key_values": ledger},
    ]
    for request in too_long:
        with refused("input_ids", str(last - 1)):
            model(**request)
    model(NEXT, past_key_values=ledger)
    with refused("input_ids", str(last - 1)):
        model(NEXT, past_key_values=ledger)
    with refused("position_ids", str(last - 1)):
        model(support.ids(), position_ids=torch.arange(9)[None] + last - 4)


def masked(rows: list[int]) -> Tensor:
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[rows] = 0
    return mask


REQUESTS: dict[str, list[Any]] = {
    "input_ids": [
        {"inputs": torch.zeros(1, 0, dtype=torch.long)},
        {"inputs": None},
        {"inputs": torch.tensor([1, 2, 3])},
        {"inputs": support.ids(1, support.POSITIONS + 1)},
    ],
    "attention_mask": [
        masked([1]),
        masked([0, 1]),
        torch.ones(2, 5, dtype=torch.long),
        {"inputs": torch.tensor([[1, 2, 3], [0, 0, 0]]), "pad_token_id": 0},
    ],
    "max_new_tokens": [0, -1, 10**9, {"inputs": support.ids(1, 60), "max_new_tokens": 6}],
    "temperature": [NAN, -1.0, 0.0, "hot"],
    "top_p": [1.5, 0.0, NAN],
    "top_k": [-1],
    "cache_implementation": ["static", "quantized", "offloaded"],
    "max_iterations": [0, 4],
    "policy": ["fast"],
    "assistant_early_exit": [1],
}


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in REQUESTS.items() for value in values])
def test_the_request_that_cannot_be_honoured_is_refused_by_its_field_before_the_first_token(model, field, value):
    read: list[Any] = []
    sampled = field in ("temperature", "top_p", "top_k")
    request = {"inputs": support.ids(), "max_new_tokens": 2, "do_sample": sampled, "on_iteration": read.append}
    with refused(rf"\b{field}\b"):
        model.generate(**request | (value if isinstance(value, dict) else {field: value}))
    assert read == []


@pytest.mark.parametrize("field", ["temperature", "top_p", "top_k", "max_new_tokens", "cache_implementation"])
def test_the_generation_config_is_checked_like_arguments(model, field):
    value = {"temperature": -1.0, "max_new_tokens": 10**9}.get(field, REQUESTS[field][0])
    settings = GenerationConfig(**({"do_sample": True, "max_new_tokens": 2} | {field: value}))
    with refused(rf"\b{field}\b"):
        model.generate(support.ids(), generation_config=settings)


def test_the_request_that_just_fits_is_honoured(model):
    # The last new token is returned without being read, so it needs no position of its own.
    last = support.POSITIONS
    assert model.generate(support.ids(1, last), max_new_tokens=1, do_sample=False).shape == (1, last + 1)
    assert model.generate(support.ids(1, last - 4), max_new_tokens=5, do_sample=False).shape == (1, last + 1)
