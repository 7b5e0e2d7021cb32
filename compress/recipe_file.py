"""Reading recipe files: YAML with positions, so that every mistake is reported at once as file:line:column."""

import importlib.resources
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from compress import recipe as model
from compress.recipe import Recipe, problems_between
from formats.errors import UsageError
from formats.registry import did_you_mean

Loc = tuple[str | int, ...]

_MODELS: dict[str, type[BaseModel]] = {  # what a key or a discriminator's value leads to: for did-you-mean
    "calibration": model.CalibrationSpec,
    "rtn": model.RtnStep,
    "gptq": model.GptqStep,
    "awq": model.AwqStep,
    "affine": model.AffineSpec,
    "allocate": model.AllocateSpec,
    "overrides": model.Override,
    "output": model.OutputSpec,
    "evaluate": model.EvaluateSpec,
    "perplexity": model.PerplexitySpec,
    "gate": model.GateSpec,
}


class _Loader(yaml.SafeLoader):
    """SafeLoader that also reads 1e-2 as a number, as YAML 1.2 does."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


@dataclass
class _Document:
    """Plain data, where each value and key of it stood, and what was wrong with the YAML itself."""

    name: str
    data: dict[str, Any] = field(default_factory=dict)
    places: dict[Loc, str] = field(default_factory=dict)
    keys: dict[Loc, str] = field(default_factory=dict)
    problems: list[tuple[str, str]] = field(default_factory=list)

    def place(self, loc: Loc, key: bool = False) -> str:
        """Where loc stands; parts that are not in the file (discriminator tags, missing keys) are passed over."""
        if not self.places:
            return self.name
        at: Loc = ()
        for part in loc:
            at = (*at, part) if (*at, part) in self.places else at
        return self.keys.get(at, self.places[at]) if key else self.places[at]

    def read(self, node: yaml.Node, loc: Loc, loader: _Loader, seen: set[int]) -> Any:
        where = f"{self.name}:{node.start_mark.line + 1}:{node.start_mark.column + 1}"
        self.places[loc] = where
        if id(node) in seen:
            self.problems.append((where, "anchors are not supported; write the value out"))
            return None
        seen.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            return [self.read(child, (*loc, i), loader, seen) for i, child in enumerate(node.value)]
        if not isinstance(node, yaml.MappingNode):
            try:
                return loader.construct_object(node)
            except (yaml.constructor.ConstructorError, ValueError) as error:
                self.problems.append((where, f'cannot read "{node.value}": {error}'))
                return None
        values: dict[str, Any] = {}
        for key_node, child in node.value:
            key = str(key_node.value)
            at = f"{self.name}:{key_node.start_mark.line + 1}:{key_node.start_mark.column + 1}"
            if key in values:
                self.problems.append((at, f'duplicate key "{key}" (first at {self.keys[(*loc, key)]})'))
                continue
            self.keys[(*loc, key)] = at
            values[key] = self.read(child, (*loc, key), loader, seen)
        return values


def _parse(text: str, name: str) -> _Document:
    document = _Document(name)
    loader = _Loader(text)
    try:
        root = loader.get_single_node()
        if not isinstance(root, yaml.MappingNode):
            raise UsageError(
                "a recipe is a mapping of keys to values", where=name, how_to_fix="start with `version: 1`"
            )
        document.data = document.read(root, (), loader, set())
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        at = f"{name}:{mark.line + 1}:{mark.column + 1}" if mark else name
        raise UsageError(f"not valid YAML: {error.problem}", where=at) from error
    except yaml.YAMLError as error:
        raise UsageError(f"not valid YAML: {error}", where=name) from error
    finally:
        loader.dispose()
    return document


SHIPPED = Path(str(importlib.resources.files("recipes")))
MEASURED = SHIPPED / "measured.json"  # what each shipped recipe cost a small model: tests/bench/shipped.py


def shipped() -> dict[str, Path]:
    """Recipes that come with the package, by name."""
    return {path.stem: path for path in sorted(SHIPPED.glob("*.yaml"))}


def find_recipe(name: str) -> Path:
    """The file of a path or of a shipped recipe's name."""
    path = Path(name)
    if path.is_file():
        return path
    known = shipped()
    if name in known:
        return known[name]
    if path.suffix in (".yaml", ".yml") or len(path.parts) > 1:
        raise UsageError("no such recipe file", where=name, how_to_fix="`quantize list recipes` names the shipped ones")
    raise UsageError(f'no recipe file or shipped recipe called "{name}"', how_to_fix=did_you_mean(name, known))


def _assign(document: _Document, setting: str, overridden: set[Loc]) -> None:
    """Carry out one "steps.0.bits=3". Width, group and symmetry of a step reach into its grid."""
    dotted, equals, text = setting.partition("=")
    if not equals or not dotted:
        raise UsageError(f'cannot read "{setting}"', where="--set", how_to_fix="write --set steps.0.bits=3")
    loc: Loc = tuple(int(part) if part.isdigit() else part for part in dotted.split("."))
    where = f"--set {setting}"
    target: Any = document.data
    if len(loc) == 3 and loc[0] == "steps" and loc[2] in model.AffineSpec.model_fields:
        loc = (*loc[:2], "grid", loc[2])
    for depth, part in enumerate(loc[:-1]):
        if isinstance(target, dict):
            child = target.get(str(part))
            if part == "grid" and isinstance(child, str):
                child = _spelled_out(child, where)
            target[str(part)] = {} if child is None else child
            target = target[str(part)]
        elif isinstance(target, list) and isinstance(part, int) and part < len(target):
            target = target[part]
        else:
            raise UsageError(f'nothing at "{".".join(map(str, loc[: depth + 1]))}" to set', where=where)
    value = _parse(f"value: {text}", where).data["value"] if text else None
    if isinstance(target, list) and isinstance(loc[-1], int) and loc[-1] <= len(target):
        target[loc[-1] : loc[-1] + 1] = [value]
    elif isinstance(target, dict):
        target[str(loc[-1])] = value
    else:
        raise UsageError(f'"{dotted}" cannot be set', where=where)
    for depth in range(len(loc)):
        document.places.setdefault(loc[: depth + 1], where)
    document.places[loc] = document.keys[loc] = where
    overridden.add(loc)


def _spelled_out(grid: str, where: str) -> dict[str, Any]:
    match = re.fullmatch(r"int(\d)-(?:g(\d+)|channel)(-sym)?", grid)
    if not match:
        raise UsageError(
            f"{grid} has no bits, group_size or symmetric of its own", where, "set the step's grid instead"
        )
    return {"bits": int(match[1]), "group_size": int(match[2] or -1), "symmetric": match[3] is not None}


def _message(error: Any) -> str:
    """One of pydantic's errors in our words, with a did-you-mean where a name is wrong."""
    kind, loc, context = error["type"], error["loc"], error.get("ctx", {})
    if kind == "extra_forbidden":
        owner = next((_MODELS[part] for part in reversed(loc[:-1]) if part in _MODELS), Recipe)
        return f'unknown key "{loc[-1]}"; {did_you_mean(str(loc[-1]), owner.model_fields)}'
    if kind == "missing":
        return f'missing key "{loc[-1]}"'
    if kind == "union_tag_invalid":
        known = re.findall(r"'([^']+)'", context["expected_tags"])
        return f'unknown algorithm "{context["tag"]}"; {did_you_mean(context["tag"], known)}'
    if kind == "union_tag_not_found":
        return 'a step is a mapping with an "algorithm"'
    path = ".".join(str(part) for part in loc if part not in ("affine", "name", "rtn", "gptq", "awq"))
    if kind == "value_error":
        return f"{path}: {context['error']}"
    if kind in ("model_type", "model_attributes_type"):
        return f"{path}: should be a mapping of keys to values"
    given = f", got {error['input']!r}" if isinstance(error["input"], str | int | float | None) else ""
    return f"{path}: {error['msg'].removeprefix('Input ')}{given}"


def _check(document: _Document) -> Recipe:
    problems = list(document.problems)
    recipe = None
    try:
        recipe = Recipe.model_validate(document.data)
    except ValidationError as failure:
        for error in failure.errors():
            problems.append((document.place(error["loc"], key=error["type"] == "extra_forbidden"), _message(error)))
    problems += [(document.place(loc), message) for loc, message in problems_between(document.data)]
    if problems or recipe is None:
        raise UsageError("\n".join(f"{where}: {message}" for where, message in sorted(problems, key=_position)))
    return recipe


def _position(problem: tuple[str, str]) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r":(\d+)", problem[0])[-2:])


def _resolve(data: Any, overridden: set[Loc], folder: Path) -> None:
    """Make relative paths of existing files absolute: from the recipe's folder, or from here when set by --set."""

    def absolute(value: Any, loc: Loc) -> Any:
        path = (Path() if loc in overridden else folder) / Path(str(value)).expanduser()
        return str(path.resolve()) if isinstance(value, str) and path.exists() else value

    if "model" in data:
        data["model"] = absolute(data["model"], ("model",))
    locs: list[Loc] = [("calibration", "data"), ("evaluate", "perplexity", "data"), ("allocate", "measurement")]
    steps = data.get("steps")
    locs += [("steps", i, "imatrix") for i in range(len(steps) if isinstance(steps, list) else 0)]
    for loc in locs:
        section: Any = data
        for part in loc[:-1]:
            if isinstance(section, list) and isinstance(part, int):
                section = section[part]
            else:
                section = section.get(part) if isinstance(section, dict) else None
        key = loc[-1]
        if isinstance(section, dict) and key in section:
            value = section[key]
            section[key] = [absolute(v, loc) for v in value] if isinstance(value, list) else absolute(value, loc)


def load_recipe(name: str, settings: Sequence[str] = ()) -> Recipe:
    """A checked recipe from a file or a shipped name, after `--set` overrides. One UsageError names all mistakes."""
    path = find_recipe(name)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the recipe: {error}", where=str(path)) from error
    document = _parse(text, str(path))
    overridden: set[Loc] = set()
    for setting in settings:
        _assign(document, setting, overridden)
    _resolve(document.data, overridden, path.parent)
    return _check(document)


def dump_recipe(recipe: Recipe) -> str:
    """The resolved recipe as YAML; loading it again gives an equal recipe."""
    return yaml.safe_dump(recipe.model_dump(exclude_none=True), sort_keys=False, allow_unicode=True)
