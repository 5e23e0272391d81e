"""Every policy at the same price: tuned to one mean depth on one half of a text, measured on the other half."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import numpy as np

from adaponder.backbones.shape import shape_of
from adaponder.errors import InputError
from adaponder.evaluation.halves import Half, Halves
from adaponder.evaluation.kept import Kept
from adaponder.evaluation.lab import dials
from adaponder.evaluation.lab.dials import Dial, Setting, Trace, trace
from adaponder.evaluation.lab.tuning import Tuned, tune
from adaponder.evaluation.meter import deciding_flops
from adaponder.evaluation.scoring import Reading, Scores
from adaponder.evaluation.summary import Difference, Interval, paired_difference
from adaponder.modeling.model import AdaPonderForCausalLM
from adaponder.policies import Policy, spec_of

RATES = (0.9, 0.5)
LEARNED, TRAINED = "learned gate", "learned gate as trained"


@dataclass(frozen=True)
class Row:
    """One policy at one budget, as measured on the held-out half.

    Attributes:
        budget: mean depth it was tuned to; ``None`` for the policy as trained, which is not tuned.
        setting: what was tuned, in words; ``spec`` is for ``--policy``, where the policy can be written so.
        tuning_depth: mean depth on the tuning half.
        difference: its loss minus the tuned learned gate's, paired by document.
        active: share of tokens read at iteration 1 … K.
        mflops: per token, the logits included that some policies compute only to decide (``deciding_mflops``).
        missed: why the budget was not reached; the rest is then empty, or off the budget.
    """

    policy: str
    causal: bool
    budget: float | None
    setting: str
    spec: str | None
    runs: int
    missed: str | None
    tuning_depth: float | None = None
    depth: float | None = None
    depth_interval: Interval | None = None
    loss: float | None = None
    loss_interval: Interval | None = None
    difference: Difference | None = None
    active: tuple[float, ...] = ()
    mflops: float | None = None
    deciding_mflops: float | None = None
    flops_ratio: float | None = None

    def as_dict(self) -> dict[str, Any]:
        told_apart = None if self.difference is None else self.difference.told_apart
        return asdict(self) | {"told_apart": told_apart}

    @classmethod
    def from_dict(cls, found: dict[str, Any]) -> Row:
        """The row of which :meth:`as_dict` gave this."""
        known: dict[str, Any] = {field.name: found[field.name] for field in fields(cls)}
        for name in ("depth_interval", "loss_interval"):
            known[name] = None if found[name] is None else Interval(*found[name])
        if (gap := found["difference"]) is not None:
            interval = None if gap["interval"] is None else Interval(*gap["interval"])
            known["difference"] = Difference(**(gap | {"interval": interval}))
        known["active"] = tuple(found["active"])
        return cls(**known)


class Lab:
    """A model, two halves of a text, and one full-depth run of each: what every policy is tuned and measured with.

    ``show`` is told what is being run over how many predictions, and returns who wants to know about each batch's.
    """

    def __init__(
        self,
        model: AdaPonderForCausalLM,
        halves: Halves,
        *,
        batch_size: int = 8,
        seed: int = 0,
        show: Callable[[str, int], Callable[[int], None]] = lambda what, total: lambda predictions: None,
    ):
        require_halting(model)
        self.model, self.halves, self.batch_size, self.seed, self.show = model, halves, batch_size, seed, show
        self.iterations = model.config.iterations
        self.shape = shape_of(model.config)
        self.seen = self._trace(halves.tuning, "tuning half at full depth")
        self._losses: np.ndarray | None = None

    def _trace(self, half: Half, what: str) -> Trace:
        return trace(self.model, half, batch_size=self.batch_size, seed=self.seed, advance=self.show(what, half.tokens))

    @property
    def held_out_losses(self) -> np.ndarray:
        """The held-out half's losses at every depth, which only an oracle may look at before it decides."""
        if self._losses is None:
            self._losses = self._trace(self.halves.held_out, "held-out half at full depth").nll
        return self._losses

    def tune(self, dial: Dial, budget: float) -> Tuned:
        def measure(setting: Setting) -> Scores:
            how = setting.reading(self.halves.tuning, self.seen.nll, iterations=self.iterations, seed=self.seed)
            return self._score(self.halves.tuning, how, f"{dial.name} at {budget:g}: tuning")

        return tune(dial, budget, measure, iterations=self.iterations)

    def held_out(self, tuned: Tuned, learned: Scores | None = None) -> tuple[Row, Scores]:
        """A tuned setting on the held-out half, beside the ``learned`` gate's scores there."""
        setting, half = tuned.setting, self.halves.held_out
        losses = self.held_out_losses if setting.policy is None else None
        how = setting.reading(half, losses, iterations=self.iterations, seed=self.seed)
        scores = self._score(half, how, f"{tuned.dial.name} at {tuned.budget:g}: held out")
        return self._filled(_bare(tuned), setting.policy, scores, learned), scores

    def own_depth(self) -> float:
        """Mean depth of the tuning half under the method's own rule."""
        return float(self._score(self.halves.tuning, Reading(seed=self.seed), TRAINED).depth.mean())

    def untuned(self, name: str, policy: Policy, *, tuning_depth: float | None = None) -> Row:
        """A policy as it is, on the held-out half."""
        scores = self._score(self.halves.held_out, Reading(policy=policy, seed=self.seed), f"{name}: held out")
        row = Row(name, policy.causal, None, policy.fingerprint, spec_of(policy), 0, None, tuning_depth)
        return self._filled(row, policy, scores, None)

    def _score(self, half: Half, how: Reading, what: str) -> Scores:
        advance = self.show(what, half.tokens)
        return half.score(self.model, how, batch_size=self.batch_size, shape=self.shape, advance=advance)

    def trained(self, own_depth: float) -> Row:
        return self.untuned(TRAINED, self.model.method.default_policy(training=False), tuning_depth=own_depth)

    def dials(self, rates: Sequence[float] = RATES) -> list[Dial]:
        """Every policy of the lab, the learned gate first."""
        for rate in rates:
            if not 0.0 < rate <= 1.0:
                raise InputError(f"--rates {rate:g}: above 0, at most 1")
        seen = self.seen
        found = [dials.gate_dial(seen, LEARNED)]
        for ranked in (False, True):
            found += [dials.uniform_dial(seen, ranked=ranked), dials.geometric_dial(seen, ranked=ranked)]
            found += [dials.decaying_dial(seen, rate, ranked=ranked) for rate in rates]
        signals = (dials.entropy_dial, dials.divergence_dial, dials.change_dial, dials.random_dial, dials.oracle_dial)
        return [*found, *(make(seen) for make in signals)]

    def budgets(self, asked: Sequence[float] | None, own: float) -> tuple[float, ...]:
        """The budgets asked for, or the one that is the learned rule's ``own`` depth."""
        for budget in asked or ():
            check_budget(budget, self.iterations, "--budgets")
        if asked:
            return tuple(asked)
        if not 1.02 <= own <= self.iterations - 0.02:
            raise InputError(
                f"--budgets: as trained, the model reads this text {own:.3f} times per token, where every policy is "
                f"the same; name mean depths between 1 and {self.iterations}, as in --budgets 1.5,2.5"
            )
        return (own,)

    def compare(
        self, budgets: Sequence[float], *, rates: Sequence[float] = RATES, kept: Kept | None = None
    ) -> Iterator[Row]:
        """For each budget a row for each policy, the learned gate first.

        Rows are saved in ``kept`` as they come, and those that it has already are not measured again.
        """
        learned_dial, *others = self.dials(rates)
        for budget in budgets:
            learned: Scores | None = None
            for dial in (learned_dial, *others):
                name = f"{dial.name} at {budget!r}"
                if kept is not None and (found := kept.load(name)) is not None:
                    yield Row.from_dict(found.facts)
                    continue
                if learned is None and dial is not learned_dial:
                    # Its row is kept, its losses are not, and every other policy is paired with them.
                    learned = self._measured(learned_dial, budget, None)[1]
                row, scores = self._measured(dial, budget, learned)
                learned = scores if dial is learned_dial else learned
                if kept is not None:
                    kept.save(name, row.as_dict())
                yield row

    def _measured(self, dial: Dial, budget: float, learned: Scores | None) -> tuple[Row, Scores | None]:
        """The dial tuned to the budget, and its held-out scores where it can be."""
        tuned = self.tune(dial, budget)
        return (_bare(tuned), None) if tuned.scores is None else self.held_out(tuned, learned)

    def _filled(self, row: Row, policy: Policy | None, scores: Scores, learned: Scores | None) -> Row:
        half = self.halves.held_out
        summary = half.summarise(scores, seed=self.seed)
        difference = None
        if learned is not None:
            difference = paired_difference(half.book, learned.nll, scores.nll, seed=self.seed)
        active = tuple(float((scores.depth > i).mean()) for i in range(self.iterations))
        spent = scores.spent
        # Asked after iteration i are those that were read then.
        asked = [sum(spent.histogram[i:]) for i in range(self.iterations - 1)]
        deciding = deciding_flops(policy, asked, self.shape) / spent.tokens
        return replace(
            row,
            depth=summary.depth,
            depth_interval=half.depth_interval(scores, seed=self.seed),
            loss=summary.loss,
            loss_interval=summary.interval,
            difference=difference,
            active=active,
            mflops=spent.cost.flops / spent.tokens / 1e6,
            deciding_mflops=deciding / 1e6,
            flops_ratio=spent.cost.ratio,
        )


def _bare(tuned: Tuned) -> Row:
    """What is known before the held-out half is run."""
    dial, setting = tuned.dial, tuned.setting
    return Row(dial.name, dial.causal, tuned.budget, setting.words, setting.spec, tuned.runs, tuned.missed, tuned.depth)


def require_halting(model: AdaPonderForCausalLM) -> None:
    """Refuses methods that read every token equally often, and models with nothing to decide."""
    if not model.method.halts:
        raise InputError(
            f"{model.config.method} reads every token equally often: there is no depth to give out; "
            "adaponder eval --depths 1,2,… shows what each costs"
        )
    if model.config.iterations < 2:
        raise InputError("the model has one iteration: there is no depth to give out")


def check_budget(budget: float, iterations: int, option: str) -> None:
    if not 1.0 <= budget <= iterations:
        raise InputError(f"{option} {budget:g}: a mean depth from 1 to {iterations}, the model's iterations")
