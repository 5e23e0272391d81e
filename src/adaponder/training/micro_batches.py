"""Which windows a process trains on in each micro-step, and what a forward reads of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from adaponder.data import Batch, Sampler
from adaponder.errors import TrainingError
from adaponder.policies import sequence_seeds
from adaponder.recipes import Recipe
from adaponder.training.distributed import World


@dataclass(frozen=True)
class MicroBatches:
    """The micro-batches of one process.

    Attributes:
        size: windows of one micro-batch.
        count: micro-batches of a step.
        attend_across_documents: see :class:`adaponder.recipes.DataRecipe`.
        seed: of policies that draw.
    """

    sampler: Sampler
    world: World
    size: int
    count: int
    attend_across_documents: bool
    seed: int

    @classmethod
    def of(cls, recipe: Recipe, sampler: Sampler, world: World) -> MicroBatches:
        """As the recipe's ``global_batch`` and ``micro_batch`` say; each process must get whole micro-batches."""
        share = world.share(recipe.train.global_batch, "train.global_batch")
        size = min(recipe.train.micro_batch or share, share)
        if share % size:
            raise TrainingError(f"train.micro_batch={size} does not divide a process's {share} windows of a step")
        across = recipe.data.attend_across_documents
        return cls(sampler, world, size, share // size, across, recipe.train.seed)

    def draw(self, step: int) -> list[Batch]:
        """This process's windows of every micro-step.

        The windows of a micro-step, over all processes, follow each other in the step's batch: they are those that one
        process with as many windows at once would take.
        """
        first = [(index * self.world.size + self.world.rank) * self.size for index in range(self.count)]
        return [self.sampler.part(step, window, self.size) for window in first]

    def inputs(self, step: int) -> list[dict[str, Tensor]]:
        """The model's tensor arguments in every micro-step.

        A window has another seed at each step, whichever micro-batch it is in.
        """
        return [self._inputs_of(batch) | {"seed": self._seeds(step, batch)} for batch in self.draw(step)]

    def _seeds(self, step: int, batch: Batch) -> Tensor:
        return sequence_seeds(self.seed, (step << 32) + torch.from_numpy(batch.windows))

    def _inputs_of(self, batch: Batch) -> dict[str, Tensor]:
        tokens, documents = torch.from_numpy(batch.tokens), torch.from_numpy(batch.documents)
        inputs = {"input_ids": tokens[:, :-1], "targets": tokens[:, 1:].clone()}
        if batch.learned is not None:
            inputs["targets"][~torch.from_numpy(batch.learned)[:, 1:]] = -100
        if not self.attend_across_documents:
            # The first token of the next document cannot be predicted from this one: it is no target.
            inputs["targets"][documents[:, 1:] != documents[:, :-1]] = -100
            inputs["document_ids"] = documents[:, :-1]
        return inputs

    def mean_targets(self, inputs: list[dict[str, Tensor]]) -> Tensor:
        """Targets of the step divided by its forwards, in double: what each forward divides its cross-entropy by.

        Losses averaged over micro-steps and processes are then the mean over all targets of the step.
        """
        mine = sum(int((each["targets"] != -100).sum()) for each in inputs)
        everyone = self.world.sum(torch.tensor(mine, device=self.world.device))
        return everyone.clamp_min(1).double() / (self.world.size * self.count)
