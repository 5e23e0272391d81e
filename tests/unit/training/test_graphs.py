"""Training steps from graphs equal eager ones: on a GPU as CUDA graphs, elsewhere as calls that are made again."""

from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from adaponder import Objective
from adaponder.errors import ConfigError, TrainingError
from adaponder.policies import ForcedDepths
from adaponder.training.graphs import STEPS, StepGraphs, add_gradients, next_limits
from adaponder.training.run import train
from kernel_support import calm
from support import ids, tiny
from training_support import losses, small


def _tensors(output):
    return [output.loss, output.depth, output.gates, *output.terms.values()]


class Again(StepGraphs):
    """Replays by computing again, where there are no CUDA graphs: reads and writes the same tensors as a graph."""

    latest = None

    def _record(self, function):
        if isinstance(function, partial):  # backward of the loss, which the latest forward computed
            output, share = function.args
            return (lambda: add_gradients(self.latest, share)), output
        first = function()

        def replay():
            self.latest = function()
            for mine, theirs in zip(_tensors(first), _tensors(self.latest), strict=True):
                mine.detach().copy_(theirs.detach())

        return replay, first


def batches(device, count):
    """Returns tokens and forced depths: those of two batches in turn, and once of a batch of full depth."""
    for number in range(count):
        depths = torch.randint(1, 5, (4, 32), generator=torch.Generator().manual_seed(number % 2))
        depths = depths.fill_(4) if number == count // 3 else depths
        yield {"input_ids": ids(4, 32, seed=number).to(device), "depths": depths.to(device)}


def trained(graphs, model, execution, device, *, micro_steps, steps=12, change_at=None):
    """Returns losses, depths and weights of some steps of SGD; ``change_at``: the step with another objective."""
    low = torch.autocast("cuda", torch.bfloat16) if device == "cuda" else nullcontext()
    results, optimizer = [], torch.optim.SGD(model.parameters(), lr=0.01)
    drawn = batches(device, steps * micro_steps)
    for step in range(steps):
        objective = Objective(ponder_weight=0.1, ponder_fraction=0.3 if step == change_at else 0.5)

        def forward(inputs, execution, objective=objective):
            policy, tokens = ForcedDepths(inputs["depths"]), inputs["input_ids"]
            with low:
                how = {"targets": tokens, "policy": policy, "objective": objective, "output_logits": False}
                return model(tokens, execution=execution, **how)

        for _ in range(micro_steps):
            inputs = next(drawn)
            if graphs is None:
                output = forward(inputs, execution)
                (output.loss / micro_steps).backward()
            else:
                output = graphs.run(objective, inputs, forward, share=micro_steps)
            results += [output.loss.detach().clone(), output.depth.clone(), output.terms["ponder"].detach().clone()]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return [*results, *(parameter.detach().clone() for parameter in model.parameters())]


@pytest.mark.parametrize(
    ("execution", "micro_steps", "device", "compiled"),
    [
        *((execution, steps, "cpu", False) for execution in ("dense", "compact") for steps in (1, 2)),
        pytest.param("dense", 2, "cuda", False, marks=pytest.mark.gpu),
        pytest.param("compact", 1, "cuda", False, marks=pytest.mark.gpu),
        pytest.param("dense", 1, "cuda", True, marks=pytest.mark.gpu),
        pytest.param("compact", 2, "cuda", True, marks=pytest.mark.gpu),
    ],
)
def test_steps_from_graphs_equal_eager_steps(device, execution, micro_steps, compiled, monkeypatch):
    dtype = torch.float32 if device == "cuda" else torch.float64
    models = [calm(tiny("adaponder", iterations=4, dtype=dtype)).to(device).train() for _ in range(2)]
    if compiled:
        torch.compiler.reset()
        for model in models:
            model.compile_passes()
    expected = trained(None, models[0], execution, device, micro_steps=micro_steps, change_at=6)
    replayed, kind = [], StepGraphs if device == "cuda" else Again
    graphs = kind(models[1], execution, patience=1)
    record = graphs._record

    def counting(function):
        replay, result = record(function)
        return lambda: replayed.append(replay()), result

    monkeypatch.setattr(graphs, "_record", counting)
    actual = trained(graphs, models[1], execution, device, micro_steps=micro_steps, change_at=6)
    tolerance = {"rtol": 2e-2, "atol": 2e-3} if device == "cuda" else {"rtol": 1e-9, "atol": 1e-11}
    for mine, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(mine, theirs, **tolerance)
    assert len(replayed) >= 4


def test_rows_are_fitted_to_the_latest_counts():
    tokens, step = STEPS * 8, 8
    assert next_limits(None, (16, 9, 0), tokens) == (16, 16, 0)
    assert next_limits((16, 16, 8), (17, 16, 0), tokens) == (24, 16, 8), "grows at once, keeps one step to spare"
    assert next_limits((64, 32, 32), (17, 24, 25), tokens) == (24 + step, 32, 32)
    assert next_limits(None, (tokens, tokens - 1), tokens) == (tokens, tokens)
    assert next_limits(None, (1,), 5) == (1,)


def test_tokens_that_do_not_fit_are_computed_again():
    model = tiny("adaponder", iterations=4).train()
    executions, graphs = [], Again(model, "compact", patience=1)

    def forward(inputs, execution):
        executions.append(execution)
        return _forward(model)(inputs, execution)

    for depth in (1, 1, 1, 3):
        graphs.run(None, _inputs(depth), forward)
    assert executions[-1] == "compact", "not the 0 rows of the graph"
    assert graphs.limits == (128, 128, 0)


class Watched(Again):
    """Keeps the memory pool at each capture, and the operations that a capture leaves outside of its graphs."""

    def __init__(self, *arguments, **options):
        self.pools, self.outside, self.recording = [], None, False
        super().__init__(*arguments, **options)

    def _record(self, function):
        self.pools.append(self.pool)
        self.pool, self.recording = self.pool or object(), True
        result = super()._record(function)
        self.recording = False
        return result

    def _capture(self, *arguments):
        watched = self

        class Operations(TorchDispatchMode):
            def __torch_dispatch__(self, function, types, arguments=(), options=None):
                if not watched.recording:
                    watched.outside.add(str(function))
                return function(*arguments, **options or {})

        self.outside = set()
        with Operations():
            super()._capture(*arguments)


def _forward(model):
    def forward(inputs, execution):
        depths = ForcedDepths(inputs["depths"])
        return model(inputs["input_ids"], targets=inputs["input_ids"], execution=execution, policy=depths)

    return forward


def _inputs(depth):
    return {"input_ids": ids(4, 32), "depths": torch.full((4, 32), depth)}


def test_a_capture_computes_nothing_outside_of_its_graphs():
    model = tiny("adaponder", iterations=4).train()
    graphs = Watched(model, "dense", patience=1)
    for _ in range(2):
        graphs.run(None, _inputs(2), _forward(model), share=2)
    assert graphs.graphs
    assert graphs.outside <= {"aten._to_copy.default", "aten.detach.default", "aten.copy_.default"}


def test_graphs_that_replace_all_others_have_a_new_memory_pool(monkeypatch):
    monkeypatch.setattr("adaponder.training.graphs._MOST", 1)
    model = tiny("adaponder", iterations=4).train()
    graphs = Watched(model, "compact", patience=1)
    for depth in (1, 1, 3, 3):
        graphs.run(None, _inputs(depth), _forward(model))
    first, shared, second, shared_again = graphs.pools
    assert first is second is None
    assert None not in (shared, shared_again)
    assert shared is not shared_again


def test_one_pass_in_compact_execution_is_captured():
    model = tiny("vanilla").train()
    graphs = Again(model, "compact", patience=1)
    for _ in range(2):
        graphs.run(None, {"input_ids": ids()}, lambda inputs, how: model(**inputs, labels=ids(), execution=how))
    assert list(graphs.graphs) == ["compact"]


def test_a_step_that_cannot_be_captured_is_refused(monkeypatch):
    def fails(self, function):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(StepGraphs, "_record", fails)
    model = tiny("adaponder").train()
    graphs = StepGraphs(model, "dense", patience=0)
    with pytest.raises(TrainingError, match="cuda_graphs"):
        graphs.run(None, {"input_ids": ids()}, lambda inputs, how: model(**inputs, labels=ids(), execution=how))


def test_graphs_need_a_gpu_and_whole_passes(shards, tmp_path):
    with pytest.raises(TrainingError, match="cuda_graphs"):
        train(small(shards, "train.cuda_graphs=true"), out=tmp_path / "run")
    with pytest.raises(ConfigError, match="cuda_graphs"):
        small(shards, "train.cuda_graphs=true", "train.gradient_checkpointing=true")
    with pytest.raises(ConfigError, match="dtype"):
        small(shards, "train.cuda_graphs=true", "train.execution=compact")


@pytest.mark.gpu
@pytest.mark.parametrize("execution", ["dense", "compact"])
def test_a_run_with_graphs_equals_one_without(shards, tmp_path, execution, monkeypatch):
    replays, record = [], StepGraphs._record
    monkeypatch.setattr(StepGraphs, "_record", lambda self, call: replays.append(call) or record(self, call))
    curves = []
    for graphs in ("true", "false"):
        recipe = small(
            shards, "train.steps=40", "train.save_every=0", f"train.execution={execution}", "train.dtype=bfloat16"
        )
        recipe = replace(recipe, train=replace(recipe.train, cuda_graphs=graphs == "true"))
        train(recipe, out=tmp_path / graphs, device="cuda")
        curves.append(losses(tmp_path / graphs))
    assert replays
    assert curves[0] == pytest.approx(curves[1], rel=2e-2)
