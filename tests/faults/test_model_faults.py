"""Bad weights, configs, caches and requests are refused by name, before they do harm (promises 20 to 24)."""

from __future__ import annotations

import copy
import json
import math
import os
import pickle
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
    """The refusal of this package, naming each of ``fields``; a ValueError to callers that do not know the package."""
    everything = "".join(rf"(?=.*{field})" for field in fields)
    assert issubclass(AdaPonderError, ValueError)
    return pytest.raises(AdaPonderError, match=rf"(?s){everything}")


@pytest.fixture(scope="module")
def model() -> AdaPonderForCausalLM:
    """No test changes it."""
    return support.tiny().requires_grad_(False)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A complete checkpoint; tests break copies of it."""
    folder = tmp_path_factory.mktemp("saved")
    support.tiny(dtype=torch.float32).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def saved_in_shards(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    support.tiny(dtype=torch.float32).save_pretrained(folder, max_shard_size="10KB")
    return folder


@pytest.fixture
def folder(saved, tmp_path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "checkpoint"))


@pytest.fixture
def shards(saved_in_shards, tmp_path) -> Path:
    return Path(shutil.copytree(saved_in_shards, tmp_path / "checkpoint"))


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


# --- 20. missing, unexpected or mis-shaped keys: error listing them -----------------------------------------------

GATE = "method.gates.0.out.weight"
LAYER = "backbone.gpt_neox.layers.1.mlp.dense_h_to_4h.weight"


def test_the_intact_checkpoint_loads_as_it_was_saved(folder):
    expected = support.tiny(dtype=torch.float32)
    ids = support.ids()
    for loaded in (load(folder), AutoModelForCausalLM.from_pretrained(folder)):
        assert torch.equal(loaded(ids).logits, expected(ids).logits)


EXTRA = "backbone.gpt_neox.layers.2.mlp.bias"
WRONG_KEYS: dict[str, tuple[Callable[[dict[str, Tensor]], Any], tuple[str, ...]]] = {
    "missing": (lambda state: [state.pop(key) for key in (GATE, LAYER)], (GATE, LAYER)),
    "unexpected": (lambda state: state.update({EXTRA: torch.zeros(2)}), (EXTRA,)),
    "mis-shaped": (
        lambda state: state.update({GATE: torch.zeros(1, 7), LAYER: torch.zeros(24, 17)}),
        (GATE, LAYER, r"\(1, 7\)", r"\(1, 64\)", r"\(24, 17\)", r"\(24, 16\)"),
    ),
    "all-three": (
        lambda state: [state.pop(LAYER), state.update({GATE: torch.zeros(1, 7), EXTRA: torch.zeros(1)})],
        (LAYER, EXTRA, GATE),
    ),
}


@pytest.mark.parametrize("loader", [load, AutoModelForCausalLM.from_pretrained], ids=["own", "auto"])
@pytest.mark.parametrize("kind", WRONG_KEYS)
def test_wrong_keys_are_all_listed(folder, loader, kind):
    change, named = WRONG_KEYS[kind]
    edit_weights(folder, change)
    with refused(*named):
        loader(folder)


def test_the_missing_embedding_of_a_tied_model_is_listed_and_its_tied_head_may_be_absent(tmp_path):
    support.tiny(family="gpt2", dtype=torch.float32).save_pretrained(tmp_path)
    assert not [key for key in load_file(tmp_path / WEIGHTS) if "lm_head" in key]
    assert load(tmp_path)(support.ids()).logits.isfinite().all()
    edit_weights(tmp_path, lambda state: state.pop("backbone.transformer.wte.weight"))
    with refused("missing", "backbone.transformer.wte.weight"):
        load(tmp_path)


def test_the_missing_shard_is_named(shards):
    lost = sorted(shards.glob("*.safetensors"))[1]
    lost.unlink()
    with refused(lost.name):
        load(shards)


# --- 21. nonsense configs: refused before allocation --------------------------------------------------------------

BACKBONE = {
    "model_type": "gpt_neox",
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "vocab_size": support.VOCABULARY,
    "max_position_embeddings": support.POSITIONS,
}
NONSENSE: list[dict[str, Any]] = [
    {"iterations": 0},
    {"iterations": -1},
    {"iterations": 2.5},
    {"iterations": NAN},
    {"iterations": True},
    {"iterations": "4"},
    {"iterations": 10**5},
    {"tau": 0.0},
    {"tau": 1.0},
    {"tau": -0.1},
    {"tau": 1.5},
    {"tau": NAN},
    {"tau": "low"},
    {"gate_width": -1},
    {"gate_width": 1.5},
    {"gate_width": 10**9},
    {"gate_bias": NAN},
    {"gate_bias": math.inf},
    {"embedding_scale": NAN},
    {"embedding_scale": 0.0},
    {"embedding_scale": -1.0},
    {"initial_multiplier": NAN},
    {"initial_multiplier": 0.0},
    {"expectation_top_k": 0},
    {"expectation_top_k": NAN},
    {"exit_threshold": NAN},
    {"exit_threshold": 0.0},
    {"exit_threshold": 1.5},
    {"exit_entropy_weight": NAN},
    {"router_alpha": NAN},
    {"router_loss_weight": NAN},
    {"method": "magic"},
    {"reuse": "everything"},
    {"ponder_on": "vibes"},
    {"ponder_pool": "open"},
    {"capacities": [1.0, NAN], "method": "mor", "iterations": 2},
    {"capacities": [1.0, 0.0], "method": "mor", "iterations": 2},
    {"capacities": [0.5, 1.0], "method": "mor", "iterations": 2},
    {"capacities": [1.0], "method": "mor", "iterations": 2},
    {"pause_token_id": support.VOCABULARY, "method": "pause"},
    {"pause_token_id": -1, "method": "pause"},
]
NONSENSE_BACKBONES: list[dict[str, Any]] = [
    {"num_hidden_layers": -1},
    {"num_hidden_layers": 0},
    {"num_hidden_layers": -1, "model_type": "qwen2"},
    {"num_attention_heads": 3},
    {"num_attention_heads": 3, "model_type": "llama"},
    {"num_attention_heads": 3, "model_type": "qwen2"},
    {"num_attention_heads": 3, "model_type": "gpt2"},
    {"num_attention_heads": 0},
    {"num_attention_heads": -2},
    {"num_key_value_heads": 3, "num_attention_heads": 4, "model_type": "llama"},
    {"num_key_value_heads": 0, "model_type": "llama"},
    {"hidden_size": 0},
    {"hidden_size": -16},
    {"hidden_size": NAN},
    {"hidden_size": "16"},
    {"vocab_size": 0},
    {"vocab_size": -61},
    {"vocab_size": 4 * 10**7},
    {"num_hidden_layers": 10**6},
    {"hidden_size": 10**12},
    {"intermediate_size": -5},
    {"intermediate_size": 10**15},
    {"max_position_embeddings": -1},
    {"max_position_embeddings": 10**30},
    {"head_dim": -8, "model_type": "qwen3"},
    {"num_experts": -2, "model_type": "qwen3_moe"},
    {"model_type": 5},
    {"model_type": ["gpt_neox"]},
    {"model_type": "no-such-family"},
]


class _NothingIsMade(TorchDispatchMode):
    """Fails at the first tensor with an element in it: whoever is inside has begun to build."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        assert not any(isinstance(leaf, Tensor) and leaf.numel() for leaf in tree_leaves(result)), function
        return result


def first(values: dict[str, Any]) -> str:
    return next(iter(values))


@pytest.mark.parametrize("values", NONSENSE, ids=lambda values: f"{first(values)}={values[first(values)]}")
def test_the_nonsense_config_is_refused_by_its_field_before_anything_is_made(values):
    with _NothingIsMade(), refused(rf"\b{first(values)}\b"):
        AdaPonderConfig(backbone_config=BACKBONE, **values)


@pytest.mark.parametrize(
    "values",
    NONSENSE_BACKBONES,
    ids=lambda values: f"{values.get('model_type', 'gpt_neox')}-{first(values)}={values[first(values)]}",
)
def test_the_nonsense_backbone_is_refused_by_its_field_before_anything_is_made(values):
    with _NothingIsMade(), refused(rf"\b{first(values)}\b"):
        AdaPonderConfig(backbone_config=BACKBONE | values)


@pytest.mark.parametrize("backbone", [None, {}, {"hidden_size": 16}, "gpt2", 5, [1]], ids=str)
def test_the_absent_backbone_is_asked_for_by_name(backbone):
    with _NothingIsMade(), refused("backbone_config"):
        AdaPonderConfig(backbone_config=backbone)


@pytest.mark.parametrize(("typo", "meant"), [("iteratons", "iterations"), ("taau", "tau"), ("xyzzy", "xyzzy")])
def test_an_unknown_field_is_refused_with_the_one_that_was_meant(typo, meant):
    with refused(rf"\b{typo}\b", rf"\b{meant}\b"):
        AdaPonderConfig(backbone_config=BACKBONE, **{typo: 3})


@pytest.mark.parametrize(
    ("values", "of_backbone"),
    [
        ({"iterations": 0}, False),
        ({"tau": NAN}, False),
        ({"iteratons": 3}, False),
        ({"num_hidden_layers": -1}, True),
        ({"num_attention_heads": 3}, True),
    ],
)
def test_nonsense_in_a_saved_config_is_refused_before_anything_is_made(folder, values, of_backbone):
    edit_json(
        folder / "config.json",
        lambda config: (config["backbone_config"] if of_backbone else config).update(values),
    )
    with _NothingIsMade(), refused(rf"\b{first(values)}\b"):
        load(folder)


@pytest.mark.parametrize("values", [{"tau": 2.0}, {"tau": NAN}, {"embedding_scale": -1.0}], ids=str)
def test_the_nonsense_given_while_loading_is_refused_like_any_other(folder, values):
    with refused(rf"\b{first(values)}\b"):
        load(folder, **values)


# --- 22. pickle files, auto_map, `..` paths, oversized headers: refused, nothing executed -------------------------


class _Bomb:
    """A pickle that leaves a marker behind when someone loads it."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


def plant_code(folder: Path, marker: Path) -> None:
    lines = ["import os", f"os.mkdir({str(marker)!r})", "class Config: pass", "class Model: pass"]
    (folder / "modeling_evil.py").write_text("\n".join(lines))


CODE = {"AutoConfig": "modeling_evil.Config", "AutoModelForCausalLM": "modeling_evil.Model"}


def test_the_bomb_of_these_tests_does_go_off_when_unpickled(tmp_path):
    pickle.loads(pickle.dumps(_Bomb(tmp_path / "marker")))
    assert (tmp_path / "marker").exists()


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "model.ckpt", "model.pkl"])
@pytest.mark.parametrize("loader", [load, AutoModelForCausalLM.from_pretrained], ids=["own", "auto"])
def test_the_folder_of_pickles_is_refused_by_file_name_and_not_opened(folder, tmp_path, name, loader):
    marker = tmp_path / "marker"
    (folder / WEIGHTS).unlink()
    (folder / name).write_bytes(pickle.dumps(_Bomb(marker)))
    with refused(name):
        loader(folder)
    assert not marker.exists()


@pytest.mark.parametrize("name", ["pytorch_model.bin", "optimizer.pt", "training_args.bin"])
def test_the_pickle_beside_the_weights_is_never_opened(folder, tmp_path, name):
    marker = tmp_path / "marker"
    (folder / name).write_bytes(pickle.dumps(_Bomb(marker)))
    assert load(folder).config.iterations == 3
    assert not marker.exists()


def test_the_pickle_named_safetensors_is_refused_and_not_opened(folder, tmp_path):
    marker = tmp_path / "marker"
    (folder / WEIGHTS).write_bytes(pickle.dumps(_Bomb(marker)))
    with refused(WEIGHTS):
        load(folder)
    assert not marker.exists()


def test_the_pickles_cannot_be_asked_for(folder, tmp_path):
    marker = tmp_path / "marker"
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(_Bomb(marker)))
    with refused("use_safetensors"):
        load(folder, use_safetensors=False)
    assert not marker.exists()


@pytest.mark.parametrize("place", ["config", "backbone_config"])
@pytest.mark.parametrize("trust", [{}, {"trust_remote_code": True}], ids=["", "trusting"])
@pytest.mark.parametrize(
    "loader",
    [load, AutoModelForCausalLM.from_pretrained, AutoConfig.from_pretrained],
    ids=["own", "auto-model", "auto-config"],
)
def test_the_auto_map_is_refused_and_its_code_never_runs(folder, tmp_path, place, trust, loader):
    marker = tmp_path / "marker"
    plant_code(folder, marker)

    def change(config: dict[str, Any]) -> None:
        (config if place == "config" else config["backbone_config"])["auto_map"] = CODE

    edit_json(folder / "config.json", change)
    # Asking to run it is refused even before it is looked for.
    with refused("trust_remote_code" if trust and loader is load else "auto_map"):
        loader(folder, **trust)
    assert not marker.exists()


def test_the_auto_map_is_refused_in_a_config_made_by_hand():
    with refused("auto_map"):
        AdaPonderConfig(backbone_config=BACKBONE, auto_map=CODE)
    with refused(r"backbone_config\.auto_map"):
        AdaPonderConfig(backbone_config=BACKBONE | {"auto_map": CODE})


@pytest.mark.parametrize("where", ["saved", "somebody/some-model"])
def test_the_wish_to_trust_remote_code_is_refused(folder, where):
    with refused("trust_remote_code"):
        load(folder if where == "saved" else where, trust_remote_code=True)


def test_the_code_for_generation_that_a_checkpoint_brings_is_not_run_by_loading(folder, tmp_path):
    marker = tmp_path / "marker"
    (folder / "custom_generate").mkdir()
    (folder / "custom_generate" / "generate.py").write_text(
        f"import os\nos.mkdir({str(marker)!r})\ndef generate(model, *args, **kwargs): ...\n"
    )
    load(folder).generate(support.ids(), max_new_tokens=1, do_sample=False)
    assert not marker.exists()


def test_the_attention_kernel_that_a_checkpoint_names_is_not_fetched(folder):
    # "owner/name" makes Hugging Face download and import a kernel: code chosen by the checkpoint.
    edit_json(folder / "config.json", lambda config: config.update(attn_implementation="somebody/some-kernel"))
    with refused("attn_implementation"):
        load(folder)


OUTSIDE = ["../elsewhere.safetensors", "../../elsewhere.safetensors", "sub/../../elsewhere.safetensors", ".."]


def point_first_key_at(shards: Path, name: Any) -> None:
    def change(index: dict[str, Any]) -> None:
        index["weight_map"][next(iter(index["weight_map"]))] = name

    edit_json(shards / INDEX, change)


def test_the_intact_shards_load(shards):
    assert len(list(shards.glob("*.safetensors"))) > 2
    assert load(shards).config.iterations == 3


@pytest.mark.parametrize("name", [*OUTSIDE, "ABSOLUTE"])
def test_the_shard_outside_the_folder_is_refused_by_name(shards, tmp_path, name):
    outside = shutil.copy(next(shards.glob("*.safetensors")), tmp_path / "elsewhere.safetensors")
    name = str(outside) if name == "ABSOLUTE" else name
    point_first_key_at(shards, name)
    with refused(INDEX, re.escape(repr(name))):
        load(shards)


@pytest.mark.parametrize("name", ["../elsewhere.safetensors", f"../{INDEX}"])
def test_the_weights_that_a_config_places_outside_the_folder_are_refused(folder, tmp_path, name):
    shutil.copy(folder / WEIGHTS, tmp_path / "elsewhere.safetensors")
    edit_json(folder / "config.json", lambda config: config.update(transformers_weights=name))
    with refused("transformers_weights"):
        load(folder)


@pytest.mark.parametrize("wrong", [5, None, ["a"]], ids=str)
def test_the_shard_that_is_not_a_name_is_refused(shards, wrong):
    point_first_key_at(shards, wrong)
    with refused(INDEX):
        load(shards)


@pytest.mark.parametrize("weight_map", ["absent", None, ["a"], "a"], ids=str)
def test_the_shard_index_without_a_map_is_refused(shards, weight_map):
    (shards / INDEX).write_text(json.dumps({} if weight_map == "absent" else {"weight_map": weight_map}))
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


def test_the_oversized_header_is_refused_although_the_file_is_as_long(folder):
    path = folder / WEIGHTS
    with path.open("wb") as file:
        file.write((200_000_000).to_bytes(8, "little"))
        file.truncate(300_000_000)  # sparse: no disk is used
    with refused(re.escape(str(path)), "200000000"):
        load(folder)


@pytest.mark.parametrize("fault", ["cut-in-the-header", "header-of-2^62", "cut-in-the-tensors"])
def test_the_broken_shard_is_refused_by_name(shards, fault):
    path = sorted(shards.glob("*.safetensors"))[1]
    path.write_bytes(BROKEN[fault](path.read_bytes()))
    with refused(path.name):
        load(shards)


@pytest.mark.parametrize("content", ["", "{", "[]", "\x00"], ids=repr)
def test_the_config_that_is_no_json_object_is_refused_by_name(folder, content):
    (folder / "config.json").write_text(content)
    with refused("config.json"):
        load(folder)


def test_the_folder_without_config_or_weights_is_refused(folder, tmp_path):
    with refused("config.json"):
        load(tmp_path)
    (folder / WEIGHTS).unlink()
    with refused("safetensors"):
        load(folder)


# --- 23. foreign or non-empty cache, wrong batch, past the last position: a clear error ---------------------------


def ledger_of(model: AdaPonderForCausalLM, ids: Tensor | None = None, **asked) -> Ledger:
    return model(support.ids() if ids is None else ids, use_cache=True, **asked).past_key_values


def of_three_layers() -> AdaPonderForCausalLM:
    config = copy.deepcopy(support.FAMILIES["gpt_neox"])
    config.num_hidden_layers = 3
    return AdaPonderForCausalLM.from_backbone(
        AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval(), iterations=3
    )


NEXT = torch.tensor([[5], [7]])
FOREIGN: dict[str, tuple[str, Callable[[AdaPonderForCausalLM], Any]]] = {
    "dynamic": ("past_key_values", lambda model: DynamicCache()),
    "legacy-tuple": ("past_key_values", lambda model: ((torch.zeros(2, 2, 9, 8),) * 2,) * 2),
    "other-layers": ("past_key_values", lambda model: ledger_of(of_three_layers())),
    "empty-other-layers": ("past_key_values", lambda model: Ledger(layers=3, iterations=3)),
    "other-heads": ("past_key_values", lambda model: ledger_of(support.tiny(family="llama"))),
    "other-precision": ("past_key_values", lambda model: ledger_of(support.tiny(dtype=torch.float32))),
    "mor": ("past_key_values", lambda model: ledger_of(support.tiny("mor"))),
    "pause": ("past_key_values", lambda model: ledger_of(support.tiny("pause"))),
    "fewer-iterations": ("max_iterations", lambda model: ledger_of(model, max_iterations=2)),
    "wrong-batch": ("input_ids", lambda model: ledger_of(model, support.ids(3))),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_the_foreign_cache_is_refused_by_forward(model, kind):
    field, make = FOREIGN[kind]
    with refused(field):
        model(NEXT, past_key_values=make(model))


@pytest.mark.parametrize("kind", FOREIGN)
def test_the_foreign_cache_is_refused_by_generate(model, kind):
    field, make = FOREIGN[kind]
    prompt = torch.cat([support.ids(), NEXT], dim=1)
    with refused(field):
        model.generate(prompt, past_key_values=make(model), max_new_tokens=2, do_sample=False)


def test_the_cache_of_more_iterations_than_asked_is_refused(model):
    with refused("max_iterations"):
        model(NEXT, past_key_values=ledger_of(model), max_iterations=2)


@pytest.mark.parametrize("held", [9, 12], ids=["all-of-it", "more"])
def test_the_cache_that_leaves_nothing_of_the_prompt_to_read_is_refused_by_generate(model, held):
    with refused("past_key_values"):
        model.generate(
            support.ids(), past_key_values=ledger_of(model, support.ids(2, held)), max_new_tokens=2, do_sample=False
        )


def test_the_attention_mask_that_contradicts_the_cache_is_refused(model):
    shown = torch.ones(2, 10, dtype=torch.long)
    hidden = shown.clone()
    hidden[0, :3] = 0
    with refused("attention_mask"):
        model(NEXT, past_key_values=ledger_of(model), attention_mask=hidden)
    with refused("attention_mask"):
        model(NEXT, past_key_values=ledger_of(model, attention_mask=hidden[:, :9]), attention_mask=shown)


@pytest.mark.parametrize("shape", [(2, 1), (2, 9), (2, 11), (1, 10), (2, 1, 1, 10)], ids=str)
def test_the_attention_mask_of_a_wrong_shape_is_refused(model, shape):
    with refused("attention_mask"):
        model(NEXT, past_key_values=ledger_of(model), attention_mask=torch.ones(shape, dtype=torch.long))


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
    for execution in ("dense", "compact"):
        with refused("input_ids", str(last - 1)):
            model(support.ids(1, last + 1), execution=execution)
    ledger = ledger_of(model, support.ids(2, last - 1))
    with refused("input_ids", str(last - 1)):
        model(support.ids(2, 2), past_key_values=ledger)
    model(NEXT, past_key_values=ledger)
    with refused("input_ids", str(last - 1)):
        model(NEXT, past_key_values=ledger)


@pytest.mark.parametrize("family", ["gpt_neox", "gpt2"])
def test_the_padding_takes_no_position(family):
    model = support.tiny(family=family).requires_grad_(False)
    mask = torch.ones(1, support.POSITIONS + 6, dtype=torch.long)
    mask[:, :10] = 0
    assert model(support.ids(1, support.POSITIONS + 6), attention_mask=mask).logits.isfinite().all()


@pytest.mark.parametrize("family", ["gpt_neox", "gpt2"])
def test_the_position_ids_past_the_last_position_are_refused(family):
    model = support.tiny(family=family).requires_grad_(False)
    with refused("position_ids", str(support.POSITIONS - 1)):
        model(support.ids(), position_ids=torch.arange(9)[None] + support.POSITIONS - 4)


# --- 24. requests for text that cannot be honoured: a clear error naming the field --------------------------------


def masked(rows: list[int]) -> Tensor:
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[rows] = 0
    return mask


REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "empty-prompt": ("input_ids", {"inputs": torch.zeros(1, 0, dtype=torch.long)}),
    "no-prompt": ("input_ids", {"inputs": None}),
    "prompt-without-batch": ("input_ids", {"inputs": torch.tensor([1, 2, 3])}),
    "all-padding-row": ("attention_mask", {"attention_mask": masked([1])}),
    "all-padding": ("attention_mask", {"attention_mask": masked([0, 1])}),
    "all-padding-row-by-pad-token": (
        "attention_mask",
        {"inputs": torch.tensor([[1, 2, 3], [0, 0, 0]]), "pad_token_id": 0},
    ),
    "mask-too-narrow": ("attention_mask", {"attention_mask": torch.ones(2, 5, dtype=torch.long)}),
    "prompt-too-long": ("input_ids", {"inputs": support.ids(1, support.POSITIONS + 1)}),
    "prompt-plus-new-too-long": ("max_new_tokens", {"inputs": support.ids(1, 60), "max_new_tokens": 6}),
    "max-new-tokens-0": ("max_new_tokens", {"max_new_tokens": 0}),
    "max-new-tokens-negative": ("max_new_tokens", {"max_new_tokens": -1}),
    "max-new-tokens-1e9": ("max_new_tokens", {"max_new_tokens": 10**9}),
    "assistant_early_exit": ("assistant_early_exit", {"assistant_early_exit": 1}),
    "temperature-nan": ("temperature", {"do_sample": True, "temperature": NAN}),
    "temperature-negative": ("temperature", {"do_sample": True, "temperature": -1.0}),
    "temperature-0": ("temperature", {"do_sample": True, "temperature": 0.0}),
    "temperature-text": ("temperature", {"do_sample": True, "temperature": "hot"}),
    "top-p-above-1": ("top_p", {"do_sample": True, "top_p": 1.5}),
    "top-p-0": ("top_p", {"do_sample": True, "top_p": 0.0}),
    "top-p-nan": ("top_p", {"do_sample": True, "top_p": NAN}),
    "top-k-negative": ("top_k", {"do_sample": True, "top_k": -1}),
    "cache-static": ("cache_implementation", {"cache_implementation": "static"}),
    "cache-quantized": ("cache_implementation", {"cache_implementation": "quantized"}),
    "cache-offloaded": ("cache_implementation", {"cache_implementation": "offloaded"}),
    "max-iterations-0": ("max_iterations", {"max_iterations": 0}),
    "max-iterations-4-of-3": ("max_iterations", {"max_iterations": 4}),
    "policy-by-name": ("policy", {"policy": "fast"}),
}


@pytest.mark.parametrize("fault", REQUESTS)
def test_the_request_that_cannot_be_honoured_is_refused_by_its_field_before_the_first_token(model, fault):
    field, asked = REQUESTS[fault]
    read: list[Any] = []
    request = {"inputs": support.ids(), "max_new_tokens": 2, "do_sample": False, "on_iteration": read.append} | asked
    with refused(rf"\b{field}\b"):
        model.generate(**request)
    assert read == []


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": -1.0},
        {"top_p": 1.5},
        {"top_k": -1},
        {"max_new_tokens": 10**9},
        {"cache_implementation": "static"},
    ],
    ids=str,
)
def test_the_generation_config_is_checked_like_arguments(model, values):
    settings = GenerationConfig(**({"do_sample": True, "max_new_tokens": 2} | values))
    with refused(rf"\b{first(values)}\b"):
        model.generate(support.ids(), generation_config=settings)


def test_the_request_that_just_fits_is_honoured(model):
    # The last new token is returned without being read, so it needs no position of its own.
    last = support.POSITIONS
    assert model.generate(support.ids(1, last), max_new_tokens=1, do_sample=False).shape == (1, last + 1)
    assert model.generate(support.ids(1, last - 4), max_new_tokens=5, do_sample=False).shape == (1, last + 1)


def test_the_forward_over_nothing_is_refused(model):
    with refused("input_ids"):
        model(torch.zeros(2, 0, dtype=torch.long))
    with refused("input_ids"):
        model(torch.tensor([1, 2, 3]))
    with refused("input_ids"):
        model()


FORWARD: dict[str, dict[str, Any]] = {
    "max_iterations": {"max_iterations": 0},
    "execution": {"execution": "fast"},
    "labels": {"labels": support.ids(2, 4)},
    "document_ids": {"document_ids": support.ids(2, 4)},
    "position_ids": {"position_ids": torch.arange(4)[None]},
    "attention_mask": {"attention_mask": torch.ones(2, 4)},
    "policy": {"policy": 3},
    "inputs_embeds": {"inputs_embeds": torch.zeros(2, 9, 16)},
    "max_iteration": {"max_iteration": 2},
}


@pytest.mark.parametrize("field", FORWARD)
def test_the_wrong_argument_of_forward_is_refused_by_name(model, field):
    with refused(rf"\b{field}\b"):
        model(support.ids(), **FORWARD[field])
