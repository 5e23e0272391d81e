"""Who decides depth at run time: the learned gate, fixed depths, signals of doubt, shares, or one's own callable."""

from adaponder.policies.base import Custom, Policy, PolicyInput, as_policy
from adaponder.policies.confidence import Confidence, Similarity
from adaponder.policies.depth import FixedDepth, ForcedDepths
from adaponder.policies.gate import ExitThreshold, LearnedGate, RouterThreshold
from adaponder.policies.measures import Change, Divergence, Entropy
from adaponder.policies.random import Random
from adaponder.policies.random_rates import RandomRates
from adaponder.policies.sampled_exit import SampledExit
from adaponder.policies.schedules import Geometric, Schedule, Shares, Uniform, thresholds_for
from adaponder.policies.sequence import Ranked, SequencePolicy
from adaponder.policies.spec import parse_policy
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
    "parse_policy",
    "sequence_seeds",
    "thresholds_for",
]
