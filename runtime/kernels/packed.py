"""Weights of any grid, repacked into the few memory layouts that the CPU tiles read."""

from dataclasses import dataclass

import torch
from torch import Tensor

from formats.qtensor import IntegerLevels, QTensor
from runtime.kernels.tile import GROUP, LANES, Layout

PAIR = 2 * LANES  # rows are padded to whole pairs of stripes
CHUNK = 4096  # rows repacked at a time, so that float copies of large embeddings stay small


@dataclass
class Packed:
    """codes uint8 [stripes, bytes]; scales, offsets float16 or float32 [stripes, parameter groups, 16].

    groups: of 32 columns, the last one padded; shift: log2 of how many of them share parameters; order: int64 [in], the
    column stored at each place (act_order), or None.
    """

    layout: Layout
    out_features: int
    in_features: int
    shift: int
    codes: Tensor
    scales: Tensor
    offsets: Tensor
    order: Tensor | None = None

    @property
    def groups(self) -> int:
        return -(-self.in_features // GROUP)

    @property
    def stripes(self) -> int:
        return self.codes.shape[0]

    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes + self.offsets.nbytes

    def rows(self, ids: Tensor) -> Tensor:
        """Dequantised rows, float32 [n, in], rounded as the grid's own decode rounds."""
        stripe, lane = ids // LANES, ids % LANES
        layout, n = self.layout, len(ids)
        if layout.dense:
            dense = self.codes.view(getattr(torch, layout.store)).view(self.stripes, -1, LANES)
            values = dense[stripe, :, lane].float()
        else:
            codes = self.codes.view(self.stripes, self.groups, -1, LANES, 4)[stripe, :, :, lane]
            if layout.store == "4":
                codes = torch.cat([codes & 15, codes >> 4], dim=2)
            codes = codes.reshape(n, -1)
            values = torch.tensor(layout.table)[codes.long()] if layout.table else codes.float() + layout.lowest
            share = (GROUP << self.shift) if layout.group == GROUP else layout.group

            def spread(parameter: Tensor) -> Tensor:
                return parameter[stripe, :, lane].float().repeat_interleave(share, dim=1)[:, : values.shape[1]]

            if layout.zero:
                values = values - spread(self.offsets)
            values = spread(self.scales) * values
            if layout.offset and not layout.zero:
                values = values - spread(self.offsets)
        values = values[:, : self.in_features]
        if self.order is None:
            return values
        return torch.empty_like(values).index_copy_(1, self.order, values)


def _stripes(matrix: Tensor, width: int) -> Tensor:
    """[rows, columns] -> [stripes, 16, width], padded with zeros to pairs of stripes and to `width` columns."""
    rows = -(-matrix.shape[0] // PAIR) * PAIR
    padded = matrix.new_zeros(rows, width)
    padded[: matrix.shape[0], : matrix.shape[1]] = matrix
    return padded.view(-1, LANES, width)


def pack_dense(weight: Tensor) -> Packed:
    """float32, float16 or bfloat16 weights, stripe by stripe, one vector of 16 rows per column."""
    store = str(weight.dtype).removeprefix("torch.")
    width = -(-weight.shape[1] // GROUP) * GROUP
    codes = _stripes(weight, width).transpose(1, 2).contiguous().view(-1, width * LANES).view(torch.uint8)
    none = torch.empty(0)
    return Packed(Layout(store), weight.shape[0], weight.shape[1], 0, codes, none, none)


def _pack_codes(codes: Tensor, width: int, nibbles: bool) -> Tensor:
    quads = _stripes(codes, width).view(-1, LANES, width // GROUP, 8, 4).permute(0, 2, 3, 1, 4)
    if nibbles:
        quads = quads[:, :, :4] | quads[:, :, 4:] << 4
    return quads.reshape(quads.shape[0], -1)


def _sharing(weight: QTensor) -> int:
    """Columns that share one set of parameters: a block, or a sub-block where sub-scales exist."""
    out, n = weight.shape
    sets = max(p.numel() // out for p in weight.params.values())
    if weight.grid.block is not None:
        return weight.grid.block * -(-n // weight.grid.block) // sets
    if sets == 1:
        return -(-n // GROUP) * GROUP
    return 1 << (-(-n // sets) - 1).bit_length()  # nf4: fitted whole, but scaled in blocks of 64


def _layout(weight: QTensor) -> tuple[int, int] | None:
    """(columns per stored parameter, shift), or None where no layout fits the grid."""
    share, n = _sharing(weight), weight.shape[1]
    if share % GROUP:
        return (16, 0) if share % 16 == 0 else None
    ratio = share // GROUP
    if share >= n:
        return GROUP << (ratio - 1).bit_length(), (ratio - 1).bit_length()
    return (share, ratio.bit_length() - 1) if ratio & (ratio - 1) == 0 else (GROUP, 0)


def _half_if_exact(values: Tensor) -> Tensor:
    half = values.half()
    return half if torch.equal(half.float(), values) else values


@dataclass
class Folded:
    """A weight with every format's details folded into one scale and one offset (or zero point) per group.

    codes: uint8 [out, in] in stored order; scale, offset: float16 or float32 [out, groups], or empty.
    """

    layout: Layout
    shift: int
    codes: Tensor
    scale: Tensor
    offset: Tensor
    order: Tensor | None


def fold(weight: QTensor) -> Folded | None:
    """None where the grid's groups are no multiple of 16 columns."""
    fit = _layout(weight)
    if fit is None:
        return None
    step, shift = fit
    grid, (out, n) = weight.grid, weight.shape
    scales: list[Tensor] = []
    offsets: list[Tensor] = []
    for start in range(0, out, CHUNK):
        part = grid.columns({k: p[start : start + CHUNK] for k, p in weight.params.items()}, n)
        assert part.zero is None or part.offset is None, f"{grid} has both zero points and offsets"
        scales.append(part.scale[:, ::step].clone())
        for other in (part.zero, part.offset):
            if other is not None:
                offsets.append(other[:, ::step].clone())
    scale = _half_if_exact(torch.cat(scales))
    offset = _half_if_exact(torch.cat(offsets)) if offsets else torch.empty(0)
    integers = isinstance(grid, IntegerLevels)
    layout = Layout(
        store="4" if len(grid.level_table) <= 16 else "8",
        group=min(step, GROUP),
        scale="half" if scale.dtype == torch.float16 else "float",
        offset="" if not offsets else "half" if offset.dtype == torch.float16 else "float",
        zero=part.zero is not None,
        lowest=int(grid.level_table[0]) if integers else 0,
        table=() if integers else tuple(grid.level_table.tolist()),
    )
    order = None if weight.g_idx is None else torch.argsort(weight.g_idx.long(), stable=True)
    return Folded(layout, shift, weight.codes if order is None else weight.codes[:, order], scale, offset, order)


def pack(weight: "Tensor | QTensor") -> Packed:
    """Repack a weight for the CPU tiles. What does not fold becomes dense float32."""
    if isinstance(weight, Tensor):
        return pack_dense(weight)
    f = fold(weight)
    if f is None:
        return pack_dense(weight.dequantize())
    out, n = weight.shape
    width = -(-n // GROUP) * GROUP
    count = -(-width // (f.layout.group << f.shift))

    def stripes(parameter: Tensor) -> Tensor:
        if not parameter.numel():
            return parameter
        return _stripes(parameter, count).transpose(1, 2).contiguous()

    codes = _pack_codes(f.codes, width, f.layout.store == "4")
    return Packed(f.layout, out, n, f.shift, codes, stripes(f.scale), stripes(f.offset), f.order)
