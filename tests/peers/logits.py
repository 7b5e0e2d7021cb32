"""Runs in a peer's own environment: float32 logits of GPTQ, AWQ and bitsandbytes directories, on the CPU.

    python logits.py OUT.npz DIR [DIR ...]

Writes one array per directory, under its name; a directory that cannot be loaded gets its error message instead.
gptqmodel reads GPTQ and AWQ, transformers with bitsandbytes reads nf4. Their AWQ and nf4 kernels round activations, so
those are judged by the weights that their own dequantisers give; GPTQ runs through gptqmodel's kernel.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

torch.set_num_threads(1)


def load_gptqmodel(directory: Path, awq: bool) -> torch.nn.Module:
    from gptqmodel import BACKEND, GPTQModel
    from gptqmodel.nn_modules.qlinear.torch_awq import AwqTorchLinear
    from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm

    backend = BACKEND.AWQ_TORCH if awq else BACKEND.GPTQ_TORCH
    model = GPTQModel.load(str(directory), backend=backend, device="cpu", dtype=torch.float16).model.float()

    def decode(m: Any) -> torch.Tensor:
        return dequantize_gemm(m.qweight, m.qzeros, m.scales.float(), m.bits, m.group_size).T

    replace(model, lambda module: isinstance(module, AwqTorchLinear), decode)
    return model


def load_bitsandbytes(directory: Path) -> torch.nn.Module:
    from bitsandbytes.functional import dequantize_4bit
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, device_map="cpu")

    def decode(m: Any) -> torch.Tensor:
        m.weight.quant_state.dtype = torch.float32
        return dequantize_4bit(m.weight.data, m.weight.quant_state)

    replace(model, lambda module: hasattr(getattr(module, "weight", None), "quant_state"), decode)
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.float()
    return model


def replace(model: Any, chosen: Callable[[Any], bool], decode: Callable[[Any], torch.Tensor]) -> None:
    for name, module in list(model.named_modules()):
        if chosen(module):
            w = decode(module)
            linear = torch.nn.Linear(w.shape[1], w.shape[0], bias=module.bias is not None)
            linear.weight.data = w.contiguous()
            if module.bias is not None:
                linear.bias.data = module.bias.data.float()
            model.set_submodule(name, linear)


@torch.no_grad()
def logits(directory: Path) -> np.ndarray:
    method = json.loads((directory / "config.json").read_text())["quantization_config"]["quant_method"]
    model: Any = (
        load_bitsandbytes(directory) if method == "bitsandbytes" else load_gptqmodel(directory, method == "awq")
    )
    tokens = torch.arange(3, 51).reshape(2, 24) * 7 % model.config.vocab_size
    return model.eval()(tokens).logits.float().numpy()


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
