"""The list of named mistakes cannot rot: each still fits the source, names tests that exist, and is judged rightly.

``make mutants`` makes them one after the other and expects those tests to fail; see ``tests/laws/mistakes``. Here only
the list and the judging are tested.
"""

from dataclasses import replace

import pytest
from mistakes.catalogue import Mistake, load, problems
from mistakes.trial import WHOLE, Outcome, Watch

pytest_plugins = ["pytester"]

MISTAKES = load()
ENTRY = Mistake("gates never close", "halting:stays", "s >= 0.5", "s >= 0", ("test_gates.py::test_a_gate_closes[1]",))


@pytest.fixture
def house(tmp_path):
    """Writes a source and a test that the entry fits."""
    package, tests = tmp_path / "src" / "adaponder", tmp_path / "tests"
    package.mkdir(parents=True)
    tests.mkdir()
    (package / "halting.py").write_text(
        'TAU = 0.5\n\n\ndef stays(s):\n    """s >= 0.5"""\n    note(s)\n    return (s  >=  0.5)  # tau\n'
    )
    (tests / "test_gates.py").write_text("def test_a_gate_closes(s):\n    assert not stays(s)\n")
    return tmp_path


def test_every_mistake_still_fits_the_source_and_its_tests_exist():
    found = problems(MISTAKES)
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("change", "planted"),
    [
        ({}, "note(s)\n    return s >= 0\n"),
        ({"old": "return s >= 0.5", "new": "return True"}, "note(s)\n    return True\n"),
        ({"old": "note(s)", "new": ""}, "return s >= 0.5\n"),
        ({"old": "note(s)\nreturn s >= 0.5", "new": "return note(s)"}, "return note(s)\n"),
        ({"function": "moved.elsewhere:stays"}, "note(s)\n    return s >= 0\n"),
    ],
    ids=["expression", "statement", "deleted", "two statements", "moved"],
)
def test_an_entry_that_fits_makes_its_mistake(house, change, planted):
    entry = replace(ENTRY, **change)
    assert problems([entry], house) == []
    entry.plant(house)
    text = (house / "src" / "adaponder" / "halting.py").read_text()
    assert text == 'TAU = 0.5\n\ndef stays(s):\n    """s >= 0.5"""\n    ' + planted


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"old": "s > 0.5"}, "is 0 times"),
        ({"old": "s"}, "is 2 times"),
        ({"new": "s >= (0"}, "never closed"),
        ({"new": "(s >= 0.5)"}, "changes nothing"),
        ({"function": "halting:gone"}, "halting:gone is in no module"),
        ({"caught_by": ()}, "no test is named"),
        ({"caught_by": ("test_gates.py::test_gone",)}, "there is no test_gates.py::test_gone"),
        ({"caught_by": ("test_gone.py::test_a_gate_closes",)}, "there is no test_gone.py"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_an_entry_that_does_not_fit_is_named(house, change, says):
    (found,) = problems([replace(ENTRY, **change)], house)
    assert found.startswith("gates never close: ")
    assert says in found


def test_two_entries_of_one_name_are_refused(house):
    assert problems([ENTRY, ENTRY], house) == ["gates never close: listed twice"]


def test_a_misspelt_field_is_refused(tmp_path):
    (tmp_path / "list.yaml").write_text("- {name: a, function: b, old: c, mistaken: d, caught_by: [e]}\n")
    with pytest.raises(ValueError, match="new"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("body", "caught", "why"),
    [
        ("assert 1 == 2", True, "failed by AssertionError"),
        ("with pytest.raises(ValueError): pass", True, "failed by Failed: DID NOT RAISE"),
        ("pass", False, "passed"),
        ("raise TypeError('wrong')", False, "failed by TypeError: wrong"),
        ("import nothing_of_this_name", False, "failed by ModuleNotFoundError"),
        ("assert False\nimport nothing_of_this_name", False, "failed by"),  # the file cannot be collected
        ("pytest.skip('not here')", False, "did not run"),
    ],
)
def test_only_an_assertion_catches_a_mistake(pytester, body, caught, why):
    pytester.makepyfile(**{"tests/test_it": f"import pytest\n\ndef test_one():\n    {body}\n"})
    watch = Watch()
    pytester.inline_run("tests/test_it.py", plugins=[watch])
    outcome, named = watch.outcome, ("test_it.py::test_one",)
    survived = outcome.survived(named)
    assert len(survived) == (not caught)
    assert all(reason.startswith(f"{named[0]} {why}") for reason in survived)
    assert (outcome.unsound(named) == []) == (why == "passed")


def test_a_name_stands_for_all_its_parameters_and_for_nothing_else():
    outcome = Outcome(passed=["tests/a.py::test_b[1]", "tests/a.py::test_bc"], refuted={"tests/a.py::test_b[2]": "no"})
    assert outcome.survived(("a.py::test_b",)) == []
    assert outcome.survived(("a.py::test_b[1]",)) == ["a.py::test_b[1] passed"]
    assert outcome.survived(("a.py::test_bc",)) == ["a.py::test_bc passed"]
    assert outcome.survived(("a.py::test_d",)) == ["a.py::test_d did not run"]


def test_a_run_that_broke_catches_nothing():
    outcome = Outcome(refuted={"tests/a.py::test_b": "no"}, broken={WHOLE: "the tests did not load the copy"})
    assert outcome.survived(("a.py::test_b",)) == ["a.py::test_b failed by the tests did not load the copy"]
    assert Outcome(broken={WHOLE: "no end within 9 s"}).unsound(("a.py::test_b",))
