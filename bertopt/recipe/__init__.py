"""Recipes: YAML, or a dict of the same layout, to a checked `Recipe`."""

from bertopt.recipe.parser import Recipe, Step, from_dict, load, parse

__all__ = ["Recipe", "Step", "from_dict", "load", "parse"]
