"""One lean decoder for every supported family, over a flat list of tokens of many sequences.

The structure comes from the family's `Arch` (names, stages) and the Hugging Face config. Tokens of all sequences lie in
one list [N]; what a token may see is the business of the KV view passed in.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from formats.arch import Arch, is_transposed
from formats.checkpoint import Checkpoint
from formats.errors import DataError
from runtime.blocks import KVBatch
from runtime.linear import QuantizedLinear, choose_kernel

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from runtime.kernels.graph import Graph


@dataclass
class BatchInfo:
    """Which sequence each token of a flat batch belongs to. sequence: int32 [N], indices into the view's sequences."""

    sequence: Tensor


class KVView(Protocol):
    """The cache as one forward pass sees it: built by its owner for the tokens of this batch."""

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        """Store k, v [N, kv_heads, d] and let each query [N, heads, d] see its own sequence up to its own position.

        window: a token sees only the last `window` positions, itself included. softcap: logits become
        softcap * tanh(logits / softcap) before the softmax. Returns [N, heads, d].
        """


@dataclass(frozen=True)
class ModelConfig:
    """Shapes and constants of a decoder; `windows[i]` is layer i's sliding window or None."""

    family: str
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    hidden: int
    vocab_size: int
    max_positions: int
    windows: tuple[int | None, ...]
    eps: float
    activation: str
    attention_scale: float
    attention_softcap: float | None
    final_softcap: float | None
    embedding_scale: float
    norm_offset: float
    rotary: tuple[int | None, ...]  # per layer: which of the model's rotary tables, None without rotary positions


def _read_config(config: dict[str, Any], arch: Arch) -> tuple[ModelConfig, list[tuple[Tensor, float]]]:
    """Our config and the rotary frequencies (inv_freq [d/2], attention factor), one per kind of layer."""
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    hf = AutoConfig.for_model(**config)
    heads = hf.num_attention_heads
    head_dim = getattr(hf, "head_dim", None) or hf.hidden_size // heads
    layers = hf.num_hidden_layers
    kinds = getattr(hf, "layer_types", None) or ["full_attention"] * layers
    window = getattr(hf, "sliding_window", None)
    if hf.model_type == "mistral" and window:
        kinds = ["sliding_attention"] * layers
    gemma = hf.model_type.startswith("gemma")
    ropes: dict[str, tuple[Tensor, float]] = {}
    parameters: dict[str, Any] = getattr(hf, "rope_parameters", None) or {}
    for kind in sorted(set(kinds)) if parameters else []:
        nested = parameters.get(kind, parameters)
        rope_type = nested.get("rope_type", "default")
        if rope_type == "default":
            exponent = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
            ropes[kind] = 1.0 / nested["rope_theta"] ** exponent, 1.0
        elif rope_type in ("linear", "llama3", "yarn"):
            ropes[kind] = ROPE_INIT_FUNCTIONS[rope_type](hf, None, layer_type=kind if kind in parameters else None)
        else:
            raise DataError(
                f'rotary scaling "{rope_type}" is not supported', how_to_fix="use default, linear, llama3 or yarn"
            )
    order = list(ropes)
    ours = ModelConfig(
        family=arch.name,
        n_layers=layers,
        n_heads=heads,
        n_kv_heads=getattr(hf, "num_key_value_heads", None) or heads,
        head_dim=head_dim,
        hidden=hf.hidden_size,
        vocab_size=hf.vocab_size,
        max_positions=hf.max_position_embeddings,
        windows=tuple(window if kind == "sliding_attention" else None for kind in kinds),
        eps=getattr(hf, "rms_norm_eps", None) or hf.layer_norm_epsilon,
        activation=getattr(hf, "hidden_activation", None) or getattr(hf, "hidden_act", None) or hf.activation_function,
        attention_scale=(getattr(hf, "query_pre_attn_scalar", None) or head_dim) ** -0.5,
        attention_softcap=getattr(hf, "attn_logit_softcapping", None),
        final_softcap=getattr(hf, "final_logit_softcapping", None),
        embedding_scale=hf.hidden_size**0.5 if gemma else 1.0,
        norm_offset=arch.norm_offset,
        rotary=tuple(order.index(kind) if ropes else None for kind in kinds),
    )
    return ours, [ropes[kind] for kind in order]


class Rotary:
    """cos/sin tables [positions, d/2]. They grow by doubling: a row never depends on how far the table reaches."""

    def __init__(self, inv_freq: Tensor, factor: float, device: str) -> None:
        self.inv_freq, self.factor = inv_freq.float().to(device), factor
        self.cos = self.sin = torch.empty(0, inv_freq.numel(), device=device)

    def reach(self, positions: int) -> None:
        while len(self.cos) < positions:
            start = len(self.cos)
            angle = torch.arange(start, 2 * start or 256, device=self.inv_freq.device).float()[:, None] * self.inv_freq
            self.cos = torch.cat([self.cos, angle.cos() * self.factor])
            self.sin = torch.cat([self.sin, angle.sin() * self.factor])

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate halves: x [N, heads, d]."""
        cos, sin = self.cos[positions, None].to(x.dtype), self.sin[positions, None].to(x.dtype)
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class Norm:
    """RMS norm, or layer norm where the family stores a bias. `weight` already includes the family's offset."""

    def __init__(self, weight: Tensor, bias: Tensor | None, eps: float) -> None:
        self.weight, self.bias, self.eps = weight, bias, eps

    def __call__(self, x: Tensor) -> Tensor:
        if self.bias is not None:
            return F.layer_norm(x.float(), x.shape[-1:], self.weight, self.bias, self.eps).to(x.dtype)
        return F.rms_norm(x.float(), x.shape[-1:], self.weight, self.eps).to(x.dtype)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


@dataclass
class Block:
    """One decoder block. qkv: q, k, v or one fused linear; up: (gate, up) or (up,)."""

    qkv: list[QuantizedLinear]
    o: QuantizedLinear
    up: list[QuantizedLinear]
    down: QuantizedLinear
    attention_norm: Norm
    mlp_norm: Norm
    q_norm: Norm | None
    k_norm: Norm | None
    attention_post: Norm | None
    mlp_post: Norm | None

    def stages(self) -> list[list[QuantizedLinear]]:
        """Linears grouped by what they read, in data-flow order."""
        return [self.qkv, [self.o], self.up, [self.down]]


class Model:
    """A loaded decoder. `forward` returns the final-normed hidden states, `logits` applies the head to rows of them."""

    def __init__(self, checkpoint: Checkpoint, kernel: str, device: str, dtype: torch.dtype) -> None:
        if checkpoint.arch.experts:
            raise DataError(
                f"{checkpoint.arch.name} has routed experts", str(checkpoint.path), "run it in transformers"
            )
        self.path, self.device, self.dtype = checkpoint.path, device, dtype
        self.kernel = choose_kernel(kernel, device)
        self._save_tokenizer = checkpoint.save_tokenizer
        self.config, ropes = _read_config(checkpoint.config, checkpoint.arch)
        if self.config.activation not in ACTIVATIONS:
            raise DataError(f'activation "{self.config.activation}" is not supported', str(checkpoint.path))
        self.rotary = [Rotary(inv_freq, factor, device) for inv_freq, factor in ropes]
        self._names = set(checkpoint.names())
        arch = checkpoint.arch
        self.embedding = self._linear(checkpoint, arch.embedding)
        tied = f"{arch.head}.weight" not in self._names
        self.head = self.embedding if tied else self._linear(checkpoint, arch.head)
        self.positions = None
        if self.config.rotary[0] is None:
            table = next(name for name in checkpoint.names() if name.endswith("wpe.weight"))
            self.positions = checkpoint_float(checkpoint, table).to(device, dtype)
        self.norm = self._norm(checkpoint, arch.final_norm)
        self.blocks = [self._block(checkpoint, i) for i in range(self.config.n_layers)]

    def _linear(self, checkpoint: Checkpoint, name: str) -> QuantizedLinear:
        weight = checkpoint.read(f"{name}.weight")
        if isinstance(weight, Tensor) and is_transposed(checkpoint.arch, name):
            weight = weight.T.contiguous()  # a QTensor is [out, in] already
        bias = checkpoint_float(checkpoint, f"{name}.bias") if f"{name}.bias" in self._names else None
        return QuantizedLinear(weight, bias, kernel=self.kernel, device=self.device, dtype=self.dtype, name=name)

    def _norm(self, checkpoint: Checkpoint, name: str) -> Norm:
        weight = checkpoint_float(checkpoint, f"{name}.weight") + self.config.norm_offset
        bias = checkpoint_float(checkpoint, f"{name}.bias").to(self.device) if f"{name}.bias" in self._names else None
        return Norm(weight.to(self.device), bias, self.config.eps)

    def _block(self, checkpoint: Checkpoint, i: int) -> Block:
        prefix = checkpoint.arch.block.format(i=i)

        def norm(*candidates: str) -> Norm | None:
            found = [n for n in candidates if f"{prefix}.{n}.weight" in self._names]
            return self._norm(checkpoint, f"{prefix}.{found[0]}") if found else None

        qkv, o, up, down = (
            [self._linear(checkpoint, f"{prefix}.{name}") for name in stage] for stage in checkpoint.arch.stages
        )
        sandwich = f"{prefix}.pre_feedforward_layernorm.weight" in self._names  # gemma: norms before and after
        attention_norm = norm("input_layernorm", "ln_1")
        mlp_norm = norm("pre_feedforward_layernorm", "ln_2") or norm("post_attention_layernorm")
        assert attention_norm and mlp_norm, f"{checkpoint.arch.name} block without norms"
        return Block(
            qkv,
            o[0],
            up,
            down[0],
            attention_norm,
            mlp_norm,
            norm("self_attn.q_norm"),
            norm("self_attn.k_norm"),
            norm("post_attention_layernorm") if sandwich else None,
            norm("post_feedforward_layernorm") if sandwich else None,
        )

    @cached_property
    def graph(self) -> "Graph | None":
        """All blocks as one compiled call, where every linear allows it."""
        if self.dtype != torch.float32 or not all(linear.kernel.fusable for linear in self.linears()):
            return None
        from runtime.kernels.graph import Graph

        return Graph(self)

    @cached_property
    def tokenizer(self) -> "PreTrainedTokenizerBase":
        """The checkpoint's tokenizer, through transformers."""
        import tempfile

        from transformers import AutoTokenizer

        with tempfile.TemporaryDirectory() as folder:
            self._save_tokenizer(Path(folder))
            return AutoTokenizer.from_pretrained(folder)

    def forward(self, tokens: Tensor, positions: Tensor, kv: KVView, batch: BatchInfo) -> Tensor:
        """tokens, positions: int64 [N]. Returns hidden states after the final norm, [N, hidden]."""
        config = self.config
        if len(positions):
            for rotary in self.rotary:
                rotary.reach(int(positions.max()) + 1)
        h = self.embedding.rows(tokens) * config.embedding_scale
        if self.positions is not None:
            h = h + self.positions[positions]
        if self.graph is not None and isinstance(kv, KVBatch):
            return self.graph(h, kv)
        for i, block in enumerate(self.blocks):
            y = self._attention(i, block, block.attention_norm(h), positions, kv)
            h = h + (block.attention_post(y) if block.attention_post else y)
            x = block.mlp_norm(h)
            act = ACTIVATIONS[config.activation]
            y = act(block.up[0](x))
            y = block.down(y * block.up[1](x) if len(block.up) == 2 else y)
            h = h + (block.mlp_post(y) if block.mlp_post else y)
        return self.norm(h)

    def _attention(self, i: int, block: Block, x: Tensor, positions: Tensor, kv: KVView) -> Tensor:
        config = self.config
        heads, kv_heads, d = config.n_heads, config.n_kv_heads, config.head_dim
        qkv = torch.cat([linear(x) for linear in block.qkv], dim=-1)
        q, k, v = (part.reshape(len(x), -1, d) for part in qkv.split([heads * d, kv_heads * d, kv_heads * d], dim=-1))
        q = block.q_norm(q) if block.q_norm else q
        k = block.k_norm(k) if block.k_norm else k
        table = config.rotary[i]
        if table is not None:
            q, k = self.rotary[table](q, positions), self.rotary[table](k, positions)
        y = kv.attend(i, q, k, v, config.attention_scale, config.windows[i], config.attention_softcap)
        return block.o(y.reshape(len(x), heads * d))

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [rows, vocab] from final-normed hidden states [rows, hidden]."""
        logits = self.head(hidden).float()
        cap = self.config.final_softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def linears(self) -> Sequence[QuantizedLinear]:
        """Every linear, in data-flow order; the head last."""
        return [linear for block in self.blocks for stage in block.stages() for linear in stage] + [self.head]


def checkpoint_float(checkpoint: Checkpoint, name: str) -> Tensor:
    """A norm, bias or position table as float32."""
    value = checkpoint.read(name)
    return value.float() if isinstance(value, Tensor) else value.dequantize()


def load_model(
    source: "Checkpoint | str | Path", kernel: str = "auto", device: str = "cpu", dtype: torch.dtype = torch.float32
) -> Model:
    """Load a checkpoint for inference; packed weights stay packed.

    kernel: a name registered in `runtime.linear`, "auto" (exact) or "fast". dtype: of activations. Raises DataError
    for families or variants that this decoder does not know.
    """
    if isinstance(source, Checkpoint):
        return Model(source, kernel, device, dtype)
    from formats.containers import open_checkpoint

    with open_checkpoint(source) as checkpoint:
        return Model(checkpoint, kernel, device, dtype)
