"""Recipes: one complete training run as data, in YAML files that ship in the folders here or are a user's own."""

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
