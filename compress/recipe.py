"""Recipes: what to do to a model, as a checked document. Reading the YAML itself is `compress.recipe_file`'s job.

A grid is written by name ("q4_k", "int4-g64") or as {bits, group_size, symmetric}; once checked it is always a name.
"""

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, model_validator

from formats.containers import CONTAINERS
from formats.registry import did_you_mean

Target = Literal["vllm", "sglang", "transformers", "llama.cpp"]
FloatType = Literal["float32", "bfloat16", "float16"]
_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


class Strict(BaseModel):
    """No unknown keys, no silent conversions, no changes after checking."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


def parse_size(value: Any) -> Any:
    """Bytes from 90000000, "90MB", "1.5 GiB"; anything else is left for pydantic to refuse."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"([\d.]+)\s*([a-z]*)", value.strip().lower())
    if not match or match[2] not in _UNITS or match[1].count(".") > 1 or match[1] == ".":
        raise ValueError(f'"{value}" is not a size; write 90000000, 90MB or 1.5GiB')
    return round(float(match[1]) * _UNITS[match[2]])


def _known_grid(name: str) -> str:
    from formats.errors import UsageError
    from formats.grids import parse_grid

    try:
        return parse_grid(name).name
    except UsageError as error:
        raise ValueError(f"{error.what}; {error.how_to_fix}") from error


def _known_container(name: str) -> str:
    if name not in CONTAINERS:
        raise ValueError(f'unknown output format "{name}"; {did_you_mean(name, CONTAINERS)}')
    return name


class AffineSpec(Strict):
    """An affine grid spelled out; group_size -1 or "channel" means one scale per output channel."""

    bits: int = Field(ge=2, le=8)
    group_size: Annotated[int, BeforeValidator(lambda v: -1 if v == "channel" else v)] = 128
    symmetric: bool = False

    @model_validator(mode="after")
    def _positive(self) -> "AffineSpec":
        if self.group_size < 1 and self.group_size != -1:
            raise ValueError('group_size must be positive, or -1 or "channel" for one scale per output channel')
        return self

    def grid_name(self) -> str:
        group = "channel" if self.group_size == -1 else f"g{self.group_size}"
        return f"int{self.bits}-{group}{'-sym' if self.symmetric else ''}"


if TYPE_CHECKING:
    GridName = str
else:  # read as a name or a mapping, kept as a name
    GridName = Annotated[
        Annotated[str, AfterValidator(_known_grid), Tag("name")] | Annotated[AffineSpec, Tag("affine")],
        Discriminator(lambda value: "affine" if isinstance(value, dict) else "name"),
        AfterValidator(lambda value: value if isinstance(value, str) else value.grid_name()),
    ]
Size = Annotated[int, BeforeValidator(parse_size), Field(gt=0)]
Sources = Annotated[list[str], BeforeValidator(lambda v: [v] if isinstance(v, str) else v), Field(min_length=1)]


class CalibrationSpec(Strict):
    """Where calibration text comes from. Without `data` the model writes its own, by seeded sampling.

    data  files (.txt .jsonl .parquet) or `datasets` names ("allenai/c4:en"); column and split apply where they exist
    samples, length  rows and tokens per row; seed: the recipe's unless given
    chat_template    render rows with `messages` by the model's template, else join their contents
    """

    data: Sources | None = None
    samples: int = Field(default=128, gt=0)
    length: int = Field(default=512, ge=2)
    seed: int | None = None
    split: str = "train"
    column: str = "text"
    chat_template: bool = True


class RtnStep(Strict):
    """Round to nearest: fast, needs no text; with importance, one calibration pass.

    importance: weigh each column's fit by its mean squared input. imatrix: take those from a GGUF file that
    llama-imatrix or an earlier run (OUT/calibration/imatrix.gguf) made, instead of calibrating.
    """

    algorithm: Literal["rtn"]
    grid: GridName | None = None
    importance: bool = False
    imatrix: str | None = None

    @model_validator(mode="after")
    def _imatrix_is_importance(self) -> "RtnStep":
        if self.imatrix is not None and not self.importance:
            raise ValueError("imatrix needs importance: true")
        return self

    @property
    def needs_text(self) -> bool:
        return self.importance and self.imatrix is None


class GptqStep(Strict):
    """GPTQ: column by column, each rounding error made up for by the columns after it.

    damp: fraction of its diagonal added to the Hessian.
    act_order stores the permutation (g_idx), where the container can; without it groups are static and only the
    processing order follows the Hessian's diagonal.
    """

    algorithm: Literal["gptq"]
    grid: GridName | None = None
    damp: float = Field(default=0.03, gt=0, lt=10)
    act_order: bool = False
    needs_text: ClassVar[bool] = True


class AwqStep(Strict):
    """AWQ: channels that matter scaled up, the scales folded into the previous operator; then clipping.

    Without a grid it only prepares for the step that follows, and for its grid.
    points: size of the scale search grid; clip: search clipping too.
    """

    algorithm: Literal["awq"]
    grid: GridName | None = None
    points: int = Field(default=20, ge=1, le=200)
    clip: bool = True
    needs_text: ClassVar[bool] = True


Step = Annotated[RtnStep | GptqStep | AwqStep, Field(discriminator="algorithm")]
PREPARING = ("awq",)  # algorithms that may stand before another step


class AllocateSpec(Strict):
    """A grid per tensor, so that the file meets target_bpw (bits per weight, embeddings included) or target_size.

    measurement: the sensitivity.json of an earlier output of the same model, to choose from without measuring again.
    """

    target_bpw: float | None = Field(default=None, gt=0)
    target_size: Size | None = None
    candidates: list[GridName] = Field(min_length=1)
    measurement: str | None = None

    @model_validator(mode="after")
    def _one_target(self) -> "AllocateSpec":
        if (self.target_bpw is None) == (self.target_size is None):
            raise ValueError("give exactly one of target_bpw and target_size")
        return self


class Override(Strict):
    """Another grid, another width of the step's grid, or none at all for the modules that match.

    match: shell pattern on Hugging Face module names ("*.down_proj", "lm_head", "model.embed_tokens").
    """

    match: str
    grid: GridName | None = None
    bits: int | None = Field(default=None, ge=2, le=8)
    skip: bool = False

    @model_validator(mode="after")
    def _one_action(self) -> "Override":
        if (self.grid is not None) + (self.bits is not None) + self.skip != 1:
            raise ValueError("give exactly one of grid, bits and skip: true")
        return self


class OutputSpec(Strict):
    """The container. dtype: of the tensors that stay float (the source's unless given); target: engine to satisfy;
    activations: int8 for W8A8 with dynamic activations."""

    format: Annotated[str, AfterValidator(_known_container)]
    dtype: FloatType | None = None
    shard_size: Size = 5_000_000_000
    target: Target | None = None
    activations: Literal["int8"] | None = None


class PerplexitySpec(Strict):
    """A held-out plain text file, cut into `chunks` windows of `length` tokens."""

    data: str
    length: int = Field(default=512, ge=4)
    chunks: int = Field(default=20, gt=0)


class GateSpec(Strict):
    """Limits that decide the exit code: KL divergence (nats per token), perplexity over the source's."""

    max_kld: float | None = Field(default=None, ge=0)
    max_ppl_ratio: float | None = Field(default=None, gt=0)


class EvaluateSpec(Strict):
    perplexity: PerplexitySpec
    gate: GateSpec = GateSpec()


class Recipe(Strict):
    """One compression, whole. `steps` run in order; the last one chooses the codes."""

    version: Literal[1]
    description: str = ""
    model: str | None = None
    seed: int = 0
    calibration: CalibrationSpec = CalibrationSpec()
    steps: list[Step] = Field(min_length=1)
    allocate: AllocateSpec | None = None
    overrides: list[Override] = []
    output: OutputSpec
    evaluate: EvaluateSpec | None = None

    @property
    def grid(self) -> str | None:
        """The grid of the last step: what a tensor gets unless an override or the allocation says otherwise."""
        return self.steps[-1].grid

    @property
    def needs_text(self) -> bool:
        return self.allocate is not None or any(step.needs_text for step in self.steps)

    @property
    def calibration_seed(self) -> int:
        return self.seed if self.calibration.seed is None else self.calibration.seed

    def override(self, module: str) -> Override | None:
        """The first override that matches a module name."""
        return next((o for o in self.overrides if fnmatchcase(module, o.match)), None)


def with_bits(grid: str, bits: int) -> str:
    """The same kind of grid at another width: int4-g64 -> int3-g64, q4_k -> q3_k. UsageError if there is none."""
    from formats.grids import parse_grid

    return parse_grid(re.sub(r"^(int|i?q)\d", rf"\g<1>{bits}", grid)).name


def problems_between(data: dict[str, Any]) -> Iterable[tuple[tuple[str | int, ...], str]]:
    """(path, message) of mistakes that only show between the fields of a raw recipe."""
    steps = data.get("steps")
    if not isinstance(steps, list):
        return
    for i, step in enumerate(steps):
        if not isinstance(step, dict):
            continue
        last, preparing = i == len(steps) - 1, step.get("algorithm") in PREPARING
        if step.get("grid") is None and data.get("allocate") is None and (last or not preparing):
            yield ("steps", i), "this step needs a grid (or give the recipe an `allocate` section)"
        if not last and not preparing and isinstance(step.get("algorithm"), str):
            yield ("steps", i), f"only {', '.join(PREPARING)} may stand before another step"
