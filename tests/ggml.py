"""ggml's own quantisers through ctypes: the importance-weighted ones that llama-quantize uses."""

import ctypes
import importlib.util
from pathlib import Path

import gguf
import numpy as np
import torch
from torch import Tensor


class _InitParams(ctypes.Structure):
    _fields_ = [("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool)]


def bundled_library() -> Path | None:
    """The libggml.so that comes with ik-llama-cpp-python, when installed."""
    spec = importlib.util.find_spec("ik_llama_cpp")
    return Path(spec.origin).parent / "lib" / "libggml.so" if spec and spec.origin else None


class Ggml:
    """Quantisers of one shared library (a libggml.so, or libggml-base.so in newer builds)."""

    def __init__(self, path: Path) -> None:
        self.library = ctypes.CDLL(str(path))
        self.library.ggml_init.argtypes, self.library.ggml_init.restype = [_InitParams], ctypes.c_void_p
        self.library.ggml_init(_InitParams(1 << 20, None, False))  # fills the fp16 tables
        pointer, count = ctypes.c_void_p, ctypes.c_int64
        self.library.ggml_quantize_chunk.restype = ctypes.c_size_t
        self.library.ggml_quantize_chunk.argtypes = [ctypes.c_int, pointer, pointer, count, count, count, pointer]

    def quantize(self, name: str, w: Tensor, importance: Tensor | None) -> Tensor:
        """w float32 [out, n] through type `name` and back; importance float32 [n] or None."""
        kind = gguf.GGMLQuantizationType[name.upper()]
        width, size = gguf.GGML_QUANT_SIZES[kind]
        stored = np.zeros((len(w), w.shape[1] // width * size), dtype=np.uint8)
        weight = None if importance is None else importance.data_ptr()
        self.library.ggml_quantize_chunk(int(kind), w.data_ptr(), stored.ctypes.data, 0, *w.shape, weight)
        return torch.from_numpy(gguf.quants.dequantize(stored, kind))
