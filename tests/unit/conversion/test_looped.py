"""Published looped models open by name and compute what an independent reference of their layout computes."""

import copy
import json
import random
import re
import tempfile
from pathlib import Path

import pytest
import torch

from adaponder import Engine, Request
from adaponder.conversion.convert import convert
from adaponder.conversion.open import describe, load
from adaponder.errors import CheckpointError
from adaponder.inference.bodies import FusedBody, build_body
from adaponder.policies import ExitThreshold, FixedDepth
from kernel_support import PLACES
from looped_support import NANBEIGE, OURO, PONDERLM, plain_loops, plain_ponderlm, publish, random_weights
from support import widen_norms

THRESHOLDS = (0.2, 0.5, 0.8, 1.0)


def drawn(base, number):
    """Returns a small configuration of a layout: heads, sizes, depth, loops, rotary angles, epsilon, tied or not."""
    choose, config = random.Random(number).choice, copy.deepcopy(base)
    groups = choose([1, 2, 3])
    heads = groups * choose([1, 2])
    config |= {
        "num_attention_heads": heads,
        "intermediate_size": choose([8, 20]),
        "num_hidden_layers": choose([1, 2, 3]),
        "vocab_size": choose(range(11, 41)),
    }
    if base is PONDERLM:
        return config | {
            "hidden_size": heads * choose([8, 16]),
            "rotary_pct": choose([0.25, 0.5, 1.0]),
            "rotary_emb_base": choose([10_000, 500_000]),
            "layer_norm_eps": choose([1e-6, 1e-5]),
            "use_parallel_residual": choose([True, False]),
            "pondering_steps": choose([0, 1, 2, 3]),
            "scale_embeds": choose([True, False]),
            "mutiply_pondering_steps": choose([True, False]),
        }
    config |= {
        "num_key_value_heads": groups,
        "head_dim": choose([4, 8, 12]),
        "hidden_size": heads * choose([4, 8]),
        "rope_theta": choose([1e4, 1e6, 7e7]),
        "rms_norm_eps": choose([1e-6, 1e-5]),
        "tie_word_embeddings": choose([True, False]),
        "total_ut_steps" if base is OURO else "num_loops": choose([1, 2, 3, 4]),
    }
    if base is NANBEIGE:
        config["skip_loop_final_norm"] = choose([True, False])
    config.pop("layer_types", None)
    return config


def opened(folder):
    model, _ = load(str(folder), dtype="float64")
    widen_norms(model)
    return model


def texts(config, seed):
    return torch.randint(config["vocab_size"], (2, 7), generator=torch.Generator().manual_seed(seed))


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


def exits(gates, threshold):
    """The loop, counted from 1, from which published code takes a token's output, by the gates of all loops."""
    reached = 1 - (1 - gates).cumprod(-1) >= threshold
    reached[..., -1] = True
    return reached.int().argmax(-1) + 1


def hundred(base):
    """Runs a check on 100 configurations of a layout, in five batches, which ``make test`` runs the first of."""

    def decorate(check):
        def test(batch):
            for number in range(20 * batch, 20 * batch + 20):
                config = drawn(base, number)
                print(f"configuration {number}: {config}")
                weights = random_weights(config, seed=number)
                with tempfile.TemporaryDirectory() as folder, torch.no_grad():
                    model = opened(publish(Path(folder), config, weights))
                    check(config, weights, model, texts(config, number), number)

        return pytest.mark.one_of(5)(pytest.mark.parametrize("batch", range(5))(test))

    return decorate


@pytest.mark.parametrize("base", [OURO, NANBEIGE, PONDERLM], ids=["ouro", "nanbeige", "ponderlm"])
def test_the_hundred_configurations_of_a_layout_differ(base):
    assert len({json.dumps(drawn(base, number)) for number in range(100)}) == 100


@hundred(OURO)
def test_an_ouro_release_equals_the_reference_at_every_loop_gate_and_exit(config, weights, model, ids, number):
    loops = config["total_ut_steps"]
    every = model(ids, output_iteration_logits=True, policy=FixedDepth(loops))
    plain = plain_loops(config, weights, ids)
    close(every.iteration_logits, torch.stack(plain.logits))
    close(every.gates, torch.stack(plain.gates, -1))
    assert torch.equal(model(ids).depth, torch.full_like(ids, loops))  # early_exit_threshold 1
    for threshold in THRESHOLDS:
        published = plain_loops(config, weights, ids, threshold=threshold, frozen=False)
        assert torch.equal(exits(every.gates, threshold), published.depth)
        early = plain_loops(config, weights, ids, threshold=threshold)
        output = model(ids, policy=ExitThreshold(threshold))
        assert torch.equal(output.depth, early.depth)
        close(output.logits, early.logits[-1])
    # With a cache a token's keys and values are those of its own last loop.
    cached = THRESHOLDS[number % len(THRESHOLDS)]
    early = plain_loops(config, weights, ids, threshold=cached)
    logits, depth = with_a_cache(model, ids, policy=ExitThreshold(cached))
    close(logits, early.logits[-1])
    assert torch.equal(depth, early.depth)


def with_a_cache(model, ids, **options):
    """Returns logits and depths of a text that is read in four parts."""
    ledger, chunks = model.new_ledger(), ids.split([3, 1, 1, 2], 1)
    outputs = [model(chunk, past_key_values=ledger, use_cache=True, **options) for chunk in chunks]
    return [torch.cat([output[name] for output in outputs], 1) for name in ("logits", "depth")]


@hundred(NANBEIGE)
def test_a_nanbeige_release_equals_the_reference_at_every_loop(config, weights, model, ids, number):
    plain = plain_loops(config, weights, ids)
    close(model(ids, output_iteration_logits=True).iteration_logits, torch.stack(plain.logits))
    close(with_a_cache(model, ids)[0], plain.logits[-1])
    method = "loop" if config["skip_loop_final_norm"] else "ouro"
    assert (model.config.method, model.config.iterations) == (method, config["num_loops"])


@hundred(PONDERLM)
def test_a_ponderlm_release_equals_the_reference_at_every_iteration(config, weights, model, ids, number):
    plain = plain_ponderlm(config, weights, ids)
    close(model(ids, output_iteration_logits=True).iteration_logits, torch.stack(plain))
    close(with_a_cache(model, ids)[0], plain[-1])
    assert (model.config.method, model.config.iterations) == ("ponder", config["pondering_steps"] + 1)


@pytest.mark.parametrize("device", PLACES)
@pytest.mark.parametrize(
    ("base", "settings"),
    [
        (OURO, {"early_exit_threshold": 0.6}),
        (NANBEIGE, {"skip_loop_final_norm": False}),
        (NANBEIGE, {"skip_loop_final_norm": True}),
    ],
    ids=["ouro", "nanbeige-normed", "nanbeige-skipping"],
)
def test_the_engine_decodes_at_each_tokens_exit_what_the_reference_does(tmp_path, base, settings, device):
    config = base | settings | {"eos_token_id": None}
    weights, threshold = random_weights(config), config.get("early_exit_threshold", 1.0)
    model = opened(publish(tmp_path, config, weights)).to(device)
    assert isinstance(build_body(model, None, rows=4, positions=64, width=1), FusedBody)
    prompts = [[3, 14, 15, 9, 2], [6, 5], [35, 8, 9, 7, 9, 3, 2]]
    requests = [Request(prompt, max_new_tokens=8, temperature=0) for prompt in prompts]
    for prompt, [completion] in zip(prompts, Engine(model, lanes=2).generate(requests), strict=True):
        plain = plain_loops(config, weights, torch.tensor([[*prompt, *completion.ids]]), threshold=threshold)
        assert completion.ids == plain.logits[-1][0, len(prompt) - 1 : -1].argmax(-1).tolist()
        assert completion.depths == plain.depth[0, :-1].tolist()
        assert (len(set(completion.depths)) > 1) == (base is OURO)


def changed(config, **settings):
    return {name: value for name, value in (config | settings).items() if value is not ...}


def without(*names):
    return lambda weights: {name: tensor for name, tensor in weights.items() if name not in names}


def renamed(old, new):
    return lambda weights: {name.replace(old, new): tensor for name, tensor in weights.items()}


def same(weights):
    return weights


GATE = "model.early_exit_gate"
# Of each layout: the field that counts its loops, and its head.
LAYOUTS = {
    "ouro": (OURO, "total_ut_steps", "lm_head"),
    "nanbeige": (NANBEIGE, "num_loops", "lm_head"),
    "ponderlm": (PONDERLM, "pondering_steps", "embed_out"),
}
BAD = {
    "ouro-no-gate": (OURO, {}, without(f"{GATE}.weight", f"{GATE}.bias"), f"gate: {GATE}.bias, {GATE}.weight missing"),
    "ouro-gate-without-bias": (OURO, {}, without(f"{GATE}.bias"), f"no exit gate: {GATE}.bias missing"),
    "ouro-gate-size": (OURO, {}, lambda w: w | {f"{GATE}.weight": torch.zeros(1, 15)}, f"{GATE}.weight is (1, 15)"),
    "ouro-norms": (OURO, {}, renamed("input_layernorm_2", "extra"), "missing: model.layers.0.input_layernorm_2"),
    "ouro-window": (OURO, {"use_sliding_window": True}, same, "use_sliding_window=True: Ouro with it is not modelled"),
    "ouro-layers-with-windows": (OURO, {"layer_types": ["full_attention", "sliding_attention"]}, same, "layer_types: "),
    "ouro-forced-step": (OURO, {"early_exit_step": 0}, same, "early_exit_step=0: "),
    "ouro-no-size": (OURO, {"vocab_size": ...}, same, "vocab_size missing"),
    "ouro-layers": (OURO, {"num_hidden_layers": 1, "layer_types": ...}, same, "unexpected: model.layers.1."),
    "ouro-not-finite": (OURO, {}, lambda w: w | {f"{GATE}.bias": torch.tensor([torch.nan])}, "hold NaN: exit.bias"),
    "nanbeige-gate": (NANBEIGE, {}, lambda w: w | {f"{GATE}.bias": torch.zeros(1)}, f"unexpected: {GATE}.bias"),
    "nanbeige-layers": (NANBEIGE, {"num_hidden_layers": 3}, same, "missing: model.layers.2."),
    "nanbeige-no-size": (NANBEIGE, {"hidden_size": ...}, same, "hidden_size missing"),
    "ponderlm-no-norm": (PONDERLM, {}, without("gpt_neox.final_layer_norm.bias"), "missing: gpt_neox.final_layer_norm"),
    "ponderlm-layers": (PONDERLM, {"num_hidden_layers": 1}, same, "unexpected: gpt_neox.layers.1."),
}
NORM = "model.layers.1.input_layernorm_2.weight"
BAD["ouro-norm-size"] = OURO, {}, lambda w: w | {NORM: torch.ones(8)}, NORM
for auto, target in (
    ("AutoModelForCausalLM", "modeling_evil.OuroForCausalLM"),
    ("AutoConfig", "configuration_ouro.Evil"),
):
    BAD[f"ouro-code-{auto}"] = OURO, {"auto_map": {auto: target}}, same, "auto_map asks to run"
for value in (1.5, 0, "0.5"):
    BAD[f"ouro-threshold-{value}"] = (
        OURO,
        {"early_exit_threshold": value},
        same,
        f"early_exit_threshold={value!r} must be",
    )
for layout, (base, loops, head) in LAYOUTS.items():
    for value in (-1, 10**9, "4", True, 2.5):
        BAD[f"{layout}-loops-{value}"] = base, {loops: value}, same, f"{loops}={value!r} must be"
    BAD[f"{layout}-loops-unknown"] = base, {loops: ...}, same, f"{loops}=None must be"
    missing, differs = f"=False, but the weights have no {head}", f"=True, but {head}.weight differs"
    BAD[f"{layout}-head-missing"] = base, {}, without(f"{head}.weight"), f"tie_word_embeddings{missing}"
    BAD[f"{layout}-head-not-tied"] = base, {"tie_word_embeddings": True}, same, f"tie_word_embeddings{differs}"
for name, base, flag in (
    ("nanbeige-skips", NANBEIGE, "skip_loop_final_norm"),
    ("ponderlm-scale", PONDERLM, "scale_embeds"),
    ("ponderlm-multiply", PONDERLM, "mutiply_pondering_steps"),
):
    BAD[f"{name}-in-words"] = base, {flag: "false"}, same, f"{flag}='false' must be true or false"
for flag in ("loop_share_kv", "enable_mhc", "qk_layernorm", "emb_neighbor_num"):
    BAD[f"nanbeige-{flag}"] = NANBEIGE, {flag: 3}, same, f"{flag}=3: Nanbeige with it is not modelled"


@pytest.mark.parametrize("case", BAD)
def test_a_bad_layout_is_refused_with_the_field(tmp_path, case):
    base, settings, edit, message = BAD[case]
    publish(tmp_path / "bad", changed(base, **settings), edit(random_weights(base)))
    with pytest.raises(CheckpointError, match=re.escape(message)):
        load(str(tmp_path / "bad"))


@pytest.mark.parametrize(
    ("family", "says"),
    [("iquestloopcoder", "a gate per head mixes"), ("huginn_raven", "repeats its middle layers")],
)
def test_other_looped_models_are_refused_by_name_with_the_reason(tmp_path, family, says):
    publish(tmp_path / "other", OURO | {"model_type": family}, {})
    for read in (load, describe):
        with pytest.raises(CheckpointError, match=f"model_type='{family}' cannot be opened: .*{says}"):
            read(str(tmp_path / "other"))


@pytest.mark.parametrize(
    "config", [OURO, OURO | {"tie_word_embeddings": True}, NANBEIGE], ids=["ouro", "tied", "nanbeige"]
)
def test_a_release_converts_to_a_folder_that_computes_the_same(tmp_path, config):
    config = config | {"torch_dtype": "float32", "early_exit_threshold": 0.7}
    publish(tmp_path / "hub", config, random_weights(config, dtype=torch.float32))
    done = convert(str(tmp_path / "hub"), tmp_path / "out")
    loops = 2 if config["model_type"] == "nanbeige" else 4
    assert (done.kind, done.method, done.iterations) == (config["model_type"], "ouro", loops)
    assert len(done.checks) == loops + (config["model_type"] == "ouro")
    assert all(check.holds and check.bound for check in done.checks)
    hub, _ = load(str(tmp_path / "hub"))
    saved, _ = load(str(tmp_path / "out"))
    ids = texts(config, 0)
    ours, theirs = saved(ids), hub(ids)
    assert torch.equal(ours.logits, theirs.logits)
    assert torch.equal(ours.depth, theirs.depth)
    described = [describe(str(tmp_path / name)) for name in ("hub", "out")]
    assert all(x.exit_threshold == saved.config.exit_threshold and x.iterations == loops for x in described)
    if config["model_type"] == "ouro":
        assert saved.config.exit_threshold == 0.7
        assert 1 < ours.depth.float().mean() < 4


def test_a_conversion_that_does_not_equal_its_source_writes_nothing(tmp_path, monkeypatch):
    publish(tmp_path / "hub", OURO, random_weights(OURO))
    monkeypatch.setattr("adaponder.halting.Logit.forward", lambda self, hidden: hidden.sum(-1))
    with pytest.raises(CheckpointError, match="exit probabilities equal the source's: differs"):
        convert(str(tmp_path / "hub"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_ouro_becomes_another_method_and_a_plain_decoder(tmp_path):
    publish(tmp_path / "hub", OURO, random_weights(OURO))
    done = convert(str(tmp_path / "hub"), tmp_path / "ada", method="adaponder", iterations=3)
    assert (done.method, [check.holds for check in done.checks]) == ("adaponder", [True])
    convert(str(tmp_path / "hub"), tmp_path / "ouro")
    convert(str(tmp_path / "ouro"), tmp_path / "plain", method="backbone")
    assert json.loads((tmp_path / "plain" / "config.json").read_text())["model_type"] == "hyperclovax"
