"""The numbers and files of commit 9e23d55 stay what they were; ``fingerprints.py`` says how they are compared."""

import json
import warnings

import pytest

from fingerprints import GROUPS, VALUES, differences, group_values, machine

RECORDED = json.loads(VALUES.read_text())


# The commands and the families, 17 s, compute what other groups and the laws do too.
SLOW = ("families", "commands")


@pytest.mark.parametrize(
    "group", [pytest.param(group, marks=[pytest.mark.every] if group in SLOW else []) for group in GROUPS]
)
def test_values_are_those_recorded(group, tmp_path):
    bits = machine() == RECORDED["machine"]
    if not bits:
        warnings.warn(f"bits are not compared: recorded on {RECORDED['machine']}", stacklevel=1)
    found = json.loads(json.dumps(group_values(group, tmp_path / "new")))
    wrong = differences(RECORDED["values"][group], found, bits=bits)
    assert not wrong, f"{len(wrong)} values differ:\n" + "\n".join(wrong[:20])


def test_a_changed_number_is_found():
    old = {"a float64": "[2] 1.5 0.25 aa", "depth": [1, 2]}
    assert differences(old, {"a float64": "[2] 1.5000000000001 0.25 bb", "depth": [1, 2]}, bits=False) == []
    assert len(differences(old, {"a float64": "[2] 1.5000000000001 0.25 bb", "depth": [1, 2]}, bits=True)) == 1
    assert len(differences(old, {"a float64": "[2] 1.501 0.25 bb", "depth": [1, 3]}, bits=False)) == 2
    assert differences(old, {}, bits=False) == ["a float64: missing", "depth: missing"]
