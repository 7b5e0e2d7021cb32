"""Block layouts against gguf-py's dequantiser, bit by bit, on random bytes and on random codes."""

import gguf
import numpy as np
import pytest
import torch

from formats.containers.gguf_blocks import LAYOUTS, block_bytes, pack_blocks, unpack_blocks
from formats.grids import parse_grid

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_byte_pattern_decodes_as_in_gguf_py_and_packs_back(name: str) -> None:
    kind = gguf.GGMLQuantizationType[name.upper()]
    assert gguf.GGML_QUANT_SIZES[kind] == (parse_grid(name).block, block_bytes(name))
    data = np.random.default_rng(0).integers(0, 256, (16, 3 * block_bytes(name)), dtype=np.uint8)
    tensor = unpack_blocks(name, data)
    assert np.array_equal(pack_blocks(tensor), data)
    expected, found = gguf.dequantize(data, kind), tensor.dequantize().numpy()
    finite = np.isfinite(expected)  # random fp16 scales may be infinite or not a number
    assert finite.mean() > 0.5
    assert np.array_equal(found[finite], expected[finite])


@pytest.mark.parametrize("name", LAYOUTS)
def test_fitted_tensors_survive_and_contract_dtypes_hold(name: str) -> None:
    grid = parse_grid(name)
    w = torch.randn(4, 512, generator=torch.Generator().manual_seed(1))
    params = grid.fit(w)
    tensor = type(unpack_blocks(name, np.zeros((1, block_bytes(name)), np.uint8)))(grid, grid.encode(w, params), params)
    data = pack_blocks(tensor)
    back = unpack_blocks(name, data)
    assert torch.equal(back.codes, tensor.codes)
    assert back.params.keys() == params.keys()
    for key, param in params.items():
        assert back.params[key].dtype == param.dtype, key
        assert torch.equal(back.params[key], param), key
    kind = gguf.GGMLQuantizationType[name.upper()]
    assert np.array_equal(gguf.dequantize(data, kind), tensor.dequantize().numpy())


def test_a_swapped_nibble_order_would_be_seen() -> None:
    tensor = unpack_blocks("q4_0", np.arange(18, dtype=np.uint8)[None])
    swapped = tensor.codes.reshape(-1, 16, 2).transpose(1, 2).reshape(1, -1)
    assert not torch.equal(swapped, tensor.codes)
    assert tensor.codes[0, :2].tolist() == [2, 3]
    assert tensor.codes[0, 16:18].tolist() == [0, 0]
