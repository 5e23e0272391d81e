"""Training losses, one file each: an objective is called with what a forward left and returns its loss by terms."""

from adaponder.methods.objectives.base import CrossEntropy, Losses, LossFunction, Objective, Scorer, Trajectory

__all__ = ["CrossEntropy", "LossFunction", "Losses", "Objective", "Scorer", "Trajectory"]
