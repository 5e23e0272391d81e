"""What a user might not expect of a recipe on this machine and this data, said before the first step."""

from __future__ import annotations

from adaponder.data import Shards
from adaponder.devices import product_dtype
from adaponder.methods import method_class
from adaponder.recipes import Recipe, TrainRecipe
from adaponder.terminal import console, line
from adaponder.training.distributed import World


def remark(recipe: Recipe, shards: Shards, validation: Shards, world: World) -> None:
    """Prints a line for each such thing."""
    _remark_on_training(recipe.train, world, pressed=method_class(recipe.model.method).has_ponder_term)
    _remark_on_data(recipe, shards, validation)


def _remark_on_training(train: TrainRecipe, world: World, *, pressed: bool) -> None:
    """``pressed``: whether the method's loss has a ponder term."""
    computed_in = str(product_dtype(train.dtype, world.device)).removeprefix("torch.")
    if computed_in != train.dtype:
        console.print(f"train.dtype={train.dtype} is for GPUs: on this CPU the run computes in {computed_in}")
    gates_begin = train.gates_begin(pressed=pressed)
    if pressed and train.ponder_weight and gates_begin > train.ponder_start:
        console.print(
            line(
                (f"train.gate_start={train.gate_start} lies after ponder_start={train.ponder_start}:", "yellow"),
                " until then the ponder loss presses on gates that do not move",
            ),
            soft_wrap=True,
        )
    elif gates_begin >= train.steps:
        console.print(
            line(
                (f"gates would begin to learn at step {gates_begin:,}, after train.steps={train.steps}:", "yellow"),
                " they stay as they began (train.gate_start)",
            ),
            soft_wrap=True,
        )
    elif gates_begin:
        console.print(f"gates begin to learn at step {gates_begin:,} (train.gate_start)")
    if pressed and train.ponder_weight and train.ponder_start >= train.steps:
        console.print(
            line(
                (
                    f"train.ponder_start={train.ponder_start} is not before the end, train.steps={train.steps}:",
                    "yellow",
                ),
                " nothing will press on the gates",
            ),
            soft_wrap=True,
        )


def _remark_on_data(recipe: Recipe, shards: Shards, validation: Shards) -> None:
    if validation.tokens <= recipe.data.sequence:
        console.print(
            line(
                ("there will be no validation loss:", "yellow"),
                f" {shards.folder} has {validation.tokens:,} tokens for it, data.sequence={recipe.data.sequence} needs "
                "more; prepare more documents, or a larger share of them",
            ),
            soft_wrap=True,
        )
    prepared = shards.manifest.fingerprint
    stated = {"tokenizer": recipe.data.tokenizer, "validation": recipe.data.validation}
    differing = [f"{name} {prepared[name]}" for name, value in stated.items() if prepared.get(name, value) != value]
    if differing:
        message = f"{shards.folder} was prepared with {' and '.join(differing)}: that holds, not the recipe's"
        console.print(message, soft_wrap=True)
