"""One model of each method for all tests of policies; no test changes them."""

import pytest

import support
from adaponder import AdaPonderForCausalLM
from policy_support import K


@pytest.fixture(scope="module")
def models() -> dict[str, AdaPonderForCausalLM]:
    return {name: support.calm(support.tiny(name, iterations=K)).requires_grad_(False) for name in support.METHODS}


@pytest.fixture(scope="module")
def model(models) -> AdaPonderForCausalLM:
    return models["adaponder"]
