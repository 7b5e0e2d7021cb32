"""The number format that calibration computes in."""

import torch


def matmul_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 where the processor multiplies it natively; emulated, it is some hundred times slower than float32."""
    native = device.type != "cpu" or torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if native else torch.float32
