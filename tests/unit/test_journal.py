"""Finished parts of a long measurement are kept whole, belong to one measurement, and are never measured twice."""

import numpy as np
import pytest

from adaponder import AdaPonderError
from adaponder.commands import policies as command
from adaponder.evaluation.lab.lab import LEARNED, Lab
from adaponder.evaluation.scoring import fingerprint
from adaponder.journal import Journal
from lab_support import made_up, opinionated, saved, written

BUDGET = 2.5
FEW = (LEARNED, "random", "oracle by NLL")


@pytest.fixture
def few(monkeypatch):
    honest = Lab.dials
    monkeypatch.setattr(Lab, "dials", lambda lab, rates: [dial for dial in honest(lab, rates) if dial.name in FEW])


def test_parts_of_another_measurement_are_refused_by_what_differs(tmp_path):
    Journal(tmp_path, {"seed": 0, "rates": (0.9,)}).save("one", {"loss": 0.1 + 0.2}, {"nll": np.arange(3.0)})
    journal = Journal(tmp_path, {"seed": 0, "rates": [0.9]})
    part = journal.load("one")
    assert part.facts == {"loss": 0.1 + 0.2}
    assert part.arrays["nll"].tolist() == [0.0, 1.0, 2.0]
    assert journal.load("two") is None
    (tmp_path / "mine.txt").write_text("not a part")
    with pytest.raises(AdaPonderError, match="seed was 0, is 1"):
        Journal(tmp_path, {"seed": 1, "rates": (0.9,)})
    journal.remove()
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_a_damaged_part_is_named_and_never_used(tmp_path):
    journal = Journal(tmp_path, {})
    journal.save("one", {"loss": 1.0}, {"nll": np.zeros(500)})
    path = next(tmp_path.glob("*.npz"))
    whole = path.read_bytes()
    place = whole.index(bytes(100))
    for content in (whole[:-40], whole[: place + 8] + b"\x01" + whole[place + 9 :], b""):
        path.write_bytes(content)
        with pytest.raises(AdaPonderError, match=r"one\.npz"):
            journal.load("one")


def test_policies_interrupted_says_what_it_keeps_and_goes_on(few, tmp_path, monkeypatch, capsys):
    out = tmp_path / "lab"
    # How figures look is tested elsewhere, and takes time.
    monkeypatch.setattr("adaponder.analysis.style.save", lambda figure, path: (path, path))
    checkpoint, data = saved(tmp_path / "model", opinionated()), written(tmp_path / "text.jsonl", documents=6)
    asked = {"data": str(data), "window": 32, "budgets": [BUDGET], "rates": ()}
    finished = command.policies(checkpoint=str(checkpoint), **asked)
    measured, patience = [], [2]

    def interrupted(lab, tuned, learned=None):
        if len(measured) == patience[0]:
            raise KeyboardInterrupt
        measured.append(tuned.dial.name)
        return held_out(lab, tuned, learned)

    held_out = Lab.held_out
    monkeypatch.setattr(Lab, "held_out", interrupted)
    with pytest.raises(KeyboardInterrupt):
        command.policies(checkpoint=str(checkpoint), out=out, **asked)
    assert f"2 finished rows are saved in {out / 'unfinished'}; run the same command" in capsys.readouterr().err
    with pytest.raises(KeyboardInterrupt):
        command.policies(checkpoint=str(checkpoint), **asked)
    assert "nothing was saved; with --out DIR" in capsys.readouterr().err
    measured.clear()
    patience[0] = 99
    assert command.policies(checkpoint=str(checkpoint), out=out, **asked) == finished
    # The learned gate once more, because the rest is paired with it.
    assert measured == [LEARNED, *FEW[2:]]
    shown = capsys.readouterr().out
    assert "resuming: 2 finished rows" in shown
    assert "3 figures, each as PNG and SVG" in shown
    assert not (out / "unfinished").exists()


def test_the_fingerprint_knows_weights_and_text():
    model, text = opinionated(), made_up([32] * 4)
    before = fingerprint(model, text)
    assert fingerprint(opinionated(), text) == before
    assert fingerprint(model, made_up([32] * 4, seed=1)) != before
    other = opinionated()
    next(other.parameters()).view(-1)[0] += 1e-3
    assert fingerprint(other, text) != before
