"""One model of each method for all tests of policies; no test changes them."""

import pytest

import support
from adaponder import AdaPonderForCausalLM
from policy_support import K


@pytest.fixture(scope="module")
def models() -> dict[str, AdaPonderForCausalLM]:
    """One model of each method; no test changes them."""
    return {
        method: support.calm(support.tiny(method, iterations=K)).requires_grad_(False) for method in support.METHODS
    }


@pytest.fixture(scope="module")
def model(models) -> AdaPonderForCausalLM:
    return models["adaponder"]
