"""A policy from one line of text: what a command line takes and a profile stores, losing nothing.

``word:value[,value…]``, e.g. ``fixed:2`` or ``gate:0.1,0.2,0.3``; a schedule's calibrated thresholds follow an ``@``.
Each class of policies says itself how its line reads (:meth:`adaponder.policies.base.Policy.parse`), and a policy
which line says it (:meth:`adaponder.policies.base.Policy.as_line`).
"""

from __future__ import annotations

from adaponder.errors import InputError
from adaponder.policies.base import Policy, registered_policies
from adaponder.policies.text import PolicyLine


def parse_policy(text: str) -> Policy:
    """The policy that this line says; ``ranked-…`` ones are for evaluation only."""
    line, classes = PolicyLine.split(text), registered_policies()
    for policy_class in classes:
        if line.word in policy_class.words():
            policy = policy_class.parse(line)
            if policy is not None:
                return policy
    known = ", ".join(word for policy_class in classes for word in policy_class.words())
    raise InputError(f"--policy {text}: name one of {known}, then a colon and its value")
