"""What each engine refuses, known before any work: rules checked against a plan of grids.

Each rule is a small function that yields the tensors it is broken by; `problems` words them. Sources: vLLM's
gptq_marlin, marlin_utils, compressed_tensors schemes and pull request 26092 (v2 zero points); SGLang's ports of them;
gptqmodel 7.6 kernels; transformers 5.24 with compressed-tensors 0.20.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from formats.arch import Arch
from formats.containers import CONTAINERS
from formats.errors import UsageError
from formats.grids.affine import AffineGrid
from formats.qtensor import Grid

READS = {
    "vllm": ("safetensors", "gptq", "awq", "compressed-tensors", "bitsandbytes", "gguf"),
    "sglang": ("safetensors", "gptq", "awq", "compressed-tensors", "bitsandbytes", "gguf"),
    "transformers": ("safetensors", "gptq", "awq", "compressed-tensors", "bitsandbytes", "gguf"),
    "llama.cpp": ("gguf",),
}
MARLIN_GROUPS = (None, 32, 64, 128)
GPTQMODEL_GROUPS = {"gptq": (None, 16, 32, 64, 128, 256, 512, 1024), "awq": (None, 16, 32, 64, 128)}
_ROW_PARALLEL = ("o_proj", "down_proj", "w2", "c_proj")  # split along in_features by tensor parallelism


def problems(
    target: str,
    container: str,
    grids: Mapping[str, Grid],
    arch: Arch,
    config: Mapping[str, Any],
    tensor_parallel: int = 1,
) -> list[str]:
    """Why `target` could not run this plan; empty when it can.

    grids: weight name -> grid, quantised tensors only. config: the Hugging Face config. Each message names its rule.
    """
    if target not in READS:
        raise UsageError(f'unknown target "{target}"', how_to_fix=f"one of {', '.join(READS)}")
    if container not in READS[target]:
        return [f"{target} container: reads {', '.join(READS[target])}, not {container}"]
    plan = _Plan(container, grids, arch, config, tensor_parallel)
    rules = [_storable]
    if target in ("vllm", "sglang"):
        rules += [_heads] + ([] if container in ("gguf", "safetensors") else [_fused, _experts, _packing, _kernels])
    if target == "transformers":
        rules += [_transformers_asymmetric, _gptqmodel_groups]
    return [f"{target} {rule.__name__.strip('_')}: {text}" for rule in rules for text in rule(plan)]


class _Plan:
    def __init__(
        self, container: str, grids: Mapping[str, Grid], arch: Arch, config: Mapping[str, Any], parallel: int
    ) -> None:
        self.container, self.grids, self.arch, self.config, self.parallel = container, grids, arch, config, parallel

    def affine(self) -> Iterator[tuple[str, AffineGrid]]:
        return ((name, grid) for name, grid in self.grids.items() if isinstance(grid, AffineGrid))

    def shape(self, name: str) -> tuple[int, int]:
        """[out, in] of a linear by its name, from the config's widths."""
        c, leaf = self.config, name.removesuffix(".weight").rpartition(".")[2]
        hidden = int(c.get("hidden_size") or c.get("n_embd") or 0)
        heads = int(c.get("num_attention_heads") or c.get("n_head") or 1)
        head = int(c.get("head_dim") or hidden // heads)
        inner = int(c.get("intermediate_size") or c.get("n_inner") or 4 * hidden)
        if ".experts." in name:
            inner = int(c.get("moe_intermediate_size") or inner)
        keys = int(c.get("num_key_value_heads") or heads) * head
        shapes = {
            "q_proj": (heads * head, hidden),
            "k_proj": (keys, hidden),
            "v_proj": (keys, hidden),
            "o_proj": (hidden, heads * head),
            "down_proj": (hidden, inner),
            "w2": (hidden, inner),
            "c_attn": (3 * hidden, hidden),
            "c_fc": (inner, hidden),
            "c_proj": (hidden, inner if ".mlp." in name else hidden),
            "lm_head": (int(c.get("vocab_size") or 0), hidden),
        }
        return shapes.get(leaf, (inner, hidden))

    def part(self, name: str) -> tuple[int, int]:
        """[out, in] of one device's share."""
        out, n = self.shape(name)
        rows = name.removesuffix(".weight").endswith(_ROW_PARALLEL)
        return (out, n // self.parallel) if rows else (out // self.parallel, n)

    def fused_part(self, name: str) -> tuple[int, int]:
        """[out, in] of one device's share of the matrix that a linear is fused into."""
        group = next((g for g in self.fused() if name in g), [name])
        return sum(self.part(member)[0] for member in group), self.part(name)[1]

    def fused(self) -> list[list[str]]:
        """Weight names, quantised or not, of every fused group that has a quantised member."""
        groups: dict[tuple[str, ...], list[str]] = {}
        for name in self.grids:
            for members in self.arch.fused:
                for member in members:
                    pattern = re.escape(member).replace(r"\{e\}", r"(?P<e>\d+)")
                    found = re.search(rf"\.{pattern}\.weight$", name)
                    if found:
                        expert = found.groupdict().get("e", "")
                        stem = name[: found.start()]
                        full = [f"{stem}.{m.replace('{e}', expert)}.weight" for m in members]
                        groups[tuple(full)] = full
        return list(groups.values())


def _some(names: Iterable[str]) -> str:
    names = [name.removesuffix(".weight") for name in names]
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def _by_grid(found: Iterable[tuple[str, Grid]]) -> Iterator[tuple[Grid, str]]:
    kinds: dict[Grid, list[str]] = defaultdict(list)
    for name, grid in found:
        kinds[grid].append(name)
    return ((grid, _some(names)) for grid, names in kinds.items())


def _storable(plan: _Plan) -> Iterator[str]:
    """The container's own rules."""
    store = CONTAINERS[plan.container]()
    seen: dict[str, list[str]] = defaultdict(list)
    for name, grid in plan.grids.items():
        try:
            store.substitute(name, plan.shape(name), grid)
        except UsageError as error:
            seen[error.what].append(name)
    kinds = {grid.name for grid in plan.grids.values()}
    if plan.container == "awq" and len(kinds) > 1:
        seen["AWQ stores one grid per model"].extend(plan.grids)
    if plan.container == "compressed-tensors" and plan.arch.conv1d:
        seen["compressed-tensors readers know no Conv1D"].extend(plan.grids)
    return (f"{what} ({_some(names)})" for what, names in seen.items())


def _heads(plan: _Plan) -> Iterator[str]:
    heads = int(plan.config.get("num_attention_heads") or plan.config.get("n_head") or 1)
    if heads % plan.parallel:
        yield f"{heads} attention heads are not divisible by tensor_parallel {plan.parallel}"


def _fused(plan: _Plan) -> Iterator[str]:
    for group in plan.fused():
        kinds = [str(plan.grids.get(name, "float")) for name in group]
        if len(set(kinds)) > 1:
            yield f"{', '.join(map(_leaf, group))} become one matrix and must share a grid, not {', '.join(kinds)}"


def _leaf(name: str) -> str:
    return name.removesuffix(".weight")


def _experts(plan: _Plan) -> Iterator[str]:
    """Experts run in one kernel per block: one grid, 4 or 8 bits, symmetric in compressed-tensors."""
    blocks: dict[str, dict[str, Grid]] = defaultdict(dict)
    for name, grid in plan.grids.items():
        block, experts, _ = name.partition(".experts.")
        if experts:
            blocks[block][name] = grid
    for block, grids in blocks.items():
        kinds = sorted({grid.name for grid in grids.values()})
        if len(kinds) > 1:
            yield f"the experts of {block} must share one grid, not {', '.join(kinds)}"
        affine = [(name, grid) for name, grid in grids.items() if isinstance(grid, AffineGrid)]
        for kind, names in _by_grid((n, g) for n, g in affine if g.bits not in (4, 8)):
            yield f"{kind} is for dense models only, experts need 4 or 8 bits ({names})"
        if plan.container == "compressed-tensors":
            for kind, names in _by_grid((n, g) for n, g in affine if not g.symmetric):
                yield f"{kind} has zero points, which compressed-tensors experts may not have ({names})"


def _packing(plan: _Plan) -> Iterator[str]:
    """Every device holds whole groups and whole words."""
    ragged, split = [], []
    for name, grid in plan.affine():
        out, n = plan.part(name)
        if grid.block and n % grid.block:
            ragged.append((name, grid))
        if out * grid.bits % 32:
            split.append((name, grid))
    for kind, names in _by_grid(ragged):
        yield f"in_features per device must be a multiple of the group size of {kind} ({names})"
    for kind, names in _by_grid(split):
        yield f"out_features per device do not fill 32-bit words in {kind} ({names})"


def _kernels(plan: _Plan) -> Iterator[str]:
    """Marlin runs symmetric 4 and 8 bits and, in AWQ and compressed-tensors, 4 bits with zero points; GPTQ falls back
    to a float16 kernel."""
    slow = [
        (name, grid)
        for name, grid in plan.affine()
        if plan.container == "gptq" and not (grid.symmetric and grid.bits in (4, 8) and grid.block in MARLIN_GROUPS)
    ]
    if plan.arch.extra.get("float16_overflows"):
        for grid, names in _by_grid(slow):
            yield f"{grid} runs in a float16 kernel, which {plan.arch.name} overflows ({names})"
    if plan.container == "gptq":
        return
    shaped = []
    for grid, names in _by_grid(plan.affine()):
        assert isinstance(grid, AffineGrid)
        if grid.block not in MARLIN_GROUPS:
            yield f"Marlin knows groups of 32, 64, 128 or whole rows, not {grid} ({names})"
        if plan.container == "compressed-tensors" and grid.bits == 8 and not grid.symmetric:
            yield f"no kernel for 8 bits with zero points, {grid} ({names})"
    for name, grid in plan.affine():
        out, n = plan.fused_part(name)
        if (n % 128 or out % 64) and plan.container == "compressed-tensors" and not grid.symmetric:
            shaped.append((name, grid))
    for kind, names in _by_grid(shaped):
        yield f"Marlin needs in_features % 128 = 0 and out_features % 64 = 0 per device for {kind} ({names})"


def _transformers_asymmetric(plan: _Plan) -> Iterator[str]:
    asymmetric = [name for name, grid in plan.affine() if not grid.symmetric]
    if plan.container != "compressed-tensors" or not asymmetric:
        return
    kinds = {grid.name for grid in plan.grids.values()}
    if len(kinds) > 1 or plan.arch.experts:
        yield f"asymmetric weights cannot be loaded in mixtures or experts ({_some(asymmetric)})"
    else:
        yield (
            "asymmetric weights load only with quantization_config=CompressedTensorsConfig(dequantize=True) "
            f"({_some(asymmetric)})"
        )


def _gptqmodel_groups(plan: _Plan) -> Iterator[str]:
    """transformers runs GPTQ and AWQ through gptqmodel."""
    known = GPTQMODEL_GROUPS.get(plan.container)
    odd = [(n, g) for n, g in plan.affine() if known and g.block not in known and g.block != plan.shape(n)[1]]
    for grid, names in _by_grid(odd):
        yield f"gptqmodel has no kernel for the group size of {grid} ({names})"
