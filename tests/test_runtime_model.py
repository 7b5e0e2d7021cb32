"""The decoder against transformers, family by family, on random tiny models."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from formats.arch import arch_of
from formats.checkpoint import Checkpoint
from formats.grids import parse_grid
from formats.qtensor import QTensor
from runtime.blocks import BlockManager, BlockTable, KVCache
from runtime.kernels.reference import ContiguousKV
from runtime.model import BatchInfo, Model, load_model

SHAPE = dict(
    vocab_size=133,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=128,
)
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
GPT2 = dict(vocab_size=133, n_embd=64, n_layer=3, n_head=4, n_positions=128)

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **SHAPE},
    "llama-biased-tied": {
        "model_type": "llama", "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, **SHAPE,
    },
    "llama-llama3": {"model_type": "llama", "rope_parameters": LLAMA3, **SHAPE},
    "llama-linear": {"model_type": "llama", "rope_parameters": LINEAR, **SHAPE},
    "llama-yarn": {"model_type": "llama", "rope_parameters": YARN, **SHAPE},
    "mistral": {"model_type": "mistral", "sliding_window": 8, **SHAPE},
    "qwen2": {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1, **SHAPE},
    "qwen3": {"model_type": "qwen3", **SHAPE},
    "gemma3": {
        "model_type": "gemma3_text", "sliding_window": 8, "query_pre_attn_scalar": 24, "final_logit_softcapping": 5.0,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        **SHAPE,
    },
    "gpt2": {"model_type": "gpt2", **GPT2},
}  # fmt: skip


class MemoryCheckpoint(Checkpoint):
    """A transformers model as a Checkpoint; `grid` quantises its linears by rounding."""

    def __init__(self, model: torch.nn.Module, config: dict[str, Any], grid: str | None = None) -> None:
        self.path, self.container = Path("memory"), "memory"
        self.config, self.arch = config, arch_of(config)
        self.tensors: dict[str, Tensor | QTensor] = {}
        tied = config.get("tie_word_embeddings", config["model_type"] in ("gpt2", "gemma3_text"))
        linears = {f"{n}.weight" for i in range(3) for n in self.arch.linears(i)}
        for name, value in model.state_dict().items():
            if name == "lm_head.weight" and tied:
                continue
            w = value.detach().float()
            if grid and name in linears:
                g = parse_grid(grid)
                w = w.T.contiguous() if model.config.model_type == "gpt2" else w
                params = g.fit(w)
                self.tensors[name] = QTensor(g, g.encode(w, params), params)
            else:
                self.tensors[name] = w

    def names(self) -> list[str]:
        return list(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def stored_as(self, name: str) -> Any:
        value = self.tensors[name]
        return value.grid if isinstance(value, QTensor) else "float32"

    def read(self, name: str) -> "Tensor | QTensor":
        return self.tensors[name]

    def save_tokenizer(self, out: Path) -> None:
        """Nothing to write."""


def random_model(family: str) -> torch.nn.Module:
    torch.manual_seed(0)
    config = dict(FAMILIES[family])
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), attn_implementation="eager").eval()
    for p in model.parameters():  # far from the initial values, so that every norm, bias and scale matters
        p.data = torch.randn_like(p) * 0.15 + (0.5 if p.ndim == 1 else 0)
    return model.float()


def run(model: Model, rows: list[Tensor], chunk: int | None = None) -> list[Tensor]:
    """Logits of several sequences, all in one flat batch (or in chunks of that many tokens of each)."""
    c = model.config
    kv = ContiguousKV(c.n_layers, len(rows), 64, c.n_kv_heads, c.head_dim)
    longest = max(len(r) for r in rows)
    pieces: list[list[Tensor]] = [[] for _ in rows]
    for start in range(0, longest, chunk or longest):
        part = [r[start : start + (chunk or longest)] for r in rows]
        sequence = torch.tensor([i for i, p in enumerate(part) for _ in p], dtype=torch.int32)
        positions = torch.tensor([start + j for p in part for j in range(len(p))])
        hidden = model.forward(torch.cat(part), positions, kv.view(positions, sequence), BatchInfo(sequence))
        logits = model.logits(hidden)
        for i in range(len(rows)):
            pieces[i].append(logits[sequence == i])
    return [torch.cat(p) for p in pieces]


ROWS = [
    torch.tensor([3, 17, 99, 5, 62, 8, 120, 44, 1, 2, 77, 31, 9, 54, 100, 23, 7, 61]),
    torch.tensor([5, 6, 7, 132, 0]),
]


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_logits_equal_transformers(family: str) -> None:
    hf = random_model(family)
    model = load_model(MemoryCheckpoint(hf, FAMILIES[family]), kernel="reference")
    for tokens, logits in zip(ROWS, run(model, ROWS, chunk=7), strict=True):
        expected = hf(tokens[None]).logits[0]
        assert (logits - expected).abs().max() < 1e-3
        assert expected.std() > 0.1


def run_paged(model: Model, rows: list[Tensor], chunk: int = 64, dtype: str = "float32") -> list[Tensor]:
    """Logits of all sequences over the paged cache, `chunk` tokens of each at a time."""
    c = model.config
    cache, manager = KVCache(c.n_layers, 16, c.n_kv_heads, c.head_dim, dtype=dtype), BlockManager(16, 16, False)
    tables = [BlockTable() for _ in rows]
    pieces: list[list[Tensor]] = [[] for _ in rows]
    for start in range(0, max(map(len, rows)), chunk):
        part = {i: r[start : start + chunk] for i, r in enumerate(rows) if start < len(r)}
        for i, tokens in part.items():
            assert manager.reserve(tables[i], start + len(tokens)) == []
        batch = cache.batch([tables[i] for i in part], [len(tokens) for tokens in part.values()])
        tokens = torch.cat(list(part.values()))
        logits = model.logits(model.forward(tokens, batch.positions.long(), batch, BatchInfo(batch.sequence)))
        for (i, tokens), piece in zip(part.items(), logits.split([len(t) for t in part.values()]), strict=True):
            tables[i].length += len(tokens)
            pieces[i].append(piece)
    return [torch.cat(p) for p in pieces]


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_compiled_step_equals_transformers_and_no_row_depends_on_another(family: str) -> None:
    hf = random_model(family)
    model = load_model(MemoryCheckpoint(hf, FAMILIES[family]), kernel="cpu")
    assert model.graph is not None
    together = run_paged(model, ROWS)
    for tokens, logits in zip(ROWS, together, strict=True):
        assert (logits - hf(tokens[None]).logits[0]).abs().max() < 1e-3
        for chunk in (1, 7):
            assert torch.equal(run_paged(model, [tokens], chunk)[0], logits), f"chunks of {chunk} change bits"


@pytest.mark.parametrize("family", ["llama-biased-tied", "gemma3", "gpt2"])
@torch.no_grad()
def test_int8_activations_stay_near_and_exact_in_batches(family: str) -> None:
    checkpoint = MemoryCheckpoint(random_model(family), FAMILIES[family], grid="q8_0")
    fast, plain = load_model(checkpoint, kernel="cpu-int8"), load_model(checkpoint, kernel="cpu")
    together = run_paged(fast, ROWS)
    for tokens, logits in zip(ROWS, together, strict=True):
        want = run_paged(plain, [tokens])[0]
        assert 0 < (logits - want).norm() / want.norm() < 0.1
        assert torch.equal(run_paged(fast, [tokens], 7)[0], logits)
