"""Under TRL's ``SFTTrainer`` and with peft's adapters: the model's own loss, packed rows, and merged adapters."""

import logging

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from adaponder import Engine, FixedDepth, Request
from adaponder.conversion.open import load
from adaponder.errors import BackboneError, CheckpointError, InputError
from adaponder.halting import bottom_k_mean, ponder_fraction
from adaponder.integrations import PonderCallback, PonderSFTTrainer
from support import VOCABULARY, ids, tiny

SCHEDULE = {"ponder_start": 1, "ponder_full": 2, "ponder_weight": 0.5, "k_max": 0.4, "gate_start": 0}
TEMPLATE = "{% for message in messages %}{{ message.content }} w0 {% endfor %}"
LAYERS = {"gpt_neox": ["query_key_value", "dense_h_to_4h"], "llama": ["q_proj", "down_proj"]}


@pytest.fixture(scope="module")
def words() -> PreTrainedTokenizerFast:
    logging.getLogger("transformers").setLevel(logging.ERROR)
    tokenizer = Tokenizer(models.WordLevel({f"w{n}": n for n in range(VOCABULARY)}, unk_token="w1"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="w0", pad_token="w1", chat_template=TEMPLATE)


def said(row: torch.Tensor) -> str:
    return " ".join(f"w{n}" for n in row.tolist())


def pairs(count: int = 8) -> Dataset:
    rows = ids(count, 12, seed=3).clamp_min(4)
    return Dataset.from_list(
        [{"prompt": said(row[: 3 + n % 3]), "completion": f" {said(row[6:])}"} for n, row in enumerate(rows)]
    )


def chats(count: int = 8) -> Dataset:
    rows = ids(count, 12, seed=4).clamp_min(4)
    return Dataset.from_list(
        [
            {"messages": [{"role": "user", "content": said(row[:3])}, {"role": "assistant", "content": said(row[6:])}]}
            for row in rows
        ]
    )


def trainer(model, words, folder, *, data=None, kind=PonderSFTTrainer, peft=None, **settings):
    asked = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "learning_rate": 0.01, "seed": 1}
    asked |= {"save_strategy": "no", "logging_steps": 1, "max_steps": 3, "max_length": 32, "bf16": False}
    asked |= {"report_to": [], "use_cpu": True, "disable_tqdm": True, "gradient_checkpointing": False}
    return kind(
        model=model,
        args=SFTConfig(output_dir=str(folder), **asked | settings),
        train_dataset=pairs() if data is None else data,
        processing_class=words,
        callbacks=[PonderCallback(**SCHEDULE)],
        **({} if peft is None else {"peft_config": peft}),
    )


def adapters(family: str = "gpt_neox", *, gates: bool = True, **more) -> LoraConfig:
    saved = ["method"] if gates else None
    return LoraConfig(r=4, target_modules=LAYERS[family], modules_to_save=saved, task_type="CAUSAL_LM", **more)


@pytest.mark.one_of(2)
@pytest.mark.parametrize("gates", [True, False])
def test_the_loss_is_the_model_s_own_with_the_ponder_term_and_adapters_alone_train(words, tmp_path, gates):
    model = tiny(dtype=torch.float32)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    seen = []
    model.register_forward_hook(lambda module, args, kwargs, output: seen.append((kwargs, output)), with_kwargs=True)
    run = trainer(model, words, tmp_path, peft=adapters(gates=gates))
    run.train()
    assert len(seen) == 6
    for step, (kwargs, output) in zip([0, 0, 1, 1, 2, 2], seen, strict=True):
        assert output.terms.keys() == ({"cross_entropy"} if step < 1 else {"cross_entropy", "ponder"})
        if step == 2:
            real = kwargs["attention_mask"].bool()
            fraction = ponder_fraction(step, start=1, full=2, k_max=0.4)
            expected = bottom_k_mean(output.gates[real], fraction)
            torch.testing.assert_close(output.terms["ponder"], expected)
            share = (kwargs["labels"][:, 1:] != -100).sum() / kwargs["num_items_in_batch"]
            torch.testing.assert_close(output.loss, output.terms["cross_entropy"] + share * 0.5 * expected)
    logged = [entry["loss"] for entry in run.state.log_history if "loss" in entry]
    assert logged == pytest.approx([sum(float(one.loss) for _, one in seen[n : n + 2]) for n in (0, 2, 4)], rel=1e-4)
    assert all(1 <= entry["depth"] <= 3 for entry in run.state.log_history if "loss" in entry)
    merged = run.model.merge_and_unload()
    moved = {name for name, value in merged.state_dict().items() if not torch.equal(value, before[name])}
    assert moved
    assert any(name.startswith("method.") for name in moved) == gates
    assert all(name.startswith("method.") or any(one in name for one in LAYERS["gpt_neox"]) for name in moved)


def test_packed_conversations_do_not_see_each_other(words, tmp_path):
    model, seen = tiny(dtype=torch.float32), []
    model.register_forward_hook(lambda module, args, kwargs, output: seen.append((kwargs, output)), with_kwargs=True)
    trainer(model, words, tmp_path, data=chats(), max_steps=1, gradient_accumulation_steps=1, packing=True).train()
    ((packed, output),) = seen
    starts = (packed["position_ids"][0] == 0).nonzero().flatten().tolist()
    assert len(starts) > 1
    second = slice(starts[1], starts[2] if starts[2:] else None)
    alone = tiny(dtype=torch.float32)(packed["input_ids"][:, second], policy=FixedDepth(3))  # as stage 1 reads
    torch.testing.assert_close(output.logits[:, second], alone.logits, rtol=1e-4, atol=1e-4)


def test_trl_s_own_trainer_would_drop_the_ponder_term_and_is_refused(words, tmp_path):
    with pytest.raises(AttributeError, match="PonderSFTTrainer"):
        trainer(tiny(dtype=torch.float32), words, tmp_path, kind=SFTTrainer).train()
    with pytest.raises(InputError, match="PonderSFTTrainer"):
        trainer(tiny(dtype=torch.float32), words, tmp_path, kind=SFTTrainer, data=chats(), packing=True).train()
    for how in ({"loss_type": "dft"}, {"label_smoothing_factor": 0.1}):
        with pytest.raises(InputError, match=next(iter(how))):
            trainer(tiny(dtype=torch.float32), words, tmp_path, **how)


def test_evaluation_logs_the_depth(words, tmp_path):
    run = trainer(tiny(dtype=torch.float32), words, tmp_path)
    run.eval_dataset = run.train_dataset
    before = run.evaluate()
    run.train()
    after = run.evaluate()
    model, batch = run.model.eval(), run.data_collator([run.train_dataset[n] for n in range(8)])
    output = model(batch["input_ids"], attention_mask=batch["attention_mask"])
    mean = float(output.depth[batch["attention_mask"].bool()].float().mean())
    assert after["eval_depth"] == pytest.approx(mean)
    assert before["eval_depth"] != after["eval_depth"]
    assert "eval_halted_2" in after
    assert before["eval_loss"] > after["eval_loss"]


@pytest.mark.parametrize(("family", "gates"), [("gpt_neox", False), ("llama", True)])
def test_merging_adapters_changes_neither_logits_nor_depths_nor_what_is_generated(family, gates, tmp_path):
    torch.manual_seed(1)
    adapted = get_peft_model(tiny("adaponder", family), adapters(family, gates=gates, init_lora_weights=False)).double()
    if gates:
        with torch.no_grad():
            for parameter in adapted.base_model.model.method.modules_to_save["default"].parameters():
                parameter += 0.3 * torch.randn_like(parameter)
    text, asked = ids(2, 9), {"max_new_tokens": 6, "do_sample": False}
    adapted.eval()
    expected, generated = adapted(input_ids=text), adapted.generate(input_ids=text, **asked)
    assert not torch.equal(expected.depth, tiny("adaponder", family)(text).depth)
    adapted.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="adapter"):
        load(str(tmp_path))
    opened = PeftModel.from_pretrained(tiny("adaponder", family), str(tmp_path)).eval()
    torch.testing.assert_close(opened(input_ids=text).logits, expected.logits, rtol=0, atol=1e-10)
    by_engine = _greedy(opened.get_base_model(), text[0])
    merged = adapted.merge_and_unload()
    found = merged(text)
    torch.testing.assert_close(found.logits, expected.logits, rtol=0, atol=1e-10)
    assert torch.equal(found.depth, expected.depth)
    assert torch.equal(merged.generate(text, **asked), generated)
    assert by_engine == _greedy(merged, text[0]) == generated[0, 9:].tolist()


def test_prompts_can_be_tuned_and_generate_what_their_embeddings_would(tmp_path):
    model, text, asked = tiny(dtype=torch.float32), ids(), {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    tuned = get_peft_model(model, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)).eval()
    embedded = torch.cat([tuned.get_prompt(2).detach(), model.get_input_embeddings()(text)], 1)
    torch.testing.assert_close(tuned(input_ids=text).logits, model(inputs_embeds=embedded).logits)
    generated = tuned.generate(input_ids=text, attention_mask=torch.ones_like(text), **asked)
    assert torch.equal(generated[:, 9:], model.generate(inputs_embeds=embedded, **asked))
    tuned.train()(input_ids=text, labels=text).loss.backward()
    assert tuned.prompt_encoder.default.embedding.weight.grad.abs().sum() > 0


def _greedy(model, prompt: torch.Tensor) -> list[int]:
    request = Request(prompt=prompt.tolist(), max_new_tokens=6, temperature=0.0)
    return [token.id for token in Engine(model, lanes=1).stream(request)]


@pytest.mark.parametrize(("module", "place"), [("embed_in", "embedding"), ("lm_head", "head")])
def test_adapters_on_what_is_mixed_are_refused_by_their_whole_name(module, place):
    """peft's adapters have the class names of the modules they wrap, so the error names the class with its module."""
    adapted = get_peft_model(tiny(), LoraConfig(r=4, target_modules=[module]))
    with pytest.raises(BackboneError, match=rf"^peft\.tuners\.lora\.layer\.\w+.*{place}"):
        adapted(input_ids=ids())
