"""Qwen 2 and 2.5 (dense)."""

from dataclasses import replace

from formats.arch.llama import ARCH as LLAMA

ARCH = replace(LLAMA, name="qwen2", model_types=("qwen2",), gguf_name="qwen2", rotary_permuted=())
