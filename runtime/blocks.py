"""Paged KV memory: who owns which block (BlockManager), and the blocks themselves (KVCache, KVBatch).

A sequence's keys and values lie in blocks of `block_size` tokens, found through its block table. Blocks are counted:
forks and equal prefixes share them, and the first write to a shared block copies it. Blocks of layers with a sliding
window are kept like all others, so that a cached prefix is complete for every layer.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from formats.errors import UsageError
from formats.registry import Registry

ATTENTION = Registry(
    "attention kernel",
    {
        "reference": "runtime.kernels.attention_reference:KERNEL",
        "cpu": "runtime.kernels.attention_cpu:KERNEL",
        "triton": "runtime.kernels.attention_triton:KERNEL",
    },
)

Copies = list[tuple[int, int]]
"""(source, destination) blocks to copy, in this order, before anything is written."""


@dataclass
class BlockTable:
    """The blocks of one sequence. length: tokens stored; digests: of its leading full blocks known to the cache."""

    blocks: list[int] = field(default_factory=list)
    length: int = 0
    digests: list[bytes] = field(default_factory=list)

    def at(self, length: int) -> "BlockTable":
        """The same blocks, as seen by one who has stored `length` tokens in them."""
        return BlockTable(self.blocks, length)


class BlockManager:
    """Hands out blocks, counts references, and remembers full blocks by the text that leads to their end.

    A block is blank, in use (references > 0), or idle: unused, but with known content, evicted oldest first when no
    blank block is left. The digest of a block covers its tokens and the digest of the block before it.
    """

    def __init__(self, num_blocks: int, block_size: int = 16, prefix_cache: bool = True) -> None:
        self.num_blocks, self.block_size, self.prefix_cache = num_blocks, block_size, prefix_cache
        self.references = [0] * num_blocks
        self._blank = list(range(num_blocks - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._digest: list[bytes | None] = [None] * num_blocks
        self._known: dict[bytes, int] = {}

    @property
    def free(self) -> int:
        """Blocks that a new owner could have now."""
        return len(self._blank) + len(self._idle)

    def needed(self, table: BlockTable, length: int) -> int:
        """How many free blocks `reserve(table, length)` takes."""
        grow = -(-length // self.block_size) - len(table.blocks)
        return max(grow, 0) + (length > table.length and self._must_copy(table))

    def reserve(self, table: BlockTable, length: int) -> Copies | None:
        """Make positions table.length .. length-1 writable; the copies to do, or None if blocks lack."""
        if self.needed(table, length) > self.free:
            return None
        copies: Copies = []
        if length > table.length and self._must_copy(table):
            i = table.length // self.block_size
            old, table.blocks[i] = table.blocks[i], self._take()
            copies.append((old, table.blocks[i]))
            self._release(old)
        while len(table.blocks) * self.block_size < length:
            table.blocks.append(self._take())
        return copies

    def truncate(self, table: BlockTable, length: int) -> None:
        """Forget positions from `length` on and give back the blocks past it."""
        table.length = min(table.length, length)
        keep = -(-length // self.block_size)
        for block in reversed(table.blocks[keep:]):
            self._release(block)
        del table.blocks[keep:]
        del table.digests[length // self.block_size :]

    def release(self, table: BlockTable) -> None:
        """Give back all blocks; the last ones go idle first, so that prefixes outlive what follows them."""
        self.truncate(table, 0)

    def fork(self, table: BlockTable) -> BlockTable:
        """A second owner of the same content."""
        for block in table.blocks:
            self.references[block] += 1
        return BlockTable(list(table.blocks), table.length, list(table.digests))

    def match(self, tokens: Sequence[int], limit: int) -> BlockTable:
        """A table holding the longest cached run of full blocks that `tokens` starts with, at most `limit` tokens."""
        table = BlockTable()
        for digest in self._chain(tokens, table.digests, limit) if self.prefix_cache else ():
            block = self._known.get(digest)
            if block is None:
                break
            self._idle.pop(block, None)
            self.references[block] += 1
            table.blocks.append(block)
            table.digests.append(digest)
        table.length = len(table.blocks) * self.block_size
        return table

    def publish(self, table: BlockTable, tokens: Sequence[int]) -> None:
        """Let others find the full blocks of `table`, whose content is tokens[:table.length]."""
        if not self.prefix_cache or len(table.digests) == table.length // self.block_size:
            return
        for digest in self._chain(tokens, table.digests, table.length):
            block = table.blocks[len(table.digests)]
            table.digests.append(digest)
            if digest not in self._known and self._digest[block] is None:
                self._known[digest], self._digest[block] = block, digest

    def forget(self) -> None:
        """Drop all cached content (the weights changed, say)."""
        self._known.clear()
        self._digest = [None] * self.num_blocks
        self._blank += self._idle
        self._idle.clear()

    def _chain(self, tokens: Sequence[int], done: list[bytes], limit: int) -> Iterator[bytes]:
        """Digests of the full blocks of tokens[:limit] after those in `done`."""
        size, digest = self.block_size, done[-1] if done else b""
        for i in range(len(done) * size, limit - size + 1, size):
            digest = hashlib.blake2b(digest + array("q", tokens[i : i + size]).tobytes(), digest_size=16).digest()
            yield digest

    def _must_copy(self, table: BlockTable) -> bool:
        """Would the next token land in a block that others see?"""
        i = table.length // self.block_size
        if i >= len(table.blocks):
            return False
        return self.references[table.blocks[i]] > 1 or self._digest[table.blocks[i]] is not None

    def _take(self) -> int:
        if self._blank:
            block = self._blank.pop()
        else:
            block, _ = self._idle.popitem(last=False)
            digest = self._digest[block]
            assert digest is not None
            del self._known[digest]
            self._digest[block] = None
        self.references[block] = 1
        return block

    def _release(self, block: int) -> None:
        self.references[block] -= 1
        assert self.references[block] >= 0, "block released twice"
        if self.references[block] == 0:
            if self._digest[block] is None:
                self._blank.append(block)
            else:
                self._idle[block] = None


DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "int8": torch.int8}


class KVCache:
    """The memory of all blocks. k, v: [layers, num_blocks, block_size, kv_heads, head_dim] of `dtype`.

    int8: value = code * scale, scales float32 [layers, num_blocks, kv_heads] (empty for floats). A block's scale grows
    with its content and then the codes already there are rounded again, so int8 results depend in the last digits on
    how tokens were chunked; the float dtypes are exact in the sense of the engine.
    """

    def __init__(
        self,
        layers: int,
        num_blocks: int,
        kv_heads: int,
        head_dim: int,
        block_size: int = 16,
        dtype: str | torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        kernel: str = "auto",
    ) -> None:
        if isinstance(dtype, str):
            if dtype not in DTYPES:
                raise UsageError(f'unknown KV cache dtype "{dtype}"', how_to_fix="one of: " + ", ".join(DTYPES))
            dtype = DTYPES[dtype]
        shape = (layers, num_blocks, block_size, kv_heads, head_dim)
        self.block_size, self.dtype = block_size, dtype
        self.k = torch.zeros(shape, dtype=dtype, device=device)
        self.v = torch.zeros(shape, dtype=dtype, device=device)
        scales = (layers, num_blocks, kv_heads) if dtype == torch.int8 else (layers, 0, kv_heads)
        self.k_scale, self.v_scale = torch.zeros(scales, device=device), torch.zeros(scales, device=device)
        if kernel == "auto":
            kernel = "cpu" if self.k.device.type == "cpu" else "triton"
        self.kernel = ATTENTION[kernel]

    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.k, self.v, self.k_scale, self.v_scale))

    def copy(self, copies: Copies) -> None:
        """Copy blocks one after the other: a destination may be a later source's or an earlier one's block."""
        for source, destination in copies:
            for t in (self.k, self.v, self.k_scale, self.v_scale):
                if t.shape[1]:
                    t[:, destination] = t[:, source]

    def batch(self, tables: Sequence[BlockTable], counts: Sequence[int]) -> "KVBatch":
        """The view one forward pass needs: counts[i] new tokens for the sequence of tables[i], in this order."""
        return KVBatch(self, tables, counts)


class KVBatch:
    """What `Model.forward` sees of the cache: N new tokens of S sequences, flat, sequence after sequence.

    block_tables int32 [S, most blocks]; lengths int32 [S], the new tokens included; sequence, positions int32 [N];
    slots int64 [N] (block * block_size + offset of each new token); tiles int32 [T, 4]: (sequence, first token,
    tokens, position of the first), at most `TILE` tokens each: the unit of work of the kernels.
    """

    TILE = 16

    def __init__(self, cache: KVCache, tables: Sequence[BlockTable], counts: Sequence[int]) -> None:
        self.cache, size, device = cache, cache.block_size, cache.k.device
        count = np.asarray(counts, np.int32)
        start = np.asarray([table.length for table in tables], np.int32)
        first, widest = np.cumsum(count) - count, -(-int((start + count).max()) // size)
        block_tables = np.asarray([(t.blocks + [0] * widest)[:widest] for t in tables], np.int32)
        sequence = np.repeat(np.arange(len(count), dtype=np.int32), count)
        positions = np.arange(len(sequence), dtype=np.int32) + (start - first)[sequence].astype(np.int32)
        slots = block_tables[sequence, positions // size].astype(np.int64) * size + positions % size
        tiles = [
            (s, first[s] + i, min(self.TILE, count[s] - i), start[s] + i)
            for s in range(len(count))
            for i in range(0, count[s], self.TILE)
        ]
        self.longest = max(int(n) for _, _, n, _ in tiles)  # tokens in a tile
        self.work = sum(-(-(position + n) // self.TILE) for _, _, n, position in tiles)  # key tiles to visit, per head
        threads = torch.get_num_threads()  # consecutive tiles go to one thread: give each short and long ones alike
        tiles = [tile for r in range(threads) for tile in tiles[r::threads]]

        def tensor(values: np.ndarray) -> Tensor:
            return torch.from_numpy(values).to(device)

        self.block_tables, self.lengths = tensor(block_tables), tensor(start + count)
        self.sequence, self.positions, self.slots = tensor(sequence), tensor(positions), tensor(slots)
        self.tiles = tensor(np.asarray(tiles, np.int32))

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """Store k, v [N, kv_heads, head_dim]; each token of q [N, heads, head_dim] attends to its own past.

        window: a token sees itself and the window-1 tokens before it. softcap: scores become cap * tanh(score / cap).
        """
        self.cache.kernel.store(self, layer, k, v)
        out: Tensor = self.cache.kernel.attend(self, layer, q, scale, window or 0, softcap or 0.0)
        return out
