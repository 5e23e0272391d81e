"""The Hugging Face face: what its users expect of any model, and what only this one has."""

import copy
import json

import pytest
import torch
from torch.export import Dim
from transformers import AutoConfig, AutoModelForCausalLM

from adaponder import AdaPonderConfig, AdaPonderError, AdaPonderForCausalLM, FixedDepth, Objective
from adaponder.conversion.exported.configuration_adaponder import AdaPonderConfig as ExportedConfig
from adaponder.execution.cached import Cached
from adaponder.execution.compact import Packed
from adaponder.execution.dense import Dense
from adaponder.methods.ouro import improvement_loss
from adaponder.modeling import model as modeling
from packed_support import PADDED, assert_same, loss_and_gradients, packed_results
from support import FAMILIES, METHODS, VOCABULARY, ids, stock, tiny


@pytest.mark.one_of(4)
@pytest.mark.parametrize(("family", "shards"), [("gpt_neox", "8KB"), *((family, None) for family in FAMILIES)])
def test_saved_and_loaded_through_the_auto_classes_it_is_the_same_model(tmp_path, family, shards):
    model = tiny("adaponder", family, dtype=torch.float32)
    model.save_pretrained(tmp_path, **({} if shards is None else {"max_shard_size": shards}))
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shards is not None)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert isinstance(loaded, AdaPonderForCausalLM)
    assert isinstance(AutoConfig.from_pretrained(tmp_path), AdaPonderConfig)
    for name in ("method", "iterations", "tau", "embedding_scale", "gate_bias", "reuse"):
        assert getattr(loaded.config, name) == getattr(model.config, name)
    state = loaded.state_dict()
    assert state.keys() == model.state_dict().keys()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert torch.equal(loaded(ids()).logits, model(ids()).logits)
    card = (tmp_path / "README.md").read_text()
    assert "adaponder" in card
    assert f"{model.num_parameters():,}" in card


def test_a_stock_folder_and_what_is_no_stock_decoder_are_refused_with_the_cure(tmp_path):
    stock().save_pretrained(tmp_path)
    with pytest.raises(AdaPonderError, match=r"holds a gpt_neox model: .*from_backbone"):
        AdaPonderForCausalLM.from_pretrained(tmp_path)
    for wrong in ("EleutherAI/pythia-70m", tiny()):
        with pytest.raises(AdaPonderError, match=f"stock is a {type(wrong).__name__}: .*AutoModelForCausalLM"):
            AdaPonderForCausalLM.from_backbone(wrong)  # pyright: ignore[reportArgumentType]


def test_the_loss_is_the_stock_models_and_its_terms_add_up():
    model = tiny("adaponder", iterations=4)
    labels = ids().clone()
    labels[0, :4] = -100
    expected = stock()(ids(), labels=labels).loss
    torch.testing.assert_close(model(ids(), labels=labels, max_iterations=1).loss.float(), expected)
    output = model(ids(), labels=labels, objective=Objective(ponder_weight=0.5, ponder_fraction=0.3))
    total = output.terms["cross_entropy"] + 0.5 * output.terms["ponder"]
    torch.testing.assert_close(output.loss, total, rtol=1e-12, atol=0)
    assert model(ids(), labels=labels).terms.keys() == {"cross_entropy"}


def test_the_loss_of_half_precision_logits_is_computed_in_float32():
    output = tiny(dtype=torch.bfloat16)(ids(), labels=ids())
    assert output.logits.dtype == torch.bfloat16
    expected = torch.nn.functional.cross_entropy(output.logits[:, :-1].float().flatten(0, 1), ids()[:, 1:].flatten())
    assert output.loss.dtype == torch.float32
    torch.testing.assert_close(output.loss, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("execution", ["dense", "compact"])
def test_the_ponder_term_does_not_depend_on_what_is_returned(execution):
    ask = {"labels": ids(), "objective": Objective(ponder_weight=1.0, ponder_fraction=0.5), "execution": execution}
    model = tiny(iterations=4)
    with_gates, without = (model(ids(), **ask, output_gates=given).loss for given in (True, False))
    torch.testing.assert_close(without, with_gates, rtol=1e-12, atol=0)


def test_logits_to_keep_is_a_slice_of_all():
    model = tiny()
    whole = model(ids()).logits
    torch.testing.assert_close(model(ids(), logits_to_keep=2).logits, whole[:, -2:], rtol=0, atol=1e-12)
    chosen = torch.tensor([0, 3])
    torch.testing.assert_close(model(ids(), logits_to_keep=chosen).logits, whole[:, chosen], rtol=0, atol=1e-12)
    with_loss = model(ids(), labels=ids(), logits_to_keep=1)
    torch.testing.assert_close(with_loss.loss, model(ids(), labels=ids()).loss, rtol=0, atol=1e-12)
    assert with_loss.logits.shape[1] == 1
    values = model(ids(), labels=ids(), logits_to_keep=1, return_dict=False)[:2]
    assert all(map(torch.equal, values, (with_loss.loss, with_loss.logits)))


def test_the_default_execution_skips_in_evaluation_and_is_dense_in_training(monkeypatch):
    kinds = []
    for kind in (Dense, Cached, Packed):

        def build(*args, kind=kind, **options):
            kinds.append(kind)
            return kind(*args, **options)

        monkeypatch.setattr(modeling, kind.__name__, build)
    model = tiny()
    model(ids())
    model.train()(ids())
    tiny("ponder")(ids())
    tiny("ponder")(ids(), use_cache=True)
    tiny(reuse="kv")(ids())
    eager = tiny()
    eager.backbone.set_attn_implementation("eager")  # an attention that cannot be handed packed rows
    eager(ids())
    assert kinds == [Packed, Dense, Dense, Cached, Dense, Cached]


@pytest.mark.parametrize("kind", [AdaPonderConfig, ExportedConfig])
def test_a_config_shows_the_sizes_of_its_backbone_and_takes_no_others(kind):
    settings = {key: value for key, value in tiny().config.to_dict().items() if key != "model_type"}
    config = kind(**settings)
    assert {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}.items() <= config.to_dict().items()
    assert "hidden_size" not in json.loads(config.to_json_string())
    again = kind(**json.loads(config.to_json_string(use_diff=False)))
    assert config.backbone_config.to_dict() == again.backbone_config.to_dict()
    with pytest.raises(ValueError, match="vocab_size=99 must be set in backbone_config"):
        kind(**settings | {"vocab_size": 99})


def test_tied_weights_can_be_untied_by_the_outer_config_and_a_model_needs_a_folder(tmp_path):
    config = AdaPonderConfig(backbone_config=FAMILIES["gpt2"])
    assert config.tie_word_embeddings
    config.tie_word_embeddings = False
    model = AdaPonderForCausalLM(config)
    assert model.get_output_embeddings().weight is not model.get_input_embeddings().weight
    model.save_pretrained(tmp_path)
    loaded = AdaPonderForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded.get_output_embeddings().weight, model.get_output_embeddings().weight)
    with pytest.raises(AdaPonderError, match=r"from_pretrained\(None\): name a folder"):
        AdaPonderForCausalLM.from_pretrained(None, config=config, state_dict=model.state_dict())


def test_a_pause_can_be_an_unused_token_of_the_vocabulary():
    model = tiny("pause", pause_token_id=VOCABULARY - 1)
    assert not list(model.method.parameters())
    base = stock()
    spread = torch.stack([ids(), *[torch.full_like(ids(), VOCABULARY - 1)] * 2], -1).flatten(1)
    position = torch.arange(9).repeat_interleave(3)[None].expand(2, -1)
    mask = torch.tril(torch.ones(27, 27, dtype=torch.bool))[None, None].expand(2, 1, -1, -1)
    expected = base(spread, position_ids=position, attention_mask=mask).logits[:, 2::3]
    torch.testing.assert_close(model(ids()).logits, expected, rtol=0, atol=1e-12)


def test_loop_feeds_the_stream_and_norms_once():
    model = tiny("loop", iterations=3)
    body = model.backbone.gpt_neox
    stream = body.embed_in(ids())
    position = torch.arange(9)[None].expand(2, -1)
    turn = body.rotary_emb(stream, position)
    for _ in range(3):
        for layer in body.layers:
            stream = layer(stream, position_embeddings=turn)
    expected = model.backbone.lm_head(body.final_layer_norm(stream))
    torch.testing.assert_close(model(ids()).logits, expected, rtol=0, atol=1e-12)


def test_ouro_feeds_the_normed_state_and_spreads_its_loss_over_loops():
    model = tiny("ouro", iterations=3).train()
    body, x, losses, exits = model.backbone.gpt_neox, None, [], []
    x = body.embed_in(ids())
    for _ in range(3):
        x = body(inputs_embeds=x).last_hidden_state
        logits = model.backbone.lm_head(x)[:, :-1]
        losses.append(torch.nn.functional.cross_entropy(logits.transpose(1, 2), ids()[:, 1:], reduction="none"))
        exits.append(model.method.exit(x).squeeze(-1).sigmoid()[:, :-1])
    p = [exits[0], (1 - exits[0]) * exits[1], (1 - exits[0]) * (1 - exits[1])]
    entropy = -sum(q * q.log() for q in p)
    expected = (sum(q * loss for q, loss in zip(p, losses, strict=True)) - 0.1 * entropy).mean()
    output = model(ids(), labels=ids())
    torch.testing.assert_close(output.loss, expected, rtol=1e-10, atol=0)
    bce = 0.0
    for t in (1, 2):
        target = torch.sigmoid(50 * ((losses[t - 1] - losses[t]).clamp_min(0) - 0.005)).detach()
        bce = bce - (target * (1 - exits[t]).log() + (1 - target) * exits[t].log()).mean()
    stage2 = model(ids(), labels=ids(), objective=Objective(exit_stage=2)).loss
    torch.testing.assert_close(stage2, bce / 2, rtol=1e-10, atol=0)


def test_in_stage_two_ouros_losses_get_no_gradient():
    generator = torch.Generator().manual_seed(0)
    logit, losses = (torch.randn(3, 5, generator=generator, dtype=torch.double, requires_grad=True) for _ in range(2))
    improvement_loss(logit, losses).sum().backward()
    assert losses.grad is None
    assert logit.grad is not None
    assert logit.grad[1:].abs().min() > 0


def test_ouros_beta_is_the_objectives_or_else_the_configs():
    model = tiny("ouro", exit_entropy_weight=0.3).train()
    for objective, beta in ((None, 0.3), (Objective(), 0.3), (Objective(exit_entropy_weight=0.0), 0.0)):
        output = model(ids(), labels=ids(), objective=objective)
        assert output.terms["entropy"] > 0
        torch.testing.assert_close(output.loss, output.terms["expected"] - beta * output.terms["entropy"])


@pytest.mark.parametrize(("alpha", "weight"), [(0.1, 1e-3), (0.7, 0.2)])
def test_mor_updates_the_chosen_by_a_share_of_the_stack(alpha, weight):
    recurrence = {"capacities": [1.0, 0.5], "router_alpha": alpha, "router_loss_weight": weight}
    model = tiny("mor", iterations=2, **recurrence).train()
    body = model.backbone.gpt_neox
    prompt = ids(1, 8)
    position = torch.arange(8)[None]

    def stack(x, position):
        turn = body.rotary_emb(x, position)
        for layer in body.layers:
            x = layer(x, position_embeddings=turn)
        return x

    x = stack(body.embed_in(prompt), position)
    logit = model.method.routers[0](x)
    chosen = logit[0].topk(4).indices.sort().values
    y = stack(x[:, chosen], position[:, chosen])
    x = x.index_add(1, chosen, alpha * logit[:, chosen].sigmoid()[..., None] * y)
    expected = model.backbone.lm_head(body.final_layer_norm(x))
    output = model(prompt, labels=prompt)
    torch.testing.assert_close(output.logits, expected, rtol=0, atol=1e-12)
    assert output.depth.sum() == 12
    target = torch.zeros_like(logit[0]).index_fill(0, chosen, 1.0)
    bce = torch.nn.functional.binary_cross_entropy_with_logits(logit[0], target)
    torch.testing.assert_close(output.terms["router"], bce, rtol=1e-12, atol=0)
    torch.testing.assert_close(output.loss, output.terms["cross_entropy"] + weight * bce, rtol=1e-12, atol=0)


@pytest.mark.parametrize("method", ["adaponder", "mor", "ouro", "ponder"])
def test_losses_of_parts_add_up_to_the_loss_of_the_whole(method):
    """Gradient accumulation needs this: given the token count of the whole, the loss of a part is its share."""
    model = tiny(method, router_loss_weight=0.1).train()
    batch, how = ids(4, 9), {"objective": Objective(ponder_weight=0.1, ponder_fraction=0.5)}
    plain = [model(batch[i : i + 1], labels=batch[i : i + 1]).loss for i in range(4)]
    whole = [model(batch[i : i + 1], labels=batch[i : i + 1], **how).loss for i in range(4)]
    parts = [model(batch[i : i + 1], labels=batch[i : i + 1], num_items_in_batch=4 * 8, **how).loss for i in range(4)]
    torch.testing.assert_close(sum(parts), sum(whole) / 4, rtol=1e-12, atol=0)
    assert (sum(whole) > sum(plain)) == (method == "adaponder")


@pytest.mark.parametrize("method", ["adaponder", "mor"])
def test_share_weighs_the_terms_beside_cross_entropy(method):
    model, batch = tiny(method, router_loss_weight=0.1).train(), ids(1, 9)
    objective = Objective(ponder_weight=0.1, ponder_fraction=0.5, share=1.0)
    output = model(batch, labels=batch, num_items_in_batch=torch.tensor(4 * 8), objective=objective)
    term = output.terms["ponder" if method == "adaponder" else "router"]
    assert term.dtype == torch.float64
    torch.testing.assert_close(output.loss, output.terms["cross_entropy"] + 0.1 * term, rtol=1e-15, atol=0)


def test_the_router_loss_sums_over_recursions_the_mean_over_eligible_tokens():
    model = tiny("mor", iterations=3, capacities=[1.0, 0.5, 0.25]).train()
    seen = []
    output = model(ids(1, 8), labels=ids(1, 8), on_iteration=seen.append)
    expected = 0.0
    for earlier, later, logit in zip(seen, seen[1:], output.gates.logit().unbind(-1), strict=False):
        bce = torch.nn.functional.binary_cross_entropy_with_logits(logit, later.active.double(), reduction="none")
        expected = expected + bce[earlier.active].mean()
    torch.testing.assert_close(output.terms["router"], expected, rtol=1e-12, atol=0)


def test_packed_documents_have_the_loss_of_documents_alone():
    documents = [ids(1, n, seed=n) for n in (5, 3, 8)]
    packed = torch.cat(documents, 1)
    numbers = torch.cat([torch.full_like(doc, i) for i, doc in enumerate(documents)], 1)
    model = tiny()
    alone = [model(doc, labels=doc).loss * (doc.shape[1] - 1) for doc in documents]
    together = model(packed, labels=packed, document_ids=numbers).loss
    torch.testing.assert_close(together, sum(alone) / (4 + 2 + 7), rtol=1e-12, atol=0)


def test_padding_before_a_packed_document_moves_none_of_its_positions():
    first, second, padding = ids(1, 4), ids(1, 3, seed=1), torch.zeros(1, 2, dtype=torch.long)
    model = tiny(family="gpt2")  # its positions are learned, so that a shift of all of them counts
    read = {"document_ids": torch.tensor([[0] * 4 + [1] * 5])}
    read["attention_mask"] = torch.tensor([[1] * 4 + [0] * 2 + [1] * 3])
    together = model(torch.cat([first, padding, second], 1), **read)
    torch.testing.assert_close(together.logits[:, 6:], model(second).logits, rtol=0, atol=1e-12)


def test_classifier_free_guidance_uses_the_same_policy():
    model = tiny(iterations=3)
    ask = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "guidance_scale": 1.5}
    plain = tiny("vanilla").generate(ids(1, 6), **ask)
    assert torch.equal(model.generate(ids(1, 6), **ask, max_iterations=1), plain)
    assert torch.equal(model.generate(ids(1, 6), **ask, policy=FixedDepth(1)), plain)


@pytest.mark.compiler
@pytest.mark.parametrize(("method", "given"), [("adaponder", True), ("adaponder", False), ("vanilla", False)])
def test_the_dense_forward_compiles_as_one_graph(method, given):
    model = tiny(method).train()
    objective = Objective(ponder_weight=0.3, ponder_fraction=0.2) if given else None
    asked = {"targets": ids(2, 9, seed=1), "objective": objective}
    expected = loss_and_gradients(model, **asked)
    assert_same(loss_and_gradients(torch.compile(model, backend="aot_eager", fullgraph=True), **asked), expected)


@pytest.mark.parametrize(
    "method", ["adaponder", *(pytest.param(m, marks=pytest.mark.every) for m in METHODS if m != "adaponder")]
)
def test_the_forward_exports_with_any_batch_and_length(method):
    model, mask = tiny(method), torch.ones(2, 9, dtype=torch.long)
    mask[0, :3] = 0
    sizes = {0: Dim("batch", max=64), 1: Dim("time", min=2, max=64)}
    given, shapes = {"input_ids": ids(), "attention_mask": mask}, {"input_ids": sizes, "attention_mask": sizes}
    exported = torch.export.export(model, (), given, dynamic_shapes=shapes).module()
    for batch, padding in ((3, 1), (1, 0)):
        asked = {"input_ids": ids(batch, 5), "attention_mask": (torch.arange(5) >= padding).long().expand(batch, -1)}
        found, expected = exported(**asked), model(**asked)
        torch.testing.assert_close(found.logits[:, padding:], expected.logits[:, padding:], rtol=0, atol=1e-12)
        assert torch.equal(found.depth, expected.depth)


# By layer: test_compiling, all of them. make test takes the backend that is quickest.
@pytest.mark.parametrize(
    ("method", "backend"),
    [
        ("adaponder", "eager"),
        *(pytest.param(m, "aot_eager", marks=pytest.mark.compiler) for m in ("adaponder", "vanilla", "ouro", "mor")),
    ],
)
def test_passes_compile_to_one_graph_each_and_are_reused_by_all_iterations(method, backend):
    model, iterations = tiny(method, iterations=4).train(), 1 if method == "vanilla" else 4
    asked = {"targets": ids(2, 9, seed=1), "objective": Objective(ponder_weight=0.3, ponder_fraction=0.2)}
    expected = loss_and_gradients(model, **asked)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    # The residual stream is read by a hook, around which the compiler breaks its graph in two.
    model.compile_passes(by="pass", backend=backend, fullgraph=not model.method.needs_stream(iterations))
    assert_same(loss_and_gradients(model, **asked), expected)
    # The first pass reuses nothing, later ones do; mor masks by presence instead, and its masks make two kinds as well.
    parts = 2 if model.method.needs_stream(iterations) else 1
    between = {"adaponder": 3, "ouro": 2, "mor": 1}.get(method, 0)  # small functions between passes
    assert 1 <= torch._dynamo.utils.counters["stats"]["unique_graphs"] <= parts * min(2, iterations) + between


DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 1], [0, 0, 1, 1, 1, 1]])
# Passes that run compiled: the first one, which reads every token of unpadded sequences, and those over packed rows.
PACKED = {
    "plain": (("adaponder", "gpt_neox"), {}, {}, 2),
    "grouped": (("adaponder", "llama"), {}, {}, 2),
    "padded": (("adaponder", "gpt_neox"), {}, {"attention_mask": PADDED}, 2),
    "kv": (("adaponder", "gpt_neox"), {"reuse": "kv"}, {}, 2),
    "none": (("adaponder", "gpt_neox"), {"reuse": "none"}, {}, 2),
    "mor": (("mor", "gpt_neox"), {}, {}, None),  # its residual stream is read by a hook, which breaks graphs
    "documents": (("adaponder", "gpt_neox"), {}, {"document_ids": DOCUMENTS}, 0),
    "windows": (("adaponder", "mistral"), {}, {}, 1),
}


@pytest.mark.compiler
@pytest.mark.parametrize(("case", "trains"), [*((case, True) for case in PACKED), ("plain", False), ("padded", False)])
def test_packed_rows_compile_for_any_number_of_them_and_change_nothing(case, trains):
    (method, family), recurrence, given, graphs = PACKED[case]
    model = tiny(method, family, iterations=4, **recurrence).train(trains)
    expected = packed_results(model, given, trains)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model.compile_passes(by="pass", backend="aot_eager", fullgraph=case != "mor")
    assert_same(packed_results(model, given, trains), expected)
    if graphs is not None:
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs


def test_the_check_does_not_depend_on_where_tensors_are_made_by_default():
    """Models may be made under ``torch.device("cuda")``; every machine has the device meta."""
    model = tiny()
    with torch.device("meta"):
        model.wrapped.verify()


def test_a_copy_of_a_compiled_model_computes_with_its_own_weights():
    model = tiny().train()
    model.compile_passes(backend="eager")
    asked = {"targets": ids(2, 9, seed=1)}
    before = model(ids(), **asked).loss
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.backbone.base_model.parameters():
            parameter.mul_(0.5)
    compiled = twin(ids(), **asked).loss
    twin.wrapped.compile_options = None
    torch.testing.assert_close(compiled, twin(ids(), **asked).loss)
    torch.testing.assert_close(model(ids(), **asked).loss, before)
    assert not torch.allclose(compiled, before)


def test_resizing_the_vocabulary_reaches_backbone_and_model(tmp_path):
    model = tiny(dtype=torch.float32)
    model.resize_token_embeddings(70)
    assert model.config.vocab_size == model.backbone.config.vocab_size == 70
    assert model(ids()).logits.shape[-1] == 70
    model.backbone.save_pretrained(tmp_path)
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config.vocab_size == 70


def test_a_replaced_backbone_is_used():
    model = tiny()
    model.backbone = stock(seed=9)
    expected = stock(seed=9)(ids()).logits
    torch.testing.assert_close(model(ids(), max_iterations=1).logits, expected, rtol=0, atol=1e-12)


def test_an_offloaded_head_is_refused():
    model = tiny()
    model.backbone.lm_head.to("meta")
    with pytest.raises(AdaPonderError, match="offloaded"):
        model(ids())
