"""The numbers and files of commit 9e23d55 stay what they were; ``fingerprints.py`` says how they are compared."""

import json
import warnings

import pytest

from fingerprints import DTYPES, GROUPS, METHODS, VALUES, differences, group_values, machine

RECORDED = json.loads(VALUES.read_text())
CASES = [(group, precision) for group in GROUPS for precision in (DTYPES if group in METHODS else ["both"])]


def is_further(group: str, precision: str) -> bool:
    """Returns whether make test-every checks this case: its code also runs in the others or in the laws."""
    return group == "families" or (precision == "float32" and group != "adaponder")


@pytest.mark.parametrize(
    ("group", "precision"),
    [pytest.param(*case, marks=[pytest.mark.every] if is_further(*case) else []) for case in CASES],
)
def test_values_are_those_recorded(group, precision, tmp_path):
    bits = machine() == RECORDED["machine"]
    if not bits:
        warnings.warn(f"bits are not compared: recorded on {RECORDED['machine']}", stacklevel=1)
    recorded, precisions = RECORDED["values"][group], list(DTYPES)
    if group in METHODS:
        precisions = [precision]
        recorded = {name: value for name, value in recorded.items() if name.startswith(f"{group} {precision} ")}
    found = json.loads(json.dumps(group_values(group, tmp_path / "new", precisions)))
    wrong = differences(recorded, found, bits=bits)
    assert not wrong, f"{len(wrong)} values differ:\n" + "\n".join(wrong[:20])


def test_a_changed_number_is_found():
    old = {"a float64": "[2] 1.5 0.25 aa", "depth": [1, 2]}
    assert differences(old, {"a float64": "[2] 1.5000000000001 0.25 bb", "depth": [1, 2]}, bits=False) == []
    assert len(differences(old, {"a float64": "[2] 1.5000000000001 0.25 bb", "depth": [1, 2]}, bits=True)) == 1
    assert len(differences(old, {"a float64": "[2] 1.501 0.25 bb", "depth": [1, 3]}, bits=False)) == 2
    assert differences(old, {}, bits=False) == ["a float64: missing", "depth: missing"]
