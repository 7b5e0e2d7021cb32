"""llama.cpp at work, mainline's or ik's, in a process of its own: a wrong file may abort it.

Run as a program, `python llama_engine.py FILE.gguf OUT.npz < REQUEST` uses whichever of llama-cpp-python and
ik-llama-cpp-python its interpreter has. Keys and values are kept in float32 and flash attention is off. Kernels round
activations to 8 bits, with one exception: mainline gives matrix products of 32 rows or more to its BLAS backend, when
that is installed, and it multiplies the decoded weights in float32.
"""

import ctypes
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np


def ask(file: Path, out: Path, python: str | Path = sys.executable, **request: Any) -> dict[str, Any]:
    """texts: list of str; rows: token rows; generate: how many tokens. Answers "tokens-i" of text i (special tokens
    parsed, BOS as the file says), "logits-i" float32 [n, vocab] of row i, "greedy-i", the tokens that follow row i."""
    command = [str(python), __file__, str(file), str(out)]
    done = subprocess.run(command, input=json.dumps(request), capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise RuntimeError(f"exit code {done.returncode}: {done.stderr[-800:]}")
    return dict(np.load(out))


def binding() -> Any:
    """The low-level interface of the installed engine; both follow llama.h."""
    try:
        from llama_cpp import llama_cpp as api
    except ModuleNotFoundError:
        from ik_llama_cpp import _ctypes_api as api

        return api
    blas = Path(api.__file__).parent / "lib" / "libggml-blas.so"
    if blas.exists():
        load = ctypes.CDLL(str(blas.with_name("libggml.so"))).ggml_backend_load
        load.argtypes, load.restype = [ctypes.c_char_p], ctypes.c_void_p
        assert load(str(blas).encode()), "the BLAS backend does not load"
    return api


class Engine:
    def __init__(self, file: str) -> None:
        self.api = api = binding()
        api.llama_backend_init()
        params = api.llama_model_default_params()
        self.mainline = hasattr(params, "use_extra_bufts")
        # ik_llama.cpp 0.1.5 gets 32 rows of q4_1 or more wrong where the width is no multiple of 128.
        self.chunk = 1 << 20 if self.mainline else 24
        if self.mainline:
            params.use_extra_bufts = False  # repacked weights never reach BLAS
        self.model = api.llama_model_load_from_file(file.encode(), params)
        if not self.model:
            raise SystemExit("the file does not load")
        self.vocab = api.llama_model_get_vocab(self.model)

    def tokenize(self, text: str) -> list[int]:
        buffer = (ctypes.c_int32 * (len(text.encode()) + 8))()
        owner = self.vocab if self.mainline else self.model
        count = self.api.llama_tokenize(owner, text.encode(), len(text.encode()), buffer, len(buffer), True, True)
        return list(buffer[:count])

    def start(self, length: int) -> None:
        """A fresh context for `length` tokens."""
        params = self.api.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = max(64, length)
        params.n_threads = params.n_threads_batch = 1
        params.type_k = 0  # float32
        if self.mainline:
            params.type_v = params.flash_attn_type = 0
        else:
            params.flash_attn = False  # its values are float16 then
        self.context = self.api.llama_init_from_model(self.model, params)
        assert self.context, "no context"

    def decode(self, tokens: list[int], at: int) -> np.ndarray:
        """Logits [n, vocab] of tokens at positions at, at + 1, .."""
        batch = self.api.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i] = token, at + i
            batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = 1, 0, 1
        assert self.api.llama_decode(self.context, batch) == 0, "decoding failed"
        width = self.api.llama_vocab_n_tokens(self.vocab)
        rows = [self.api.llama_get_logits_ith(self.context, i) for i in range(len(tokens))]
        return np.stack([np.ctypeslib.as_array(row, (width,)).copy() for row in rows])

    def greedy(self, row: list[int], count: int) -> tuple[np.ndarray, list[int]]:
        """Logits of the row, and the tokens that follow it, one step each."""
        self.start(len(row) + count)
        logits = np.concatenate([self.decode(row[i : i + self.chunk], i) for i in range(0, len(row), self.chunk)])
        tokens: list[int] = []
        last = logits[-1]
        while len(tokens) < count:
            tokens.append(int(last.argmax()))
            last = self.decode(tokens[-1:], len(row) + len(tokens) - 1)[-1]
        self.api.llama_free(self.context)
        return logits, tokens


def main() -> None:
    request = json.load(sys.stdin)
    engine = Engine(sys.argv[1])
    found: dict[str, Any] = {}
    for i, text in enumerate(request.get("texts", [])):
        found[f"tokens-{i}"] = np.array(engine.tokenize(text))
    for i, row in enumerate(request.get("rows", [])):
        found[f"logits-{i}"], found[f"greedy-{i}"] = engine.greedy(row, request.get("generate", 0))
    np.savez(sys.argv[2], **found)


if __name__ == "__main__":
    main()
