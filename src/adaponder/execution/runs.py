"""How to run one recurrence: every token in every pass and masks (dense), or active rows only (packed, compact).

A method is written once, over token grids ``[batch, time, …]``, and asks a run for its passes (``read``), for functions
of each active token (``map``), and who reads on (``decide``, ``settle``). Dense computes everything and masks; packed
and compact gather active rows, compute those and put them back. With a ledger that already holds tokens, compact is
cached decoding.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from adaponder.backbones.attention import Lane
from adaponder.backbones.views import DenseView, GridView, IterationView, KeysValues, RowPlan, RowView
from adaponder.backbones.wrapper import Backbone, Reading
from adaponder.execution.ledger import Ledger
from adaponder.execution.tokens import Tokens
from adaponder.halting import freeze_halted
from adaponder.ops.compact_attention import Rows
from adaponder.ops.masks import Places
from adaponder.policies import Policy, PolicyInput, SequencePolicy, as_int64


class Pass(NamedTuple):
    """Grids ``[batch, time, d]`` of what was read; tokens that were not read hold no meaning."""

    hidden: Tensor
    stream: Tensor


class Run(ABC):
    """The state of one recurrence over one batch.

    Attributes:
        active: tokens that the next ``read`` reads; padding never is.
        depth: how often each token has been read.
        last_hidden: final-normed hidden states that the policy saw last, for those that compare iterations.
        reuse: what others see of a halted token. ``state``: its last row, and it is not read again; ``kv``: its last
            row, though it is read again; ``none``: its newest row; ``absent``: nothing (mor).
    """

    def __init__(self, backbone: Backbone, tokens: Tokens, *, reuse: str, replay: bool, stream: bool):
        self.backbone = backbone
        self.stream = stream
        self.tokens = tokens
        self.reuse = reuse
        self.replay = replay
        self.active = tokens.real
        self.depth = torch.zeros_like(tokens.slot)
        self.iteration = 0
        self.last_hidden: Tensor | None = None

    def read(self, x: Tensor) -> Pass:
        """One pass of the backbone over the tokens to be read (eq. 1), others' rows reused (eq. 10)."""
        seen = self._pass(x)
        self.depth = self.depth + self.active
        self.iteration += 1
        return seen

    def settle(self, new: Tensor, old: Tensor) -> Tensor:
        """The hidden state each token now has: a halted token's is static (law 3), unless it is read again."""
        if self.reuse in ("kv", "none"):
            return new
        return self.compiled(freeze_halted)(self.active, new, old)

    def compiled(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """A small function between passes, compiled if passes are; as it is where the number of rows varies."""
        return function

    def halt(self, keep: Tensor) -> None:
        """Monotone (eq. 5): ``keep`` is per row of :meth:`rows`, and nobody comes back."""
        self.active = self.active & self._grid(keep)

    def decide(self, policy: Policy, gate: Tensor, hidden: Tensor, *, seed: int) -> None:
        """Lets the policy look at every active token after the iteration just finished, and halts whom it says."""
        previous, self.last_hidden = self.last_hidden, hidden
        active = self.rows(self.active)
        if active.numel() == 0:
            return
        if isinstance(policy, SequencePolicy):
            keep = policy.choose(gate, self.active, self.tokens.lengths, self.iteration - 1)
            self.halt(self.rows(keep))
            return
        sequence = torch.arange(gate.shape[0], device=gate.device)[:, None].expand_as(self.tokens.slot)
        slot = self.rows(self.tokens.slot)
        rows = PolicyInput(
            iteration=torch.full_like(slot, self.iteration - 1),
            gate=self.rows(gate),
            hidden=self.rows(hidden),
            position=self.rows(self.tokens.position),
            seed=torch.full_like(slot, as_int64(seed)),
            sequence=self.rows(sequence),
            slot=slot,
            active=active,
            head=self.backbone.logits,
            previous=None if previous is None else self.rows(previous),
        )
        self.halt(policy(rows))

    @abstractmethod
    def _pass(self, x: Tensor) -> Pass: ...

    @abstractmethod
    def map(self, function: Callable[[Tensor], Tensor], grid: Tensor, *, everyone: bool = False) -> Tensor:
        """``function`` of each active token (``everyone``: of each real one); 0, or no meaning, elsewhere."""

    @abstractmethod
    def rows(self, grid: Tensor) -> Tensor:
        """The entries of active tokens (dense: of all)."""

    @abstractmethod
    def _grid(self, rows: Tensor) -> Tensor: ...


class DenseRun(Run):
    """Every pass computes every token, ``where`` keeps what halted tokens had: no data-dependent shape, the oracle."""

    def __init__(self, backbone: Backbone, tokens: Tokens, *, reuse: str, replay: bool = False, stream: bool = True):
        super().__init__(backbone, tokens, reuse=reuse, replay=replay, stream=stream)
        self.previous: list[KeysValues] | None = None
        self.mask: Tensor | dict[str, Tensor] | None = None

    def _pass(self, x: Tensor) -> Pass:
        tokens, vanishing = self.tokens, self.reuse == "absent"
        # Who sees whom changes between iterations only where halted tokens vanish.
        if (vanishing and self.iteration > 0) or (self.iteration == 0 and not tokens.plain):
            places = Places(tokens.slot, tokens.order, tokens.document, self.active if vanishing else tokens.real)
            self.mask = self.backbone.mask(places, places, x.dtype)
        mask = self.mask
        previous = self.previous if self.reuse in ("state", "kv") else None
        reading = self.backbone.read(
            x,
            position=tokens.position,
            mask=mask,
            view=DenseView,
            # A first pass reuses nothing, so it asks for no mask: one graph less to tell apart when compiled.
            holding={"previous": previous, "active": None if previous is None else self.active},
            replay=self.replay,
            stream=self.stream,
        )
        self.previous = reading.rows
        return Pass(reading.hidden, reading.stream)

    def map(self, function: Callable[[Tensor], Tensor], grid: Tensor, *, everyone: bool = False) -> Tensor:
        return function(grid)

    def compiled(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return self.backbone.compiled(function)

    def rows(self, grid: Tensor) -> Tensor:
        return grid

    def _grid(self, rows: Tensor) -> Tensor:
        return rows


class SparseRun(Run):
    """What both ways of computing only what must be have in common: rows are gathered, computed and put back."""

    def __init__(self, backbone: Backbone, tokens: Tokens, *, reuse: str, replay: bool = False, stream: bool = True):
        super().__init__(backbone, tokens, reuse=reuse, replay=replay, stream=stream)
        self._real_place: Tensor | None = None
        self._active_place: Tensor | None = None

    def place_of(self, chosen: Tensor) -> Tensor:
        """Where all real or all active tokens stand in the flattened grid.

        How many they are is something that the host must wait for, so it is asked once for each mask.
        """
        if chosen is self.tokens.real:
            if self._real_place is None:
                self._real_place = chosen.flatten().nonzero().squeeze(1)
            return self._real_place
        if self._active_place is None:
            self._active_place = self.active.flatten().nonzero().squeeze(1)
        return self._active_place

    def halt(self, keep: Tensor) -> None:
        super().halt(keep)
        self._active_place = None

    def computed(self) -> Tensor:
        """Whom a pass computes."""
        return self.active if self.reuse in ("state", "absent") else self.tokens.real

    def stored(self) -> Tensor:
        """Whose rows of a pass others see."""
        return self.tokens.real if self.reuse == "none" else self.active

    def _read_lane(
        self,
        x: Tensor,
        place: Tensor,
        *,
        sequence: Tensor,
        key: Places,
        view: type[IterationView],
        holding: dict[str, Any],
    ) -> Reading:
        """One pass over the rows at ``place`` of the flattened grid, packed into one lane.

        ``sequence`` says which lane of ``key``, and of what the view answers, each is of.
        """
        tokens = self.tokens

        def lane(grid: Tensor) -> Tensor:
            return grid.flatten(0, 1)[place][None]

        document = None if tokens.document is None else lane(tokens.document)
        rows = Rows(
            sequence=sequence,
            query=Places(lane(tokens.slot), lane(tokens.order), document),
            key=key,
        )
        return self.backbone.read(
            lane(x),
            position=lane(tokens.position),
            mask=None,
            view=view,
            holding=holding,
            lane=Lane(rows, self.backbone.layer_windows, []),
            replay=self.replay,
            stream=self.stream,
        )

    def map(self, function: Callable[[Tensor], Tensor], grid: Tensor, *, everyone: bool = False) -> Tensor:
        chosen = self.tokens.real if everyone else self.active
        place = self.place_of(chosen)
        rows = function(grid.flatten(0, 1)[place])
        return rows.new_zeros(chosen.numel(), *rows.shape[1:]).index_copy(0, place, rows).unflatten(0, chosen.shape)

    def rows(self, grid: Tensor) -> Tensor:
        return grid.flatten(0, 1)[self.place_of(self.active)]

    def _grid(self, rows: Tensor) -> Tensor:
        grid = torch.zeros(self.active.numel(), dtype=torch.bool, device=rows.device)
        return grid.index_copy(0, self.place_of(self.active), rows).view(self.active.shape)


class PackedRun(SparseRun):
    """All rows that a pass computes in one lane, whatever sequence they are of; keys and values of all tokens in grids.

    Products see no padding and attention finds each row's sequence (:class:`adaponder.backbones.attention.Lane`).
    Nothing is left to go on from: with a ledger, see :class:`CompactRun`.
    """

    def __init__(self, backbone: Backbone, tokens: Tokens, *, reuse: str, replay: bool = False, stream: bool = True):
        super().__init__(backbone, tokens, reuse=reuse, replay=replay, stream=stream)
        self.grids: list[KeysValues] | None = None

    def _pass(self, x: Tensor) -> Pass:
        if self.iteration == 0 and self.tokens.plain:
            return self._first_pass(x)
        tokens, time = self.tokens, x.shape[1]
        place = self.place_of(self.computed())
        if not place.numel():
            return Pass(torch.zeros_like(x), torch.zeros_like(x))
        kept = None
        if self.reuse == "kv":
            kept = self.stored().flatten()[place].nonzero().squeeze(1)
        stored = place if kept is None else place[kept]
        # Halted tokens of mor are absent; padding always is.
        present = self.active if self.reuse == "absent" else None if tokens.plain else tokens.real
        key, sequence, lanes = Places(tokens.slot, tokens.order, tokens.document, present), place // time, None
        if self.backbone.unfolds:
            # Sequences with nothing to read are left out: nobody unfolds their keys.
            lanes, sequence = sequence.unique(return_inverse=True)
            key = key.of(lanes)
        holding = {"grids": self.grids, "shape": tuple(x.shape[:2]), "lanes": lanes, "kept": kept}
        holding |= {"sequence": stored // time, "slot": stored % time}
        reading = self._read_lane(x, place, sequence=sequence, key=key, view=GridView, holding=holding)
        self.grids = reading.rows

        def grid(found: Tensor) -> Tensor:
            return torch.zeros_like(x, dtype=found.dtype).flatten(0, 1).index_copy(0, place, found[0]).view(x.shape)

        return Pass(grid(reading.hidden), grid(reading.stream))

    def _first_pass(self, x: Tensor) -> Pass:
        """Every token is read and nothing is there to be reused: an ordinary causal pass."""
        reading = self.backbone.read(
            x,
            position=self.tokens.position,
            mask=None,
            view=DenseView,
            holding={"previous": None, "active": None},
            replay=self.replay,
            stream=self.stream,
        )
        self.grids = reading.rows
        return Pass(reading.hidden, reading.stream)


class CompactRun(SparseRun):
    """A pass computes exactly the rows it must: as many as the tokens' depths add up to, over all passes.

    Sequences with equally many rows to compute are lanes of one rectangle; otherwise the rows are packed into one lane,
    or, where the attention is not ours, there is a rectangle for each count. No row is padding.
    """

    def __init__(
        self,
        backbone: Backbone,
        tokens: Tokens,
        *,
        reuse: str,
        ledger: Ledger,
        replay: bool = False,
        stream: bool = True,
    ):
        super().__init__(backbone, tokens, reuse=reuse, replay=replay, stream=stream)
        self.ledger = ledger
        self.past = ledger.slots
        ledger.extend(*tokens.slot.shape, tokens.slot.device)

    def read(self, x: Tensor) -> Pass:
        seen = super().read(x)
        self.ledger.record_depth(self.past, self.depth)
        return seen

    def _pass(self, x: Tensor) -> Pass:
        computed, stored = self.computed(), self.stored()
        if self.iteration and self.reuse != "absent":
            self.ledger.carry_over(self.past, self.iteration)
        batch, time, size = x.shape
        places, hidden, stream = [], [], []
        for place, reading in self._readings(x, computed, stored):
            places.append(place)
            hidden.append(reading.hidden.flatten(0, 1))
            stream.append(reading.stream.flatten(0, 1))
        if not places:
            return Pass(torch.zeros_like(x), torch.zeros_like(x))

        def grid(parts: list[Tensor]) -> Tensor:
            rows = torch.cat(parts)
            return rows.new_zeros(batch * time, size).index_copy(0, torch.cat(places), rows).view(x.shape)

        return Pass(grid(hidden), grid(stream))

    def _readings(self, x: Tensor, computed: Tensor, stored: Tensor) -> Iterator[tuple[Tensor, Reading]]:
        """(where in the flattened grid, what was read there): one rectangle or lane, if the attention can do it."""
        counts = computed.sum(1)
        lengths = [count for count in counts.unique().tolist() if count]
        if len(lengths) > 1 and self.backbone.packs():
            place = self.place_of(computed)
            yield place, self._read_packed(x, place, counts.nonzero().squeeze(1), stored.flatten()[place])
            return
        for count in lengths:
            lanes = (counts == count).nonzero().squeeze(1)
            when = computed[lanes].nonzero()[:, 1].view(-1, count)
            at = (lanes[:, None], when)
            yield (lanes[:, None] * x.shape[1] + when).flatten(), self._read_lanes(x[at], lanes, when, stored[at])

    def _read_packed(self, x: Tensor, place: Tensor, lanes: Tensor, stored: Tensor) -> Reading:
        """One pass over the rows at ``place``, of the sequences ``lanes``, of which those ``stored`` leave a row."""
        ledger, time = self.ledger, x.shape[1]
        kept = stored.nonzero().squeeze(1)
        sequence, slot = place[kept] // time, self.past + place[kept] % time
        read = ledger.write(sequence, slot, lanes, self.iteration)
        plan = RowPlan(read=read, stored=kept, place=torch.searchsorted(lanes, sequence) * ledger.slots + slot)
        key = Places(*ledger.places(lanes), present=read >= 0)  # a ledger never holds packed documents
        holding = {"stores": ledger.snapshot(), "plan": plan}
        own = torch.searchsorted(lanes, place // time)
        reading = self._read_lane(x, place, sequence=own, key=key, view=RowView, holding=holding)
        ledger.append(reading.rows)
        return reading

    def _read_lanes(self, x: Tensor, lanes: Tensor, when: Tensor, stored: Tensor) -> Reading:
        tokens, ledger = self.tokens, self.ledger
        at = (lanes[:, None], when)
        lane = torch.arange(len(lanes), device=x.device)[:, None].expand_as(when)[stored]
        slot = self.past + when[stored]
        read = ledger.write(lanes[lane], slot, lanes, self.iteration)
        # The first pass over an empty ledger and unpadded lanes reads just what it computes.
        fresh = self.iteration == 0 and self.past == 0 and when.shape[1] == ledger.slots
        kept = stored.flatten().nonzero().squeeze(1)
        plan = RowPlan(read=read, stored=kept, place=lane * ledger.slots + slot, fresh=fresh)
        mask = None
        if not fresh or tokens.document is not None:
            document = tokens.document
            key_document, query_document = (None, None) if document is None else (document[lanes], document[at])
            key = Places(*ledger.places(lanes), document=key_document, present=read >= 0)
            query = Places(tokens.slot[at], tokens.order[at], query_document)
            mask = self.backbone.mask(query, key, x.dtype)
        reading = self.backbone.read(
            x,
            position=tokens.position[at],
            mask=mask,
            view=RowView,
            holding={"stores": ledger.snapshot(), "plan": plan},
            replay=self.replay,
            stream=self.stream,
        )
        ledger.append(reading.rows)
        return reading
