"""The prepared data of a recipe: opened where it is there, prepared first where it is not."""

from __future__ import annotations

import os
from pathlib import Path

from adaponder.checkpoints.loading import fetch
from adaponder.data import Sampler, Shards
from adaponder.data.prepare import prepare
from adaponder.data.tokenizers import hash_of_file
from adaponder.errors import InputError
from adaponder.recipes import Recipe
from adaponder.terminal import console, line
from adaponder.training.distributed import World, local_share


def open_data(recipe: Recipe, data: Path, world: World) -> tuple[Shards, Shards]:
    """The recipe's training and validation tokens, prepared if need be; processes of a machine share the hashing."""
    folder = shards_folder(recipe, data, world)
    share = local_share()
    return Shards.open(folder, "train", share=share), Shards.open(folder, "validation", share=share)


def shards_folder(recipe: Recipe, data: Path, world: World) -> Path:
    """The prepared folder that the recipe names, or one prepared from what it names, once, under ``data``."""
    source = Path(recipe.data.source)
    if os.path.isfile(source / "manifest.json"):
        return source
    name = f"{source.name}-{recipe.data.tokenizer.replace(':', '-').replace('/', '-')}"
    folder = data / name
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
            # Its --out is not the one that the user typed, which is the run folder.
            elsewhere = (
                " (adaponder prepare --out DIR, then data.source=DIR)" if f"--out {folder}" in str(error) else ""
            )
            message = str(error).replace(f"--out {folder}", str(folder))
            raise InputError(f"data.source={recipe.data.source}: {message}{elsewhere}") from None
        for remark in manifest.remarks():
            console.print(line((f"{folder}:", "yellow"), f" {remark}"), soft_wrap=True)
    world.wait()
    return folder


def require_own_tokenizer(recipe: Recipe, shards: Shards) -> None:
    """Refuses ids that mean something else to the checkpoint that is trained on, where it has a ``tokenizer.json``."""
    name = recipe.model.backbone
    if isinstance(name, str) and os.path.isfile(path := fetch(name) / "tokenizer.json"):
        shards.require_tokenizer(hash_of_file(path), name)


def sampler_of(recipe: Recipe, shards: Shards) -> Sampler:
    """Draws the recipe's batches from ``shards``."""
    train = recipe.train
    return Sampler(shards, sequence=recipe.data.sequence, global_batch=train.global_batch, seed=train.seed)
