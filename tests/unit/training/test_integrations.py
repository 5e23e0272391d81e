"""Under ``transformers.Trainer``: the two-stage objective, and a resumed run that is the unbroken one."""

import logging
import warnings

import pytest
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from adaponder import AdaPonderError, FixedDepth, Objective
from adaponder.errors import CheckpointError
from adaponder.halting import bottom_k_mean, ponder_fraction
from adaponder.integrations import PonderCallback
from support import ids, stock, tiny

START, FULL, STEPS = 2, 4, 5
SCHEDULE = {"ponder_start": START, "ponder_full": FULL, "ponder_weight": 0.5, "k_max": 0.4}


def trainer(model, folder, *, steps: int = STEPS, callbacks=(), **settings) -> Trainer:
    logging.getLogger("transformers").setLevel(logging.ERROR)
    rows = [{"input_ids": row, "labels": row, "attention_mask": torch.ones_like(row)} for row in ids(16, 9)]
    asked = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "learning_rate": 0.01, "seed": 1}
    asked |= {"lr_scheduler_type": "constant", "save_strategy": "no", "logging_steps": 1, "max_steps": steps}
    quiet = {"report_to": [], "use_cpu": True, "disable_tqdm": True}
    arguments = TrainingArguments(output_dir=str(folder), **asked | quiet | settings)
    return Trainer(model=model, args=arguments, train_dataset=rows, callbacks=list(callbacks))


def losses(run: Trainer) -> list[float]:
    return [entry["loss"] for entry in run.state.log_history if "loss" in entry]


def test_the_loss_has_the_ponder_term_and_k_follows_the_step(tmp_path):
    model = tiny(dtype=torch.float32)
    run = trainer(model, tmp_path, callbacks=[PonderCallback(**SCHEDULE)])
    seen = []

    def watch(module, args, kwargs, output):
        seen.append((run.state.global_step, kwargs["num_items_in_batch"], output))

    model.register_forward_hook(watch, with_kwargs=True)
    run.train()
    assert [step for step, _, _ in seen] == [step for step in range(STEPS) for _ in range(2)]
    for step, items, output in seen:
        share = 2 * 8 / items
        fraction = ponder_fraction(step, start=START, full=FULL, k_max=0.4)
        if step < START:
            assert output.terms.keys() == {"cross_entropy"}
            assert output.depth.unique().tolist() == [3], "nobody halts in stage 1"
            continue
        assert output.terms.keys() == {"cross_entropy", "ponder"}
        expected = bottom_k_mean(output.gates, fraction)
        torch.testing.assert_close(output.terms["ponder"], expected)
        assert (expected.item() > 0) == (step > START)
        torch.testing.assert_close(output.loss, output.terms["cross_entropy"] + share * 0.5 * expected)
    logged = [sum(output.loss.item() for step, _, output in seen if step == number) for number in range(STEPS)]
    assert losses(run) == pytest.approx(logged, rel=1e-5)
    assert model.training_objective is None
    assert model.training_policy is None


@pytest.mark.parametrize(
    ("method", "start", "expected"),
    [
        ("adaponder", None, [False, False, True, True]),  # a third into stage 1
        ("mor", 1, [False, True]),
    ],
)
def test_gates_learn_at_once_or_from_their_start_on(tmp_path, method, start, expected):
    model, moved = tiny(method, dtype=torch.float32), []
    before = [parameter.detach().clone() for parameter in model.method.parameters()]

    class Watch(PonderCallback):
        def on_step_end(self, args, state, control, **kwargs):
            pairs = zip(model.method.parameters(), before, strict=True)
            moved.append(any(not torch.equal(now, then) for now, then in pairs))

    watch = Watch(ponder_start=6, ponder_full=6, gate_start=start)
    trainer(model, tmp_path, steps=len(expected), callbacks=[watch]).train()
    assert moved == expected


def test_what_a_training_that_raised_left_behind_is_gone_when_the_next_begins(tmp_path):
    model, left = tiny(dtype=torch.float32), []

    class Looks(PonderCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            super().on_train_begin(args, state, control, **kwargs)
            left.append((model.training_objective, model.training_policy, model.training_seed))

    model.training_objective, model.training_policy, model.training_seed = Objective(), FixedDepth(1), 3
    trainer(model, tmp_path, steps=1, callbacks=[Looks(**SCHEDULE)]).train()
    assert left == [(None, None, None)]


def test_evaluation_sees_nothing_of_the_training_objective():
    model = tiny()
    expected = model(ids(), labels=ids()).loss
    model.training_objective = Objective(ponder_weight=1.0, ponder_fraction=0.5)
    assert model(ids(), labels=ids()).terms.keys() == {"cross_entropy"}
    assert torch.equal(model(ids(), labels=ids()).loss, expected)
    assert model.train()(ids(), labels=ids()).terms.keys() == {"cross_entropy", "ponder"}
    assert model(ids(), labels=ids(), objective=Objective()).terms.keys() == {"cross_entropy"}


@pytest.mark.parametrize("method", ["adaponder", "mor"])
def test_training_gates_without_a_ponder_term_warns_once(method, tmp_path):
    model = tiny(method, dtype=torch.float32)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model(ids(), labels=ids())
        model.train()(ids())
        model(ids(), labels=ids(), objective=Objective())
        with torch.no_grad():
            model(ids(), labels=ids())
        assert not [entry for entry in caught if "PonderCallback" in str(entry.message)]
        trainer(model, tmp_path, steps=2).train()
    found = [entry for entry in caught if "PonderCallback" in str(entry.message)]
    assert len(found) == (1 if method == "adaponder" else 0)


@pytest.mark.one_of(2)
@pytest.mark.parametrize("family", ["gpt_neox", "llama"])
def test_a_resumed_run_has_the_losses_and_weights_of_an_unbroken_one(tmp_path, family):
    def go(folder, steps, resume=None):
        model = tiny("adaponder", family, dtype=torch.float32)
        saves = {"save_strategy": "steps", "save_steps": 3}
        run = trainer(model, folder, steps=steps, callbacks=[PonderCallback(**SCHEDULE)], **saves)
        run.train(resume_from_checkpoint=resume)
        return model, losses(run)

    whole, expected = go(tmp_path / "whole", STEPS)
    go(tmp_path / "broken", 3)
    resumed, found = go(tmp_path / "broken", STEPS, str(tmp_path / "broken" / "checkpoint-3"))
    assert found == expected
    for (name, value), other in zip(whole.named_parameters(), resumed.parameters(), strict=True):
        assert torch.equal(value, other), name


def test_a_checkpoint_whose_head_has_another_name_is_refused_by_the_trainer_and_opened_by_us(tmp_path):
    saves = {"save_strategy": "steps", "save_steps": 1}
    model, folder = tiny(dtype=torch.float32), tmp_path / "checkpoint-1"
    trainer(model, tmp_path, steps=1, callbacks=[PonderCallback(**SCHEDULE)], **saves).train()
    model.save_pretrained(folder, save_original_format=True)  # as Hugging Face names GPT-NeoX's head
    resumed = trainer(tiny(dtype=torch.float32), tmp_path, steps=2, callbacks=[PonderCallback(**SCHEDULE)], **saves)
    with pytest.raises(CheckpointError, match=r"backbone\.embed_out\.weight.*from_pretrained") as error:
        resumed.train(resume_from_checkpoint=str(folder))
    assert "\n" not in str(error.value)
    opened = type(model).from_pretrained(folder)
    assert torch.equal(opened.backbone.lm_head.weight, model.backbone.lm_head.weight)
    opened.save_pretrained(folder)
    resumed.train(resume_from_checkpoint=str(folder))
    assert resumed.state.global_step == 2


def test_what_cannot_be_scheduled_is_refused_before_the_first_step(tmp_path):
    for model, said in ((tiny("ponder", dtype=torch.float32), "ponder never halts"), (stock(), "GPTNeoXForCausalLM")):
        with pytest.raises(AdaPonderError, match=rf"PonderCallback: .*{said}"):
            trainer(model, tmp_path, steps=1, callbacks=[PonderCallback(**SCHEDULE)]).train()
    for wrong in ({"k_max": 2.0}, {"ponder_weight": -1.0}, {"ponder_full": 1}, {"gate_start": -1}):
        (field,) = wrong
        with pytest.raises(AdaPonderError, match=rf"^PonderCallback: {field}="):
            PonderCallback(**SCHEDULE | wrong)


@pytest.mark.parametrize("added", [False, True], ids=["given", "added"])
def test_earlier_callbacks_receive_the_depth_in_training_and_evaluation(tmp_path, added):
    logged = []

    class Reporter(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            logged.append(dict(logs))

    ours = PonderCallback(**SCHEDULE)
    listed = [Reporter()] if added else [Reporter(), ours]
    run = trainer(tiny(dtype=torch.float32), tmp_path, steps=1, callbacks=listed)
    if added:
        run.add_callback(ours)
    others = [entry for entry in run.callback_handler.callbacks if entry is not ours]
    run.train()
    assert run.callback_handler.callbacks == [ours, *others]
    step, summary = logged
    assert {"depth": 3.0, "halted_1": 0.0, "halted_2": 0.0}.items() <= step.items()
    assert all(isinstance(value, (int, float)) for value in step.values()), "reporters drop everything else"
    assert not [name for name in summary if "depth" in name or "halted" in name]
    returned = run.evaluate(run.train_dataset)
    assert "eval_depth" in logged[-1]
    assert 1 <= logged[-1]["eval_depth"] <= 3
    assert 0 <= logged[-1]["eval_halted_1"] <= logged[-1]["eval_halted_2"] <= 1
    assert {name: returned[name] for name in logged[-1]} == logged[-1]
    assert run.state.log_history[-1] == logged[-1] | {"step": 1}
    several = run.evaluate({"one": run.train_dataset[:4], "other": run.train_dataset[4:]})
    assert [entry["eval_one_depth"] for entry in logged if "eval_one_depth" in entry] == [several["eval_one_depth"]]
    assert several["eval_other_depth"] == logged[-1]["eval_other_depth"]
    together = (4 * several["eval_one_depth"] + 12 * several["eval_other_depth"]) / 16
    assert together == pytest.approx(returned["eval_depth"])


def test_only_what_an_evaluation_read_counts_for_its_depth(tmp_path):
    class Stops(TrainerCallback):
        def on_prediction_step(self, args, state, control, **kwargs):
            raise KeyboardInterrupt

    run = trainer(tiny(dtype=torch.float32), tmp_path, callbacks=[PonderCallback(**SCHEDULE)])
    some, other = run.train_dataset[:4], run.train_dataset[8:]
    expected = {name: value for name, value in run.evaluate(some).items() if "depth" in name or "halted" in name}
    predicted = run.predict(other).metrics
    assert predicted["test_depth"] != expected["eval_depth"]
    run.model(torch.stack([row["input_ids"] for row in other]), labels=torch.stack([row["labels"] for row in other]))
    run.add_callback(Stops())
    with pytest.raises(KeyboardInterrupt):
        run.evaluate(other)
    run.remove_callback(Stops)
    again = run.evaluate(some)
    assert {name: again[name] for name in expected} == expected
    assert len(expected) == 3


def test_a_loss_that_is_not_the_models_is_refused_before_any_weight_moves(tmp_path):
    def mine(outputs, labels, num_items_in_batch=None):
        return outputs.logits.mean()

    for settings, own in (({"label_smoothing_factor": 0.1}, None), ({}, mine)):
        run = trainer(tiny(dtype=torch.float32), tmp_path, callbacks=[PonderCallback(**SCHEDULE)], **settings)
        run.compute_loss_func = own
        before = run.model.backbone.lm_head.weight.clone()
        with pytest.raises(AdaPonderError, match="label_smoothing_factor"):
            run.train()
        assert torch.equal(run.model.backbone.lm_head.weight, before)


def test_a_method_that_halts_by_chance_draws_anew_for_every_sequence_of_every_forward(tmp_path):
    model = tiny("anytime", dtype=torch.float32)
    depths = []
    model.register_forward_hook(lambda module, args, output: depths.append(output.depth))
    trainer(model, tmp_path, steps=4, callbacks=[PonderCallback(ponder_start=0, ponder_full=0)]).train()
    sequences = [tuple(row) for depth in depths for row in depth.tolist()]
    assert len(sequences) == 16, "four steps of two micro-batches of two"
    assert len(set(sequences)) == len(sequences)
    assert model.training_seed is None
