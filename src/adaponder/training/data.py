"""Prepares and opens a recipe's data, and draws the windows of each micro-step and process."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor

from adaponder.checkpoints.loading import fetch
from adaponder.data import Batch, Sampler, Shards
from adaponder.data.manifest import MANIFEST
from adaponder.data.prepare import prepare
from adaponder.data.tokenizers import read_tokenizer, tokenizer_hash
from adaponder.errors import ConfigError, InputError, TrainingError
from adaponder.policies import sequence_seeds
from adaponder.recipes import Recipe
from adaponder.terminal import console, line
from adaponder.training.distributed import World, local_share


def open_data(recipe: Recipe, data: Path, world: World) -> tuple[Shards, Shards]:
    """Opens the recipe's training and validation tokens; each process of a machine verifies a share of the files."""
    folder = shards_folder(recipe, data, world)
    share = local_share()
    return Shards.open(folder, "train", share=share), Shards.open(folder, "validation", share=share)


def shards_folder(recipe: Recipe, data: Path, world: World) -> Path:
    """Returns the folder with the recipe's prepared data; prepares a text source once, in a folder under ``data``."""
    source = Path(recipe.data.source)
    if os.path.isfile(source / MANIFEST):
        return source
    folder = data / f"{source.name}-{recipe.data.tokenizer.replace(':', '-').replace('/', '-')}"
    if world.leads:
        try:
            manifest = prepare(
                [recipe.data.source],
                out=folder,
                tokenizer=recipe.data.tokenizer,
                validation=recipe.data.validation,
                workers=min(8, os.cpu_count() or 1),
            )
        except InputError as error:
            # In this error, --out is the data folder, but the user's --out is the run folder.
            message = str(error).replace(f"--out {folder}", str(folder))
            raise InputError(f"data.source={recipe.data.source}: {message}") from None
        for remark in manifest.remarks():
            console.print(line((f"{folder}:", "yellow"), f" {remark}"), soft_wrap=True)
    world.wait()
    return folder


def require_own_tokenizer(recipe: Recipe, shards: Shards) -> None:
    """Raises unless the data was tokenized with the tokenizer of the checkpoint to train from."""
    name = recipe.model.backbone
    if isinstance(name, str) and os.path.isfile(path := fetch(name) / "tokenizer.json"):
        shards.require_tokenizer(tokenizer_hash(read_tokenizer(path)), name)


def sampler_of(recipe: Recipe, shards: Shards) -> Sampler:
    train = recipe.train
    return Sampler(shards, sequence=recipe.data.sequence, global_batch=train.global_batch, seed=train.seed)


def model_inputs(batch: Batch, *, across: bool) -> dict[str, Tensor]:
    """Returns a batch as tensor arguments of ``forward``; a target that does not count in the loss is -100.

    ``across``: whether tokens attend to earlier documents of their window. If not, the first token of a document does
    not count as a target.
    """
    tokens, documents = torch.from_numpy(batch.tokens), torch.from_numpy(batch.documents)
    inputs = {"input_ids": tokens[:, :-1], "targets": tokens[:, 1:].clone()}
    if batch.learned is not None:
        inputs["targets"][~torch.from_numpy(batch.learned)[:, 1:]] = -100
    if not across:
        # The first token of a document cannot be predicted from the document before it.
        inputs["targets"][documents[:, 1:] != documents[:, :-1]] = -100
        inputs["document_ids"] = documents[:, :-1]
    return inputs


class MicroBatches:
    """Draws one process's share of a step's ``global_batch``: ``count`` micro-batches of ``size`` windows."""

    def __init__(self, recipe: Recipe, sampler: Sampler, world: World):
        self.recipe, self.sampler, self.world = recipe, sampler, world
        share, remainder = divmod(recipe.train.global_batch, world.size)
        if remainder:
            raise ConfigError(
                f"train.global_batch={recipe.train.global_batch} must be divisible by {world.size} processes"
            )
        self.size = min(recipe.train.micro_batch or share, share)
        if share % self.size:
            raise TrainingError(f"train.micro_batch={self.size} must divide the {share} windows of a process in a step")
        self.count = share // self.size

    def draw(self, step: int) -> list[Batch]:
        """Returns this process's windows, one batch per micro-step.

        The windows of all processes in one micro-step are consecutive windows of the step.
        """
        first = [(index * self.world.size + self.world.rank) * self.size for index in range(self.count)]
        return [self.sampler.part(step, window, self.size) for window in first]

    def inputs(self, step: int) -> list[dict[str, Tensor]]:
        """Returns ``forward``'s arguments per micro-step; a window's seed does not depend on micro-batch sizes."""
        arguments = []
        for batch in self.draw(step):
            seeds = sequence_seeds(self.recipe.train.seed, (step << 32) + torch.from_numpy(batch.windows))
            arguments.append(model_inputs(batch, across=self.recipe.data.attend_across_documents) | {"seed": seeds})
        return arguments

    def mean_targets(self, inputs: list[dict[str, Tensor]]) -> Tensor:
        """Returns the mean number of targets per forward of the step; each forward divides its summed loss by it.

        The mean of these losses over micro-steps and processes is then the mean over all targets of the step.
        """
        local = sum(int((arguments["targets"] != -100).sum()) for arguments in inputs)
        # Creating the tensor on the device would make the host wait.
        total = self.world.sum(torch.tensor(local).to(self.world.device, non_blocking=True))
        return total.clamp_min(1).double() / (self.world.size * self.count)
