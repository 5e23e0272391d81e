"""Applies each lane's halting policy to its rows in a pass that many requests share.

Each built-in policy class in use is called once on all rows, with numeric fields replaced by tensors of one value per
row; each row takes the decision of its lane's class. Shapes are static and the host never waits, so a CUDA graph can
capture the call; the graph stays valid while :meth:`LanePolicies.key` is unchanged. A user's own policy, or a built-in
one with fields that are not numbers, is called separately on the rows of its lane, and the host waits for it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from adaponder.errors import InputError
from adaponder.inference.lanes import write_lane
from adaponder.ops.lanes import force_rows
from adaponder.policies import ForcedDepths, Policy, PolicyInput, as_int64

_FIELDS = 2  # the largest number of numeric fields of a built-in policy
_PER_ROW = ("iteration", "gate", "hidden", "position", "seed", "slot", "active")


class LanePolicies:
    """Holds the policy, seed, forced depths and last iteration of every lane.

    Attributes:
        errors: exceptions raised by policies, by lane; rows of such a lane halt until :meth:`set` or :meth:`clear`.
    """

    def __init__(self, lanes: int, slots: int, iterations: int, device: torch.device | str = "cpu"):
        self.iterations, self.slots, self.device = iterations, slots, torch.device(device)
        self.errors: dict[int, Exception] = {}
        self._numbers = torch.full((lanes, iterations, _FIELDS), math.nan, dtype=torch.float64, device=self.device)
        self._integers = torch.zeros(lanes, 3, dtype=torch.int64, device=self.device)
        self._seed, self._class_number, self._last = self._integers.unbind(1)  # views of the columns
        self._forced: Tensor | None = None
        # By lane: the class of its built-in policy (or ForcedDepths, which _forced applies), or the user's own policy.
        self._classes: dict[int, type[Policy]] = {}
        self._callables: dict[int, Policy] = {}
        self._forcing: set[int] = set()
        self._class_numbers: dict[type[Policy], int] = {}

    def set(self, lane: int, policy: Policy, seed: int, depths: Mapping[int, int], last: int) -> None:
        """Sets the policy of a lane; from a :class:`ForcedDepths` policy, the lane takes row 0 of ``policy.depths``.

        ``depths`` maps slots to depths that override the policy (0: no override); ``last`` is the last allowed
        iteration.
        """
        self.clear(lane)
        forced: dict[int, int] = {}
        if isinstance(policy, ForcedDepths):
            forced = {slot: max(depth, 1) for slot, depth in enumerate(policy.depths[0].tolist())}
        forced |= {slot: depth for slot, depth in depths.items() if depth}
        class_number = -1
        if _is_built_in(policy):
            self._classes[lane] = type(policy)
            class_number = self._class_numbers.setdefault(type(policy), len(self._class_numbers))
            write_lane(self._numbers, lane, _number_table(policy, self.iterations, last))
        elif isinstance(policy, ForcedDepths):
            self._classes[lane] = ForcedDepths
        else:
            self._callables[lane] = policy
        write_lane(self._integers, lane, (as_int64(seed), class_number, last))
        if forced:
            self._forcing.add(lane)
            if self._forced is None:
                self._forced = torch.zeros(len(self._integers), self.slots, dtype=torch.int32, device=self.device)
        if self._forced is not None:
            write_lane(self._forced, lane, [forced.get(slot, 0) for slot in range(self.slots)])

    def clear(self, lane: int) -> None:
        """Clears a lane; decisions for its rows are undefined until it is set again."""
        for by_lane in (self._classes, self._callables, self.errors):
            by_lane.pop(lane, None)
        self._forcing.discard(lane)

    def classes(self) -> tuple[type[Policy], ...]:
        """Returns the built-in policy classes in use, in the order of their first use."""
        present = set(self._classes.values())
        return tuple(kind for kind in self._class_numbers if kind in present)

    def callables(self) -> tuple[int, ...]:
        """Returns the lanes whose policy is called separately; the host waits for every such call."""
        return tuple(sorted(self._callables))

    def reads_previous(self) -> bool:
        """Returns whether any lane's policy reads the hidden states of the previous iteration."""
        return bool(self._callables) or any(kind.reads_previous for kind in self.classes())

    def key(self) -> tuple[Any, ...]:
        """Returns a key for CUDA graphs: a captured call may be replayed while the key is the same."""
        return self.classes(), bool(self._forcing), bool(self._callables), ForcedDepths in self._classes.values()

    def __call__(self, rows: PolicyInput) -> Tensor:
        """Returns a bool per row: whether its token continues under the policy of lane ``rows.sequence``.

        Uses the seed of the lane instead of ``rows.seed``. Results for inactive rows are undefined.
        """
        classes, lane = self.classes(), rows.sequence
        if any(kind.reads_seed for kind in classes) or self._callables:
            rows = replace(rows, seed=self._seed[lane])
        continues = self._apply_classes(rows, classes)
        for callable_lane, policy in self._callables.items():
            continues = self._apply_callable(rows, continues, callable_lane, policy)
        if self._forcing and self._forced is not None:
            return force_rows(continues, self._forced, lane, rows.slot, rows.iteration, self._last)
        # Numeric fields are NaN from a lane's last iteration on (see _number_table), which halts every row.
        if self._callables or any(not _number_fields(kind) for kind in classes):
            continues = continues & (rows.iteration < self._last[lane])
        return continues

    def _apply_classes(self, rows: PolicyInput, classes: Sequence[type[Policy]]) -> Tensor:
        """Returns which rows continue under the built-in policies ``classes``; false in lanes with any other policy."""
        if not classes:
            return torch.zeros_like(rows.active)
        numbers = self._numbers[rows.sequence, rows.iteration]
        decisions = [_with_tensors(kind, numbers)(rows) for kind in classes]
        if len({*self._classes.values()}) == 1 and not self._callables:
            return decisions[0]
        continues, class_number = torch.zeros_like(rows.active), self._class_number[rows.sequence]
        for kind, decision in zip(classes, decisions, strict=True):
            continues = torch.where(class_number == self._class_numbers[kind], decision, continues)
        return continues

    def _apply_callable(self, rows: PolicyInput, continues: Tensor, lane: int, policy: Policy) -> Tensor:
        """Returns ``continues`` with a lane's active rows replaced by the decisions of the user's policy."""
        selected = (rows.sequence == lane) & rows.active
        if lane in self.errors or not bool(selected.any()):
            return continues
        values = {name: getattr(rows, name)[selected] for name in _PER_ROW}
        previous = None if rows.previous is None else rows.previous[selected]
        # To the policy, its request is the only sequence.
        sequence = torch.zeros_like(values["slot"])
        try:
            decision = policy(replace(rows, **values, sequence=sequence, previous=previous))
            if not isinstance(decision, Tensor) or decision.shape != sequence.shape or decision.dtype != torch.bool:
                raise InputError(
                    f"policy {policy.fingerprint} must return a bool tensor of shape {tuple(sequence.shape)}"
                )
            return continues.masked_scatter(selected, decision.to(continues.device))
        except Exception as error:  # any error ends only this request
            self.errors[lane] = error
            return continues


def prefix_key(policy: Policy, seed: int) -> tuple[Any, ...] | None:
    """Returns a key that is equal only for policies and seeds with equal decisions, or ``None`` if no key is known.

    A user's callable, or a policy with fields other than numbers, strings and tuples of them, has no key; requests
    without a key share no prefixes.
    """
    kind = type(policy)
    if _is_built_in(policy) or kind is ForcedDepths:
        return kind, policy.fingerprint, as_int64(seed) if policy.reads_seed else None
    if not is_dataclass(policy) or kind.__eq__ is object.__eq__:
        return None
    values = tuple(getattr(policy, item.name) for item in fields(policy))
    if not all(_is_plain(value) for value in values):
        return None
    # A user's own class may read the seed although it inherits reads_seed=False.
    return kind, values, as_int64(seed) if kind.__dict__.get("reads_seed", True) else None


def runs_on_host(policy: Policy) -> bool:
    """Returns whether the policy is called separately for its lane, so that the host waits for it in every tick."""
    return not _is_built_in(policy) and not isinstance(policy, ForcedDepths)


def _is_built_in(policy: Policy) -> bool:
    """Returns whether a policy is a row-by-row policy of this package with at most ``_FIELDS`` fields, all numeric."""
    kind = type(policy)
    if not kind.__module__.startswith("adaponder.policies.") or not kind.row_by_row:
        return False
    names = _number_fields(kind)
    return len(names) <= _FIELDS and all(_is_numeric(getattr(policy, name)) for name in names)


def _is_numeric(value: Any) -> bool:
    return isinstance(value, Real) or (isinstance(value, Sequence) and all(isinstance(item, Real) for item in value))


def _is_plain(value: Any) -> bool:
    return isinstance(value, (int, float, str)) or (isinstance(value, tuple) and all(_is_plain(item) for item in value))


def _number_fields(kind: type[Policy]) -> tuple[str, ...]:
    return tuple(item.name for item in fields(kind))  # type: ignore[arg-type]


def _number_table(policy: Policy, iterations: int, last: int) -> list[list[float]]:
    """Returns the value of each policy field at each iteration, ``[iterations, fields]``.

    A number has the same value at all iterations before ``last``; a list has one value per iteration. All other entries
    are NaN, with which every comparison is false, so that the token halts.
    """
    table = [[math.nan] * _FIELDS for _ in range(iterations)]
    for column, name in enumerate(_number_fields(type(policy))):
        value = getattr(policy, name)
        values = value if isinstance(value, Sequence) else [value] * iterations
        for iteration, number in enumerate(values[:last]):
            table[iteration][column] = float(number)
    return table


def _with_tensors(kind: type[Policy], numbers: Tensor) -> Policy:
    """Builds a policy whose fields are tensors of one value per row: the columns of ``numbers […, fields]``."""
    policy = object.__new__(kind)
    for column, name in enumerate(_number_fields(kind)):
        object.__setattr__(policy, name, numbers[..., column])
    return policy
