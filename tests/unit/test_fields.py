"""One table of fields: engine, command line, server body and OpenAPI take the same values."""

import math
from dataclasses import replace
from typing import Annotated

import pydantic
import pytest
import typer
from typer.testing import CliRunner

from adaponder.errors import InputError
from adaponder.fields import REQUEST_FIELDS, Range, Sampling, body_field, check, option, violation

VALUES = {
    "top_p": ({0.5, 1}, {0, 1.5, -1}),
    "temperature": ({0, 0.7, 100}, {-0.1, 101}),
    "repetition_penalty": ({1e-6, 1.0, 1e6}, {0, 1e7}),
    "max_new_tokens": ({1, 10**9}, {0, -3}),
    "samples": ({1, 128}, {0, 129}),
}
CASES = [(name, value, True) for name, (good, _) in VALUES.items() for value in good]
CASES += [(name, value, False) for name, (_, bad) in VALUES.items() for value in bad]


@pytest.mark.parametrize(("name", "value", "allowed"), CASES)
def test_engine_command_and_server_take_the_same_values(name, value, allowed):
    kind = REQUEST_FIELDS[name].type
    body = pydantic.create_model("Body", value=(Annotated[kind, body_field(name)], ...))
    app = typer.Typer()

    @app.command()
    def command(value: Annotated[kind, option(name, "--value")]) -> None:
        pass

    taken = {"command": CliRunner().invoke(app, [f"--value={value}"]).exit_code == 0}
    for user, take in (("engine", lambda: check(name, value)), ("server", lambda: body(value=value))):
        try:
            take()
            taken[user] = True
        except ValueError:
            taken[user] = False
    assert set(taken.values()) == {allowed}, taken


def test_openapi_states_range_and_meaning():
    body = pydantic.create_model("Body", top_p=(Annotated[float, body_field("top_p")], 1.0))
    schema = body.model_json_schema()["properties"]["top_p"]
    assert (schema["exclusiveMinimum"], schema["maximum"]) == (0, 1)
    assert schema["description"] == REQUEST_FIELDS["top_p"].meaning


@pytest.mark.parametrize("value", [math.nan, math.inf, "1", True, None, [1.0]])
@pytest.mark.parametrize("name", ["temperature", "top_k"])
def test_only_finite_numbers_are_numbers(name, value):
    with pytest.raises(InputError, match=f"^{name}="):
        check(name, value)


def test_numbers_of_other_libraries_become_pythons():
    numpy = pytest.importorskip("numpy")
    assert type(check("top_k", numpy.uint8(200))) is int
    assert type(check("temperature", numpy.float32(0.5))) is float


def test_an_interval_reads_as_it_is_written():
    assert str(Range.parse("(0, 1]")) == "greater than 0 and at most 1"
    assert str(Range.parse("[0, 1]")) == "between 0 and 1"
    assert str(Range.parse("[1, inf)")) == "at least 1"
    assert math.nan not in Range.parse("[0, 1]")
    top_p = REQUEST_FIELDS["top_p"]
    assert (violation(top_p, 2) or "").startswith("must be a number greater than 0 and at most 1")


def test_every_default_is_allowed():
    for name, field in REQUEST_FIELDS.items():
        assert violation(field, getattr(Sampling(), name)) is None, name
    assert replace(Sampling(), top_p=0.5).top_p == 0.5
