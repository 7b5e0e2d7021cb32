"""What there is: names that recipes and options may use, with what is known about each."""

import inspect
import json
from collections.abc import Sequence
from typing import Any

from compress.recipe import AwqStep, GptqStep, RtnStep
from compress.recipe_file import MEASURED, load_recipe, shipped
from formats.arch import ARCHITECTURES
from formats.containers import CONTAINERS
from formats.grids import GRIDS
from formats.registry import Registry


def catalogue(what: str) -> list[dict[str, Any]]:
    """`name` and `about` of all recipes (those also `measured`), algorithms, grids, containers or architectures."""
    if what == "recipes":
        known = measured()["recipes"]
        return [
            {"name": name, "about": load_recipe(name).description, "measured": known.get(name)} for name in shipped()
        ]
    if what == "algorithms":
        return [_entry(name, step) for name, step in (("rtn", RtnStep), ("gptq", GptqStep), ("awq", AwqStep))]
    if what == "grids":
        named = {name: f"{GRIDS[name].bits_per_weight(4096):.4g} bits per weight" for name in GRIDS}
        named["int4-g64, int8-channel-sym, .."] = "2-8 bits, any group size or per channel, -sym or not"
        return [{"name": name, "about": about} for name, about in named.items()]
    if what == "containers":
        return describe(CONTAINERS)
    return [{"name": name, "about": ", ".join(ARCHITECTURES[name].model_types)} for name in ARCHITECTURES]


def measured() -> dict[str, Any]:
    """What the shipped recipes cost a small model (tests/bench/shipped.py): `model calibration evaluation`, and in
    `recipes` name -> bytes, bits_per_weight, kld and the like, with the `settings` that this model needed."""
    table: dict[str, Any] = json.loads(MEASURED.read_text(encoding="utf-8"))
    return table


def recipe_rows(entries: list[dict[str, Any]]) -> tuple[Sequence[str], Sequence[Sequence[str]], str]:
    """Header, rows and a footnote about all recipes, for people."""
    table = measured()
    rows, notes = [], []
    for entry in entries:
        found = entry["measured"]
        figures = ("",) * 4
        if found is not None:
            size = (f"{found['bytes'] / 1e6:.1f}", f"{found['bits_per_weight']:.2f}")
            figures = (*size, f"{found['kld']:.4f}", f"{found['ppl'] / found['ref_ppl']:.3f}")
            if found["settings"]:
                notes.append(f"{entry['name']}: with --set {' --set '.join(found['settings'])}")
        rows.append((entry["name"], *figures, entry["about"]))
    about = f"Measured on {table['model']}: size, KL divergence (nats per token) and perplexity over the source's,"
    lines = [about, f"calibrated on {table['calibration']}, evaluated on {table['evaluation']}.", *notes]
    return ("recipe", "MB", "bits/weight", "KLD", "ppl ratio", "for"), rows, "\n".join(lines)


def describe(registry: Registry) -> list[dict[str, Any]]:
    """Everything registered, by the first line of its docstring."""
    return [_entry(name, registry[name]) for name in registry]


def _entry(name: str, thing: Any) -> dict[str, Any]:
    return {"name": name, "about": (inspect.getdoc(thing) or "").split("\n")[0]}
