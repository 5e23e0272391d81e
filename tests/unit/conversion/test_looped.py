"""Published looped models open by name and compute what an independent reference of their layout computes."""

import copy
import json
import random
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
    # With a cache, token by token: a token's keys and values are those of its own last loop.
    cached = THRESHOLDS[number % len(THRESHOLDS)]
    early, ledger, policy = (
        plain_loops(config, weights, ids, threshold=cached),
        model.new_ledger(),
        ExitThreshold(cached),
    )
    outputs = [
        model(chunk, past_key_values=ledger, policy=policy, use_cache=True) for chunk in ids.split([3, 1, 1, 2], 1)
    ]
    close(torch.cat([output.logits for output in outputs], 1), early.logits[-1])
    assert torch.equal(torch.cat([output.depth for output in outputs], 1), early.depth)


def with_a_cache(model, ids):
    """Returns the logits of a text that is read in three parts."""
    ledger = model.new_ledger()
    outputs = [model(chunk, past_key_values=ledger, use_cache=True).logits for chunk in ids.split([4, 1, 2], 1)]
    return torch.cat(outputs, 1)


@hundred(NANBEIGE)
def test_a_nanbeige_release_equals_the_reference_at_every_loop(config, weights, model, ids, number):
    plain = plain_loops(config, weights, ids)
    close(model(ids, output_iteration_logits=True).iteration_logits, torch.stack(plain.logits))
    close(with_a_cache(model, ids), plain.logits[-1])
    method = "loop" if config["skip_loop_final_norm"] else "ouro"
    assert (model.config.method, model.config.iterations) == (method, config["num_loops"])


@hundred(PONDERLM)
def test_a_ponderlm_release_equals_the_reference_at_every_iteration(config, weights, model, ids, number):
    plain = plain_ponderlm(config, weights, ids)
    close(model(ids, output_iteration_logits=True).iteration_logits, torch.stack(plain))
    close(with_a_cache(model, ids), plain[-1])
    assert (model.config.method, model.config.iterations) == ("ponder", config["pondering_steps"] + 1)


@pytest.mark.parametrize("device", PLACES)
def test_the_engine_decodes_at_each_tokens_exit_what_the_reference_does(tmp_path, device):
    threshold = 0.6
    config = OURO | {"early_exit_threshold": threshold, "eos_token_id": None}
    for prompt, completion, weights in decoded(tmp_path, config, device):
        plain = plain_loops(config, weights, torch.tensor([[*prompt, *completion.ids]]), threshold=threshold)
        assert completion.ids == plain.logits[-1][0, len(prompt) - 1 : -1].argmax(-1).tolist()
        assert completion.depths == plain.depth[0, :-1].tolist()
        assert len(set(completion.depths)) > 1


@pytest.mark.parametrize("device", PLACES)
@pytest.mark.parametrize("skips", [False, True], ids=["normed", "skipping"])
def test_the_engine_decodes_nanbeige_as_the_reference_does(tmp_path, skips, device):
    config = NANBEIGE | {"skip_loop_final_norm": skips, "eos_token_id": None}
    for prompt, completion, weights in decoded(tmp_path, config, device):
        plain = plain_loops(config, weights, torch.tensor([[*prompt, *completion.ids]]))
        assert completion.ids == plain.logits[-1][0, len(prompt) - 1 : -1].argmax(-1).tolist()


def decoded(folder, config, device):
    """Yields (prompt, completion, weights) of greedy requests to an engine with a fused body."""
    weights = random_weights(config)
    model = opened(publish(folder, config, weights)).to(device)
    assert isinstance(build_body(model, None, rows=4, positions=64, width=1), FusedBody)
    prompts = [[3, 14, 15, 9, 2], [6, 5], [35, 8, 9, 7, 9, 3, 2]]
    requests = [Request(prompt, max_new_tokens=8, temperature=0) for prompt in prompts]
    for prompt, [completion] in zip(prompts, Engine(model, lanes=2).generate(requests), strict=True):
        yield prompt, completion, weights


def changed(config, **settings):
    return {name: value for name, value in (config | settings).items() if value is not ...}


def without(*names):
    return lambda weights: {name: tensor for name, tensor in weights.items() if name not in names}


def renamed(old, new):
    return lambda weights: {name.replace(old, new): tensor for name, tensor in weights.items()}


def same(weights):
    return weights


GATE = "model.early_exit_gate"
BAD = {
    "no-gate": ({}, without(f"{GATE}.weight", f"{GATE}.bias"), f"no exit gate: {GATE}.bias, {GATE}.weight missing"),
    "gate-without-bias": ({}, without(f"{GATE}.bias"), f"no exit gate: {GATE}.bias missing"),
    "gate-of-another-size": ({}, lambda w: w | {f"{GATE}.weight": torch.zeros(1, 15)}, f"{GATE}.weight is (1, 15)"),
    "no-norm-after-attention": ({}, renamed("input_layernorm_2", "extra"), "missing: model.layers.0.input_layernorm_2"),
    "norms-of-gemma": (
        {},
        renamed("post_attention_layernorm_2", "post_feedforward_layernorm"),
        "unexpected: model.layers.0.post_feedforward_layernorm",
    ),
    "no-loops": ({"total_ut_steps": 0}, same, "total_ut_steps=0 must be"),
    "loops-in-words": ({"total_ut_steps": "4"}, same, "total_ut_steps='4' must be"),
    "loops-unknown": ({"total_ut_steps": ...}, same, "total_ut_steps=None must be"),
    "loops-true": ({"total_ut_steps": True}, same, "total_ut_steps=True must be"),
    "loops-broken": ({"total_ut_steps": 2.5}, same, "total_ut_steps=2.5 must be"),
    "threshold": ({"early_exit_threshold": 1.5}, same, "early_exit_threshold=1.5 must be"),
    "head-missing": ({}, without("lm_head.weight"), "tie_word_embeddings=False, but the weights have no lm_head"),
    "head-not-tied": ({"tie_word_embeddings": True}, same, "tie_word_embeddings=True, but lm_head.weight differs"),
    "window": ({"use_sliding_window": True}, same, "use_sliding_window=True: Ouro with it is not modelled"),
    "window-of-a-layer": ({"layer_types": ["full_attention", "sliding_attention"]}, same, "layer_types: "),
    "forced-step": ({"early_exit_step": 0}, same, "early_exit_step=0: "),
    "no-size": ({"vocab_size": ...}, same, "vocab_size missing"),
    "layers": ({"num_hidden_layers": 1, "layer_types": ...}, same, "unexpected: model.layers.1."),
    "other-code": (
        {"auto_map": {"AutoModelForCausalLM": "modeling_evil.OuroForCausalLM"}},
        same,
        "auto_map asks to run",
    ),
    "code-elsewhere": (
        {"auto_map": {"AutoConfig": "configuration_ouro.Evil"}},
        same,
        "auto_map asks to run",
    ),
    "norm-of-another-size": (
        {},
        lambda w: w | {"model.layers.1.input_layernorm_2.weight": torch.ones(8)},
        "model.layers.1.input_layernorm_2.weight",
    ),
    "no-final-norm": ({}, without("model.norm.weight"), "missing: model.norm.weight"),
    "threshold-in-words": ({"early_exit_threshold": "0.5"}, same, "early_exit_threshold='0.5' must be"),
    "threshold-zero": ({"early_exit_threshold": 0}, same, "early_exit_threshold=0 must be"),
    "not-finite": ({}, lambda w: w | {f"{GATE}.bias": torch.tensor([torch.nan])}, "weights hold NaN: exit.bias"),
}


BAD_NANBEIGE = {
    "no-loops": ({"num_loops": 0}, same, "num_loops=0 must be"),
    "loops-of-ouro": ({"num_loops": ..., "total_ut_steps": 4}, same, "num_loops=None must be"),
    "loops-in-words": ({"num_loops": "2"}, same, "num_loops='2' must be"),
    "loops-true": ({"num_loops": True}, same, "num_loops=True must be"),
    "skips-in-words": ({"skip_loop_final_norm": "false"}, same, "skip_loop_final_norm='false' must be true or false"),
    "gate": ({}, lambda w: w | {f"{GATE}.bias": torch.zeros(1)}, f"unexpected: {GATE}.bias"),
    "norms-of-ouro": (
        {},
        lambda w: w | {"model.layers.0.input_layernorm_2.weight": torch.ones(16)},
        "unexpected: model.layers.0.input_layernorm_2.weight",
    ),
    "no-norm": (
        {},
        without("model.layers.1.post_attention_layernorm.weight"),
        "missing: model.layers.1.post_attention",
    ),
    "head-missing": ({}, without("lm_head.weight"), "tie_word_embeddings=False, but the weights have no lm_head"),
    "head-not-tied": ({"tie_word_embeddings": True}, same, "tie_word_embeddings=True, but lm_head.weight differs"),
    "layers": ({"num_hidden_layers": 3}, same, "missing: model.layers.2."),
    "no-size": ({"hidden_size": ...}, same, "hidden_size missing"),
}
BAD_PONDERLM = {
    "steps-below-zero": ({"pondering_steps": -1}, same, "pondering_steps=-1 must be"),
    "steps-unknown": ({"pondering_steps": ...}, same, "pondering_steps=None must be"),
    "steps-in-words": ({"pondering_steps": "3"}, same, "pondering_steps='3' must be"),
    "steps-true": ({"pondering_steps": True}, same, "pondering_steps=True must be"),
    "steps-without-end": ({"pondering_steps": 10**9}, same, "pondering_steps=1000000000 must be"),
    "scale-in-words": ({"scale_embeds": "false"}, same, "scale_embeds='false' must be true or false"),
    "multiply-in-words": (
        {"mutiply_pondering_steps": "no"},
        same,
        "mutiply_pondering_steps='no' must be true or false",
    ),
    "head-missing": ({}, without("embed_out.weight"), "tie_word_embeddings=False, but the weights have no embed_out"),
    "head-not-tied": ({"tie_word_embeddings": True}, same, "tie_word_embeddings=True, but embed_out.weight differs"),
    "no-norm": ({}, without("gpt_neox.final_layer_norm.bias"), "missing: gpt_neox.final_layer_norm.bias"),
    "norms-of-ouro": (
        {},
        lambda w: w | {"gpt_neox.layers.0.input_layernorm_2.weight": torch.ones(16)},
        "unexpected: gpt_neox.layers.0.input_layernorm_2.weight",
    ),
    "layers": ({"num_hidden_layers": 1}, same, "unexpected: gpt_neox.layers.1."),
}
BAD_OF_ALL = [
    pytest.param(base, *bad, id=f"{name}-{what}")
    for name, base, of_layout in (
        ("ouro", OURO, BAD),
        ("nanbeige", NANBEIGE, BAD_NANBEIGE),
        ("ponderlm", PONDERLM, BAD_PONDERLM),
    )
    for what, bad in of_layout.items()
]


@pytest.mark.parametrize(("base", "settings", "edit", "says"), BAD_OF_ALL)
def test_a_bad_layout_is_refused_with_the_field(tmp_path, base, settings, edit, says):
    publish(tmp_path / "bad", changed(base, **settings), edit(random_weights(base)))
    with pytest.raises(CheckpointError) as refusal:
        load(str(tmp_path / "bad"))
    assert says in str(refusal.value)


@pytest.mark.parametrize(
    ("family", "says"),
    [("iquestloopcoder", "a gate per head mixes"), ("huginn_raven", "repeats its middle layers")],
)
def test_other_looped_models_are_refused_by_name_with_the_reason(tmp_path, family, says):
    publish(tmp_path / "other", OURO | {"model_type": family}, {})
    for read in (load, describe):
        with pytest.raises(CheckpointError, match=f"model_type='{family}' cannot be opened: .*{says}"):
            read(str(tmp_path / "other"))


@pytest.mark.parametrize("flag", ["loop_share_kv", "enable_mhc", "qk_layernorm", "emb_neighbor_num"])
def test_what_a_nanbeige_config_may_switch_on_is_refused(tmp_path, flag):
    publish(tmp_path / "bad", NANBEIGE | {flag: 3}, random_weights(NANBEIGE))
    with pytest.raises(CheckpointError, match=f"{flag}=3: Nanbeige with it is not modelled"):
        load(str(tmp_path / "bad"))


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
