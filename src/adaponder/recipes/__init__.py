"""Reads recipes: a recipe is one complete training run as data, in a YAML file of this package or of the user."""

from adaponder.recipes.reading import base_of, load_recipe, recipe_names, stated_in
from adaponder.recipes.schema import FREE_TRAIN, DataRecipe, ModelRecipe, Recipe, TrainRecipe

__all__ = [
    "FREE_TRAIN",
    "DataRecipe",
    "ModelRecipe",
    "Recipe",
    "TrainRecipe",
    "base_of",
    "load_recipe",
    "recipe_names",
    "stated_in",
]
