"""Who decides depth at run time: the learned gate, fixed depths, signals of doubt, shares, or one's own callable."""

from adaponder.policies.base import Custom, Policy, PolicyInput, as_int64, as_policy
from adaponder.policies.rules import (
    Change,
    Divergence,
    Entropy,
    ExitThreshold,
    FixedDepth,
    ForcedDepths,
    LearnedGate,
    Random,
    RouterThreshold,
)
from adaponder.policies.schedules import Geometric, Ranked, Schedule, Shares, Uniform, thresholds_for
from adaponder.policies.sequence import SequencePolicy
from adaponder.policies.spec import parse_policy, spec_of

__all__ = [
    "Change",
    "Custom",
    "Divergence",
    "Entropy",
    "ExitThreshold",
    "FixedDepth",
    "ForcedDepths",
    "Geometric",
    "LearnedGate",
    "Policy",
    "PolicyInput",
    "Random",
    "Ranked",
    "RouterThreshold",
    "Schedule",
    "SequencePolicy",
    "Shares",
    "Uniform",
    "as_int64",
    "as_policy",
    "parse_policy",
    "spec_of",
    "thresholds_for",
]
