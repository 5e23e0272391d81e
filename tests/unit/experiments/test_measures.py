"""What a run measures on its model before it is given up."""

from importlib.metadata import PackageNotFoundError

import pytest

from adaponder.errors import InputError
from experiments import measures
from experiments.measures import MEASURES, measuring
from lab_support import K, opinionated, saved, written


def measured(tmp_path, *names: str, method: str = "adaponder", dtype: str = "float32") -> dict:
    model, text = saved(tmp_path / "model", opinionated(method)), written(tmp_path / "text.jsonl", documents=12)
    return dict(measuring(names, device="cpu", dtype=dtype)(model, text))


def test_an_unknown_measurement_is_refused_and_one_that_cannot_be_made_says_why(tmp_path):
    with pytest.raises(InputError, match="no such measurement; there are steps"):
        measuring(["nothing"], device="cpu")
    assert measuring([], device="cpu") is None
    made = measured(tmp_path, "policies", "reuse", method="ponder")
    assert "every token the same depth" in made["policies"]["missing"]
    assert made["reuse"]["trained"] == "state", "the others follow"


def test_policies_are_compared_at_one_depth_and_the_dial_reaches_from_one_to_all(tmp_path, monkeypatch):
    monkeypatch.setattr(measures, "_AROUND", (0.0, 0.15))
    made = measured(tmp_path, "policies", "dial")
    policies = made["policies"]
    learned = policies["compared"]["learned gate"]
    assert (policies["depth"], learned["loss"]) in learned["points"], "the learned gate is where it was measured"
    assert {"uniform, ranked", "random", "geometric, ranked"} <= policies["compared"].keys()
    for name, each in policies["compared"].items():
        if each["loss"] is not None and len(each["points"]) > 1:
            losses = [loss for _, loss in each["points"]]
            assert min(losses) - 0.1 <= each["loss"] <= max(losses) + 0.1, name
    rows = made["dial"]["rows"]
    assert (min(row["depth"] for row in rows), max(row["depth"] for row in rows)) == (1, K)
    assert 1 < made["dial"]["own"]["depth"] < K


@pytest.mark.every
def test_gates_that_learned_apart_are_turned_by_the_dial_too(tmp_path):
    rows = measured(tmp_path, "dial", method="anytime")["dial"]["rows"]
    assert (min(row["depth"] for row in rows), max(row["depth"] for row in rows)) == (1, K)


def test_steps_and_reuse_describe_one_scoring_each(tmp_path):
    made = measured(tmp_path, "steps", "reuse")
    steps, reuse = made["steps"], made["reuse"]
    total = sum(steps["tokens"])
    loss = sum(count * (nll or 0) for count, nll in zip(steps["tokens"], steps["nll"], strict=True)) / total
    assert reuse["as"]["state"]["loss"] == pytest.approx(loss, abs=1e-5)
    assert steps["cost"]["iterations"] == pytest.approx(reuse["as"]["state"]["depth"])
    assert reuse["gap"] == 0, "it was trained as it is evaluated"
    assert len({each["loss"] for each in reuse["as"].values()}) == 3, "what a halted token keeps changes the loss"
    full = sum(c * (n or 0) for c, n in zip(steps["tokens"], steps["nll_at_full_depth"], strict=True)) / total
    assert full == pytest.approx(steps["loss_by_forced_depth"][-1], abs=1e-5)


def test_speed_is_of_every_token_asked_for(tmp_path):
    decode = measured(tmp_path, "speed", method="ponder")["speed"]["decode"]
    assert decode["depth"] == K
    assert decode["tokens_per_second"] > 0
    assert set(MEASURES) == {"steps", "policies", "dial", "reuse", "demand", "speed"}


def test_steps_are_measured_in_the_run_s_precision_where_the_package_is_not_installed(tmp_path, monkeypatch):
    from adaponder.analysis import trace

    installed, used, real = trace.version, [], measures.autocast

    def of_libraries(name: str) -> str:
        if name == "adaponder":
            raise PackageNotFoundError(name)
        return installed(name)

    monkeypatch.setattr(trace, "version", of_libraries)
    monkeypatch.setattr(measures, "autocast", lambda dtype, device: used.append(dtype) or real(dtype, device))
    assert sum(measured(tmp_path, "steps", dtype="bfloat16")["steps"]["tokens"]) > 0
    assert used == ["bfloat16"]
