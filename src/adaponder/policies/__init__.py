"""Policies decide depth at run time: learned gate, fixed depth, uncertainty, shares of tokens, or a user's callable."""

from adaponder.policies.base import Custom, Policy, PolicyInput, as_policy, parse_policy
from adaponder.policies.choice import choose_policy
from adaponder.policies.depth import FixedDepth, ForcedDepths, GateOrChance, Random, RandomRates, SampledExit
from adaponder.policies.gate import ExitThreshold, LearnedGate, RouterThreshold
from adaponder.policies.measures import Change, Confidence, Divergence, Entropy, Similarity
from adaponder.policies.schedules import Geometric, Ranked, Schedule, SequencePolicy, Shares, Uniform, thresholds_for
from adaponder.policies.values import as_int64, sequence_seeds

__all__ = [
    "Change",
    "Confidence",
    "Custom",
    "Divergence",
    "Entropy",
    "ExitThreshold",
    "FixedDepth",
    "ForcedDepths",
    "GateOrChance",
    "Geometric",
    "LearnedGate",
    "Policy",
    "PolicyInput",
    "Random",
    "RandomRates",
    "Ranked",
    "RouterThreshold",
    "SampledExit",
    "Schedule",
    "SequencePolicy",
    "Shares",
    "Similarity",
    "Uniform",
    "as_int64",
    "as_policy",
    "choose_policy",
    "parse_policy",
    "sequence_seeds",
    "thresholds_for",
]
