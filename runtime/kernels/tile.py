"""Machine code for one tile of a matrix product with packed weights: emitted as vector IR, compiled by LLVM.

A weight matrix lies in stripes of 16 rows, so that one vector holds one column (or four, as bytes) of all 16 rows. A
tile multiplies `rows` activation rows with `stripes` stripes over all columns. What is added to an output element, and
in which order, is the same in every tile shape: an output row has the same bits alone and in any batch.

Within a stripe, columns come in groups of 32. 8-bit codes: vector j of a group holds columns 4j..4j+3 of each row in
one 32-bit lane; 4-bit codes: low nibbles of vector j hold columns 4j.., high nibbles columns 16+4j... Dense weights:
one vector per column. Scales and offsets: one vector per group (two where sub-groups have 16 columns).
"""

import functools
from dataclasses import dataclass
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir

LANES, GROUP = 16, 32
BYTE, I32, I64, F32 = ir.IntType(8), ir.IntType(32), ir.IntType(64), ir.FloatType()
INTS, FLOATS, BYTES = ir.VectorType(I32, LANES), ir.VectorType(F32, LANES), ir.VectorType(BYTE, 4 * LANES)
I16, WORDS = ir.IntType(16), ir.VectorType(ir.IntType(16), 2 * LANES)
ARGUMENTS = ("codes", "scales", "offsets", "x", "x_scales", "x_sums", "out", "x_step", "g_step", "out_step", "groups",
             "shift")  # fmt: skip
DENSE = {"float32": F32, "float16": ir.HalfType(), "bfloat16": ir.IntType(16)}


@dataclass(frozen=True)
class Layout:
    """How a weight lies in memory: value = scale * (level(code) - zero) - offset, level(code) = code + lowest or
    table[code].

    store    "4" or "8" bits per code, or the dtype of dense weights
    group    columns that share a scale and an offset: 32 (or, by `shift`, more), or 16
    scale, offset   "half" or "float"; "" where there are none. `zero`: the offset is a zero point
    """

    store: str
    group: int = GROUP
    scale: str = ""
    offset: str = ""
    zero: bool = False
    lowest: int = 0
    table: tuple[float, ...] = ()

    @property
    def dense(self) -> bool:
        return self.store in DENSE

    @property
    def group_bytes(self) -> int:
        """Bytes of codes for 32 columns of a stripe."""
        return LANES * GROUP * {"4": 1, "8": 2, "float32": 8, "float16": 4, "bfloat16": 4}[self.store] // 2

    def integer_levels(self) -> tuple[tuple[int, ...], float, int]:
        """Unsigned byte per code, unit and bias: level = unit * (byte - bias). Rounded where levels are no integers."""
        if not self.table:
            return (), 1.0, -self.lowest
        unit = next(u for u in (1.0, 0.5, max(map(abs, self.table)) / 127) if u not in (1.0, 0.5) or self._integers(u))
        return tuple(round(v / unit) + 128 for v in self.table), unit, 128

    def _integers(self, unit: float) -> bool:
        return all((v / unit).is_integer() and abs(v / unit) <= 127 for v in self.table)


@functools.cache
def host() -> tuple[str, dict[str, bool]]:
    """Name and features of this CPU."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm.get_host_cpu_name(), dict(llvm.get_host_cpu_features())


def has(feature: str) -> bool:
    return host()[1].get(feature, False)


def shapes() -> list[tuple[int, int]]:
    """(rows, stripes) of the tiles, largest first: as many accumulators as there are registers for."""
    return [(12, 1), (8, 1), (4, 2), (2, 2), (1, 2)] if has("avx512f") else [(4, 1), (2, 2), (1, 2)]


class _Emitter:
    """Builds one tile function: float arithmetic, or bytes times int8 activations."""

    def __init__(self, layout: Layout, rows: int, stripes: int, integer: bool) -> None:
        self.layout, self.rows, self.stripes, self.integer = layout, rows, stripes, integer
        self.module = ir.Module("tile")
        self.module.triple = llvm.get_process_triple()
        function = ir.Function(self.module, ir.FunctionType(ir.VoidType(), [I64] * len(ARGUMENTS)), "tile")
        self.arg = dict(zip(ARGUMENTS, function.args, strict=True))
        self.b = ir.IRBuilder(function.append_basic_block("entry"))

    # -- small helpers -------------------------------------------------------------------------------------------

    def load(self, kind: ir.Type, address: ir.Value, align: int = 4) -> ir.Value:
        return self.b.load(self.b.inttoptr(address, kind.as_pointer()), align=align)

    def at(self, base: ir.Value, *terms: "tuple[ir.Value, ir.Value | int]") -> ir.Value:
        """base + the sum of products."""
        for value, factor in terms:
            base = self.b.add(base, self.b.mul(value, I64(factor) if isinstance(factor, int) else factor))
        return base

    def splat(self, value: ir.Value) -> ir.Value:
        vector = ir.VectorType(value.type, LANES)
        lane = self.b.insert_element(ir.Constant(vector, ir.Undefined), value, I32(0))
        return self.b.shuffle_vector(lane, ir.Constant(vector, ir.Undefined), ir.Constant(INTS, [0] * LANES))

    def ints(self, value: int) -> ir.Value:
        return ir.Constant(INTS, [value] * LANES)

    def floats(self, value: float) -> ir.Value:
        return ir.Constant(FLOATS, [value] * LANES)

    def call(self, name: str, result: ir.Type, *args: ir.Value) -> ir.Value:
        function = self.module.globals.get(name) or ir.Function(
            self.module, ir.FunctionType(result, [a.type for a in args]), name
        )
        return self.b.call(function, args)

    def fma(self, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
        return self.call("llvm.fma.v16f32", FLOATS, a, b, c)

    def by_halves(self, name: str, element: ir.Type, *args: ir.Value) -> ir.Value:
        """A 256-bit instruction on both halves of 512-bit vectors; `element` is the type of the result's elements."""

        def half(v: ir.Value, which: int) -> ir.Value:
            n = v.type.count // 2
            lanes = ir.Constant(ir.VectorType(I32, n), list(range(which * n, (which + 1) * n)))
            return self.b.shuffle_vector(v, ir.Constant(v.type, ir.Undefined), lanes)

        n = 256 // (32 if element in (I32, F32) else element.width)
        low, high = (self.call(name, ir.VectorType(element, n), *(half(a, which) for a in args)) for which in (0, 1))
        return self.b.shuffle_vector(low, high, ir.Constant(ir.VectorType(I32, 2 * n), list(range(2 * n))))

    def widen(self, kind: str, address: ir.Value) -> ir.Value:
        """16 stored parameters or dense weights as float32."""
        if kind == "bfloat16":
            bits = self.b.zext(self.load(ir.VectorType(ir.IntType(16), LANES), address, 2), INTS)
            return self.b.bitcast(self.b.shl(bits, self.ints(16)), FLOATS)
        if kind in ("half", "float16"):
            return self.b.fpext(self.load(ir.VectorType(ir.HalfType(), LANES), address, 2), FLOATS)
        return self.load(FLOATS, address)

    # -- weights -------------------------------------------------------------------------------------------------

    def quads(self, base: ir.Value) -> list[ir.Value]:
        """The codes of a group: 8 vectors of 16 lanes of 4 bytes."""
        if self.layout.store == "8":
            return [self.load(INTS, self.b.add(base, I64(64 * j)), 16) for j in range(8)]
        packed = [self.load(INTS, self.b.add(base, I64(64 * j)), 16) for j in range(4)]
        mask = self.ints(0x0F0F0F0F)
        high = [self.b.and_(self.b.lshr(v, self.ints(4)), mask) for v in packed]
        return [self.b.and_(v, mask) for v in packed] + high

    def parameters(self, g: ir.Value, stripe: int, sub: int) -> tuple[ir.Value, ir.Value | None]:
        """Scale and offset vectors of (sub-)group g."""
        per = GROUP // self.layout.group
        index = self.b.lshr(g, self.arg["shift"]) if per == 1 else self.at(I64(sub), (g, per))
        last = self.b.lshr(self.b.sub(self.arg["groups"], I64(1)), self.arg["shift"])
        count = self.b.add(last, I64(1)) if per == 1 else self.b.mul(self.arg["groups"], I64(per))
        row = self.at(index, (count, stripe))
        width = {"half": 2 * LANES, "float": 4 * LANES}
        scale = self.widen(self.layout.scale, self.at(self.arg["scales"], (row, width[self.layout.scale])))
        if not self.layout.offset:
            return scale, None
        return scale, self.widen(self.layout.offset, self.at(self.arg["offsets"], (row, width[self.layout.offset])))

    def look_up(self, codes: ir.Value) -> ir.Value:
        """Float levels of 16 codes by table."""
        table = ir.Constant(FLOATS, list((*self.layout.table, *[0.0] * LANES)[:LANES]))
        if has("avx512f"):
            return self.call("llvm.x86.avx512.permvar.sf.512", FLOATS, table, codes)
        if has("avx2"):  # eight entries at a time
            entries = list(table.constant)
            parts = [ir.Constant(FLOATS, entries[at : at + 8] * 2) for at in (0, 8)]
            low, high = (self.by_halves("llvm.x86.avx2.permps", F32, part, codes) for part in parts)
            return self.b.select(self.b.icmp_unsigned("<", codes, self.ints(8)), low, high)
        result = ir.Constant(FLOATS, ir.Undefined)
        for lane in range(LANES):
            level = self.b.extract_element(table, self.b.extract_element(codes, I32(lane)))
            result = self.b.insert_element(result, level, I32(lane))
        return result

    def look_up_bytes(self, quad: ir.Value) -> ir.Value:
        """Unsigned byte levels of 64 codes by table."""
        levels = [*self.layout.integer_levels()[0], *[0] * LANES][:LANES]
        codes, table = self.b.bitcast(quad, BYTES), ir.Constant(BYTES, levels * 4)
        if has("avx512bw"):
            return self.b.bitcast(self.call("llvm.x86.avx512.pshuf.b.512", BYTES, table, codes), INTS)
        if has("avx2"):
            return self.b.bitcast(self.by_halves("llvm.x86.avx2.pshuf.b", BYTE, table, codes), INTS)
        result = ir.Constant(BYTES, ir.Undefined)
        for lane in range(4 * LANES):
            level = self.b.extract_element(table, self.b.zext(self.b.extract_element(codes, I32(lane)), I32))
            result = self.b.insert_element(result, level, I32(lane))
        return self.b.bitcast(result, INTS)

    def column(self, quad: ir.Value, c: int, scale: ir.Value, offset: ir.Value | None) -> ir.Value:
        """Column c of a quad, dequantised as the grid does it, rounding for rounding."""
        code = self.b.and_(self.b.lshr(quad, self.ints(8 * c)), self.ints(255))
        if self.layout.table:
            level = self.look_up(code)
        else:
            level = self.b.sitofp(self.b.add(code, self.ints(self.layout.lowest)), FLOATS)
        if offset is not None and self.layout.zero:
            level = self.b.fsub(level, offset)
        value = self.b.fmul(scale, level)
        return value if offset is None or self.layout.zero else self.b.fsub(value, offset)

    def dot(self, quads: list[ir.Value], xs: list[ir.Value]) -> ir.Value:
        """Sums, per 32-bit lane, of the products of unsigned bytes (at most 8 quads) and signed bytes."""
        total = self.ints(0)
        if has("avx512vnni"):
            for w, x in zip(quads, xs, strict=True):
                if llvm.llvm_version_info[0] >= 22:
                    w, x = self.b.bitcast(w, BYTES), self.b.bitcast(x, BYTES)
                total = self.call("llvm.x86.avx512.vpdpbusd.512", INTS, total, w, x)
        elif has("avx2") and self.layout.store == "4" and not self.layout.table:
            words = ir.Constant(WORDS, [0] * 2 * LANES)  # 8 quads x 2 products of 15 x 127 fit 16 bits
            for w, x in zip(quads, xs, strict=True):
                w, x = self.b.bitcast(w, BYTES), self.b.bitcast(x, BYTES)
                words = self.b.add(words, self.by_halves("llvm.x86.avx2.pmadd.ub.sw", I16, w, x))
            total = self.by_halves("llvm.x86.avx2.pmadd.wd", I32, words, ir.Constant(WORDS, [1] * 2 * LANES))
        elif has("avx2"):
            eight = ir.Constant(WORDS, [8] * 2 * LANES)
            for w, x in zip(quads, xs, strict=True):
                w, x = self.b.bitcast(w, WORDS), self.b.bitcast(x, WORDS)
                even = self.b.and_(w, ir.Constant(WORDS, [255] * 2 * LANES)), self.b.ashr(self.b.shl(x, eight), eight)
                odd = self.b.lshr(w, eight), self.b.ashr(x, eight)
                for pair in (even, odd):
                    total = self.b.add(total, self.by_halves("llvm.x86.avx2.pmadd.wd", I32, *pair))
        else:
            for w, x in zip(quads, xs, strict=True):
                for c in range(4):
                    wide = self.b.and_(self.b.lshr(w, self.ints(8 * c)), self.ints(255))
                    signed = self.b.ashr(self.b.shl(x, self.ints(24 - 8 * c)), self.ints(24))
                    total = self.b.add(total, self.b.mul(wide, signed))
        return total

    # -- one group of 32 columns -----------------------------------------------------------------------------------

    def float_group(self, g: ir.Value, stripe: int, totals: list[ir.Value]) -> list[ir.Value]:
        base = self.at(self.arg["codes"], (self.at(g, (self.arg["groups"], stripe)), self.layout.group_bytes))
        quads = [] if self.layout.dense else self.quads(base)
        for k in range(GROUP):
            if self.layout.dense:
                size = self.layout.group_bytes // GROUP
                w = self.widen(self.layout.store, self.b.add(base, I64(size * k)))
            else:
                if k % self.layout.group == 0:
                    scale, offset = self.parameters(g, stripe, k // self.layout.group)
                w = self.column(quads[k // 4], k % 4, scale, offset)
            for m in range(self.rows):
                x = self.load(F32, self.b.add(self.x_rows[m], I64(4 * k)))
                totals[m] = self.fma(w, self.splat(x), totals[m])
        return totals

    def integer_group(self, g: ir.Value, stripe: int, totals: list[ir.Value]) -> list[ir.Value]:
        base = self.at(self.arg["codes"], (self.at(g, (self.arg["groups"], stripe)), self.layout.group_bytes))
        quads = self.quads(base)
        if self.layout.table:
            quads = [self.look_up_bytes(q) for q in quads]
        _, unit, bias = self.layout.integer_levels()
        per, quads_per = GROUP // self.layout.group, self.layout.group // 4
        for sub in range(per):
            scale, offset = self.parameters(g, stripe, sub)
            minimum = None
            if offset is not None and self.layout.zero:
                minimum = self.b.fmul(scale, self.b.fsub(self.floats(-bias), offset))
            elif bias:
                minimum = self.b.fmul(scale, self.floats(-bias * unit))
                minimum = minimum if offset is None else self.b.fsub(minimum, offset)
            elif offset is not None:
                minimum = self.b.fneg(offset)
            scale = scale if unit == 1.0 else self.b.fmul(scale, self.floats(unit))
            for m in range(self.rows):
                mine = range(sub * quads_per, (sub + 1) * quads_per)
                xs = [self.splat(self.load(I32, self.b.add(self.x_rows[m], I64(4 * j)))) for j in mine]
                total = self.dot([quads[j] for j in mine], xs)
                row = self.at(g, (self.arg["g_step"], m))
                x_scale = self.splat(self.load(F32, self.at(self.arg["x_scales"], (row, 4))))
                totals[m] = self.fma(self.b.sitofp(total, FLOATS), self.b.fmul(scale, x_scale), totals[m])
                if minimum is not None:
                    which = 0 if per == 1 else 1 + sub
                    x_sum = self.load(F32, self.at(self.arg["x_sums"], (row, 16), (I64(1), 4 * which)))
                    totals[m] = self.fma(minimum, self.splat(x_sum), totals[m])
        return totals

    def build(self) -> str:
        """The whole function: a loop over groups with the accumulators in registers."""
        step = self.integer_group if self.integer else self.float_group
        x_rows = [self.at(self.arg["x"], (self.arg["x_step"], m)) for m in range(self.rows)]
        entry, loop = self.b.block, self.b.append_basic_block("group")
        done = self.b.append_basic_block("done")
        self.b.branch(loop)
        self.b.position_at_end(loop)
        g = self.b.phi(I64)
        phis = [[self.b.phi(FLOATS) for _ in range(self.rows)] for _ in range(self.stripes)]
        offset = self.b.mul(g, I64(GROUP * (1 if self.integer else 4)))
        self.x_rows = [self.b.add(row, offset) for row in x_rows]
        totals = [step(g, s, list(phis[s])) for s in range(self.stripes)]
        following = self.b.add(g, I64(1))
        g.add_incoming(I64(0), entry)
        g.add_incoming(following, self.b.block)
        for s in range(self.stripes):
            for m in range(self.rows):
                phis[s][m].add_incoming(self.floats(0.0), entry)
                phis[s][m].add_incoming(totals[s][m], self.b.block)
        self.b.cbranch(self.b.icmp_unsigned("<", following, self.arg["groups"]), loop, done)
        self.b.position_at_end(done)
        for s in range(self.stripes):
            for m in range(self.rows):
                place = self.at(self.arg["out"], (self.arg["out_step"], m), (I64(1), 4 * LANES * s))
                self.b.store(totals[s][m], self.b.inttoptr(place, FLOATS.as_pointer()), align=4)
        self.b.ret_void()
        return str(self.module)


@functools.cache
def _engine() -> tuple[Any, Any]:
    name, features = host()
    target = llvm.Target.from_default_triple()
    flags = ",".join(("+" if on else "-") + feature for feature, on in features.items())
    machine = target.create_target_machine(cpu=name, features=flags, opt=3)
    return llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine), machine


@functools.cache
def tile_address(layout: Layout, rows: int, stripes: int, integer: bool) -> int:
    """Address of the compiled tile; it stays valid for the life of the process.

    C signature: void (int64 each of ARGUMENTS); addresses and strides in bytes, except g_step (groups per row).
    x: float32, or int8 with x_scales float32 [rows, groups] and x_sums float32 [rows, groups, 4]: scale times the sum
    of the codes of all 32 columns, of the first and of the second 16.
    """
    engine, machine = _engine()
    module = llvm.parse_assembly(_Emitter(layout, rows, stripes, integer).build().replace('"tile"', f'"{_symbol()}"'))
    name = next(f.name for f in module.functions if not f.is_declaration)
    options = llvm.create_pipeline_tuning_options(speed_level=2)
    builder = llvm.create_pass_builder(machine, options)
    builder.getModulePassManager().run(module, builder)
    engine.add_module(module)
    engine.finalize_object()
    return int(engine.get_function_address(name))


_count = iter(range(1 << 62))


def _symbol() -> str:
    return f"tile_{next(_count)}"
