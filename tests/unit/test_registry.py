"""A method is known by its name before torch is imported, and a user's own is registered in one line."""

import pytest

from adaponder import methods, registry
from adaponder.config import AdaPonderConfig
from adaponder.errors import ConfigError
from adaponder.methods import Method, build_method, method_class, method_names, register_method
from adaponder.methods.loop import Loop
from adaponder.methods.ponder import Ponder
from adaponder.registry import DEFAULT_METHOD, PLAIN_METHOD, scale_from_scratch
from support import HALTING, METHODS, stock


@pytest.fixture
def family(monkeypatch):
    monkeypatch.setattr(registry, "_SCALES", dict(registry._SCALES))
    monkeypatch.setattr(methods, "_CLASSES", dict(methods._CLASSES))


def test_every_name_has_its_class():
    assert method_names() == METHODS
    assert {name for name in METHODS if scale_from_scratch(name) != "sqrt(d)"} == {"loop"}
    assert all(issubclass(method_class(name), Method) for name in METHODS)
    assert tuple(name for name in METHODS if method_class(name).halts) == HALTING
    assert len({method_class(name) for name in METHODS}) == len(METHODS)
    assert DEFAULT_METHOD in METHODS
    assert method_class(PLAIN_METHOD).fixed_iterations == 1


def test_a_method_of_ones_own_is_built_by_its_name(family):
    class Mine(Ponder):
        pass

    for _ in range(2):  # a notebook's cell may be run twice
        register_method("mine", Mine, embedding_scale="sqrt(2.5 d)")
    assert method_names() == (*METHODS, "mine")
    config = AdaPonderConfig(backbone_config=stock("gpt_neox").config, method="mine", iterations=2)
    assert type(build_method(config)) is Mine
    assert config.table_scale == pytest.approx((2.5 * config.hidden_size) ** 0.5)


def test_what_cannot_be_registered_is_refused_with_the_cure(family):
    for name, method, says in (
        ("ponder", Loop, "Ponder has that name; choose another"),
        ("two words", Loop, "must consist of letters"),
        (3, Loop, "must consist of letters"),
        ("mine", int, "a subclass of adaponder.methods.Method"),
        ("mine", "adaponder.methods.loop:Loop", "a subclass of adaponder.methods.Method"),
    ):
        with pytest.raises(ConfigError, match=says):
            register_method(name, method)
    assert method_names() == METHODS
