"""Number formats by name: "q4_k", or affine ones by their shape, "int4-g64", "int4-g64-sym", "int8-channel-sym"."""

import re
from collections.abc import Mapping
from typing import Any

from formats.errors import UsageError
from formats.qtensor import Grid
from formats.registry import Registry, did_you_mean

GRIDS = Registry(
    "grid",
    {
        "q4_0": "formats.grids.affine:Q4_0",
        "q4_1": "formats.grids.affine:Q4_1",
        "q5_0": "formats.grids.affine:Q5_0",
        "q5_1": "formats.grids.affine:Q5_1",
        "q8_0": "formats.grids.affine:Q8_0",
        "q2_k": "formats.grids.kquant:Q2_K",
        "q3_k": "formats.grids.kquant:Q3_K",
        "q4_k": "formats.grids.kquant:Q4_K",
        "q5_k": "formats.grids.kquant:Q5_K",
        "q6_k": "formats.grids.kquant:Q6_K",
        "iq4_nl": "formats.grids.codebook:IQ4_NL",
        "iq4_xs": "formats.grids.codebook:IQ4_XS",
        "nf4": "formats.grids.codebook:NF4",
        "mxfp4": "formats.grids.codebook:MXFP4",
    },
)

_AFFINE = re.compile(r"int([2-8])-(?:g(\d+)|channel)(-sym)?")


def parse_grid(spec: "str | Mapping[str, Any] | Grid") -> Grid:
    """A grid from a recipe: a registered name, an affine name, or {bits, group_size, symmetric}.

    group_size -1 (or "channel") means one scale per output channel.
    """
    if isinstance(spec, Grid):
        return spec
    from formats.grids.affine import AffineGrid

    if isinstance(spec, Mapping):
        group = spec.get("group_size", 128)
        return AffineGrid(
            int(spec["bits"]),
            None if group in (-1, None, "channel") else int(group),
            bool(spec.get("symmetric", False)),
        )
    match = _AFFINE.fullmatch(spec)
    if match:
        return AffineGrid(int(match[1]), int(match[2]) if match[2] else None, match[3] is not None)
    if spec not in GRIDS:
        hint = did_you_mean(spec, [*GRIDS, "int4-g64", "int4-g128-sym", "int8-channel-sym"])
        raise UsageError(f'unknown grid "{spec}"', how_to_fix=hint)
    grid: Grid = GRIDS[spec]
    return grid
