"""Runs in gptqmodel's own environment: float32 logits of GPTQ and AWQ directories, on the CPU.

    python gptqmodel_logits.py OUT.npz DIR [DIR ...]

Writes one array per directory, under its name; a directory that cannot be loaded gets its error message instead.
"""

import sys
from pathlib import Path

import numpy as np
import torch

torch.set_num_threads(1)


def use_float32(model: torch.nn.Module) -> None:
    """The AWQ kernel rounds activations to half precision: multiply by what its own dequantiser gives instead."""
    from gptqmodel.nn_modules.qlinear.torch_awq import AwqTorchLinear
    from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm

    for name, module in list(model.named_modules()):
        if isinstance(module, AwqTorchLinear):
            linear = torch.nn.Linear(module.in_features, module.out_features, bias=module.bias is not None)
            w = dequantize_gemm(module.qweight, module.qzeros, module.scales.float(), module.bits, module.group_size)
            linear.weight.data = w.T.contiguous()
            if module.bias is not None:
                linear.bias.data = module.bias.float()
            model.set_submodule(name, linear)


@torch.no_grad()
def logits(directory: Path) -> np.ndarray:
    from gptqmodel import BACKEND, GPTQModel

    awq = '"quant_method": "awq"' in (directory / "config.json").read_text()
    backend = BACKEND.AWQ_TORCH if awq else BACKEND.GPTQ_TORCH
    loaded = GPTQModel.load(str(directory), backend=backend, device="cpu", dtype=torch.float16)
    model = loaded.model.float().eval()  # its kernels load half precision only; the arithmetic is float32
    if awq:
        use_float32(model)
    tokens = torch.arange(3, 51).reshape(2, 24) * 7 % model.config.vocab_size
    return model(tokens).logits.float().numpy()


def main() -> None:
    results = {}
    for directory in map(Path, sys.argv[2:]):
        try:
            results[directory.name] = logits(directory)
        except (
            RuntimeError,
            ValueError,
            TypeError,
            KeyError,
            AttributeError,
            NotImplementedError,
            AssertionError,
        ) as e:
            results[directory.name] = np.array(f"{type(e).__name__}: {e}"[:300])
    np.savez(sys.argv[1], **results)


if __name__ == "__main__":
    main()
