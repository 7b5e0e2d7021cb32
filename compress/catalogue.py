"""What there is: names that recipes and options may use, with a line about each."""

import inspect
from typing import Any

from compress.recipe import AwqStep, GptqStep, RtnStep
from formats.arch import ARCHITECTURES
from formats.containers import CONTAINERS
from formats.grids import GRIDS
from formats.registry import Registry


def catalogue(what: str) -> list[tuple[str, str]]:
    """(name, about) of all recipes, algorithms, grids, containers or architectures."""
    if what == "recipes":
        from compress.recipe_file import load_recipe, shipped

        return [(name, load_recipe(name).description) for name in shipped()]
    if what == "algorithms":
        return [(name, _first_line(step)) for name, step in (("rtn", RtnStep), ("gptq", GptqStep), ("awq", AwqStep))]
    if what == "grids":
        named = [(name, f"{GRIDS[name].bits_per_weight(4096):.4g} bits per weight") for name in GRIDS]
        return [*named, ("int4-g64, int8-channel-sym, ..", "2-8 bits, any group size or per channel, -sym or not")]
    if what == "containers":
        return describe(CONTAINERS)
    return [(name, ", ".join(ARCHITECTURES[name].model_types)) for name in ARCHITECTURES]


def describe(registry: Registry) -> list[tuple[str, str]]:
    """(name, first line of the docstring) of everything registered."""
    return [(name, _first_line(registry[name])) for name in registry]


def _first_line(thing: Any) -> str:
    return (inspect.getdoc(thing) or "").split("\n")[0]
