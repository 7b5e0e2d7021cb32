"""Bit packing against a slow reference that works on Python integers, and the words real files are known to hold."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from formats.packing import AWQ_ORDER, awq_order, awq_unorder, pack_bits, unpack_bits, words_for


def slow_pack(row: list[int], bits: int) -> list[int]:
    stream = sum(code << i * bits for i, code in enumerate(row))
    words = [stream >> 32 * w & 0xFFFFFFFF for w in range(words_for(len(row), bits))]
    return [w - (1 << 32) if w >> 31 else w for w in words]


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 8), st.integers(1, 3), st.integers(1, 100), st.integers(0, 2**31))
def test_packing_equals_one_long_integer(bits: int, rows: int, n: int, seed: int) -> None:
    codes = torch.randint(0, 1 << bits, (rows, n), generator=torch.Generator().manual_seed(seed)).to(torch.uint8)
    words = pack_bits(codes, bits)
    assert words.dtype == torch.int32
    assert words.tolist() == [slow_pack(row, bits) for row in codes.tolist()]
    assert torch.equal(unpack_bits(words, bits, n), codes)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_rows_with_odd_strides(bits: int) -> None:
    """A column turned into a row counts as contiguous."""
    column = torch.arange(64, dtype=torch.uint8)[:, None] & ((1 << bits) - 1)
    words = pack_bits(column.T.contiguous(), bits)
    assert words.tolist() == [slow_pack(column.flatten().tolist(), bits)]
    assert torch.equal(unpack_bits(words.T.contiguous().T, bits, 64), column.T)


def test_three_bits_are_a_continuous_stream() -> None:
    """32 codes in 3 words: code 10 has its top bit in the second word, code 21 its top two in the third."""
    for i, expected in ((10, [3 << 30, 1, 0]), (21, [0, 1 << 31, 3])):
        codes = torch.zeros(1, 32, dtype=torch.uint8)
        codes[0, i] = 7
        assert [w & 0xFFFFFFFF for w in pack_bits(codes, 3)[0].tolist()] == expected


def test_codes_0_to_7_in_awq_order_are_0x75316420() -> None:
    assert pack_bits(awq_order(torch.arange(8, dtype=torch.uint8)[None]), 4).item() == 0x75316420


def test_symmetric_zero_points_of_v1_are_0x77777777() -> None:
    assert pack_bits(torch.full((1, 8), 8 - 1, dtype=torch.uint8), 4).item() == 0x77777777


def test_awq_order_is_undone() -> None:
    codes = torch.arange(48, dtype=torch.uint8).reshape(2, 24)
    ordered = awq_order(codes)
    assert ordered[0, :8].tolist() == list(AWQ_ORDER)
    assert torch.equal(awq_unorder(ordered), codes)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_packing_equals_compressed_tensors(bits: int) -> None:
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    codes = torch.randint(0, 1 << bits, (5, 77)).to(torch.uint8)
    signed = (codes.int() - (1 << bits - 1)).to(torch.int8)
    assert torch.equal(pack_bits(codes, bits), helpers.pack_to_int32(signed, bits))
    zeros = helpers.pack_to_int32(signed, bits, packed_dim=0)
    assert torch.equal(pack_bits(codes.T.contiguous(), bits).T, zeros)
