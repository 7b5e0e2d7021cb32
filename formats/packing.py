"""Codes of 2 to 8 bits as a continuous stream in 32-bit words, least significant bit first. Pure functions.

GPTQ, AWQ and compressed-tensors all store this stream; they differ in the dimension it runs along, in the order of the
codes, and in what they add to zero points.
"""

import torch
from torch import Tensor

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""AWQ stores column AWQ_ORDER[i] of every eight at position i of a word."""


def flat(tensor: Tensor) -> Tensor:
    """A tensor as one contiguous dimension that `view` may reinterpret. (A tensor with one row, or of one element,
    counts as contiguous whatever its strides, and view would refuse it.)"""
    return tensor.contiguous().as_strided((tensor.numel(),), (1,))


def words_for(n: int, bits: int) -> int:
    """32-bit words that n codes take."""
    return -(-n * bits // 32)


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    """Codes uint8 [rows, n] -> int32 [rows, words_for(n, bits)]; unused high bits of the last word are zero."""
    rows, n = codes.shape
    blocks = -(-n // 32)
    padded = torch.nn.functional.pad(codes, (0, blocks * 32 - n))
    if 8 % bits == 0:  # whole codes per byte: join neighbours, ten times faster
        for width in (w for w in (1, 2, 4) if w >= bits):
            padded = padded[:, ::2] | padded[:, 1::2] << width
        return flat(padded).view(torch.int32).view(rows, -1)[:, : words_for(n, bits)].contiguous()
    padded = padded.view(rows, blocks, 32)
    words = torch.zeros(rows, blocks, bits, dtype=torch.int64, device=codes.device)
    for i in range(32):
        word, shift = divmod(i * bits, 32)
        code = padded[..., i].long()
        words[..., word] |= code << shift
        if shift + bits > 32:
            words[..., word + 1] |= code >> (32 - shift)
    # The conversion keeps the low 32 bits.
    return words.view(rows, -1)[:, : words_for(n, bits)].to(torch.int32).contiguous()


def unpack_bits(words: Tensor, bits: int, n: int) -> Tensor:
    """The inverse of `pack_bits`: int32 [rows, words_for(n, bits)] -> uint8 [rows, n]."""
    rows = words.shape[0]
    mask = (1 << bits) - 1
    if 8 % bits == 0:
        packed = flat(words).view(torch.uint8).view(rows, -1)
        fields = torch.stack([packed >> shift & mask for shift in range(0, 8, bits)], dim=-1)
        return fields.view(rows, -1)[:, :n].contiguous()
    blocks = -(-n // 32)
    wide = torch.nn.functional.pad(words.long() & 0xFFFFFFFF, (0, blocks * bits - words.shape[1]))
    wide = wide.view(rows, blocks, bits)
    codes = torch.empty(rows, blocks, 32, dtype=torch.uint8, device=words.device)
    for i in range(32):
        word, shift = divmod(i * bits, 32)
        code = wide[..., word] >> shift
        if shift + bits > 32:
            code = code | wide[..., word + 1] << (32 - shift)
        codes[..., i] = code & mask
    return codes.view(rows, -1)[:, :n].contiguous()


def awq_order(codes: Tensor) -> Tensor:
    """Reorder columns [rows, n], n divisible by 8, as AWQ's kernels want them."""
    rows, n = codes.shape
    return codes.view(rows, n // 8, 8)[..., list(AWQ_ORDER)].reshape(rows, n)


def awq_unorder(codes: Tensor) -> Tensor:
    """The inverse of `awq_order`."""
    rows, n = codes.shape
    inverse = sorted(range(8), key=AWQ_ORDER.__getitem__)
    return codes.view(rows, n // 8, 8)[..., inverse].reshape(rows, n)
