"""Model families as data: names, structure, and how Hugging Face and GGUF name the same tensors."""

from dataclasses import dataclass, field
from typing import Any

from formats.errors import DataError
from formats.registry import Registry, did_you_mean


@dataclass(frozen=True)
class Arch:
    """Names and structure of one model family. All module names below a block are relative to it. Names are those of
    checkpoints, "{e}" stands for each routed expert.

    model_types  values of config.json's "model_type" that this describes
    gguf_name    general.architecture in GGUF files
    block        path of a decoder block, with {i}
    stages       the block's quantisable linears, grouped in the order data flows through them; the members of one
                 stage see the same input
    fused        groups that serving engines fuse into one matrix: they must share a grid
    scale_pairs  (previous operator, linears whose input it scales): where AWQ may fold a scale
    tensor_names Hugging Face name (without ".weight"/".bias", with {i}) -> GGUF name (likewise, "blk.{i}.attn_q"; a
                 name with {e} leads to a stacked tensor)
    rotary_permuted  linears whose rows GGUF reorders for its rotary layout
    conv1d       linears stored transposed, [in, out], by Hugging Face; a QTensor of one is [out, in] as any other
    norm_offset  added to norm weights in GGUF (gemma stores w, GGUF stores 1 + w)
    experts      path of the routed experts in a block ("mlp.experts.{e}") or None
    """

    name: str
    model_types: tuple[str, ...]
    gguf_name: str
    block: str
    stages: tuple[tuple[str, ...], ...]
    fused: tuple[tuple[str, ...], ...]
    scale_pairs: tuple[tuple[str, tuple[str, ...]], ...]
    tensor_names: dict[str, str]
    embedding: str = "model.embed_tokens"
    head: str = "lm_head"
    final_norm: str = "model.norm"
    rotary_permuted: tuple[str, ...] = ()
    conv1d: tuple[str, ...] = ()
    norm_offset: float = 0.0
    experts: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)  # flags that only one reader of this data needs

    def linears(self, i: int, experts: int = 0) -> list[str]:
        """Full names of block i's quantisable linears, in data-flow order, with those of all `experts`."""
        block = self.block.format(i=i)
        return [
            f"{block}.{name.format(e=e)}"
            for stage in self.stages
            for e in range(experts if "{e}" in stage[0] else 1)
            for name in stage
        ]


def is_transposed(arch: Arch, name: str) -> bool:
    """Does Hugging Face store this weight as [in, out] (Conv1D)? A QTensor of it is [out, in] all the same."""
    return any(name.removesuffix(".weight").endswith(f".{linear}") for linear in arch.conv1d)


ARCHITECTURES = Registry(
    "architecture",
    {
        "llama": "formats.arch.llama:ARCH",
        "qwen2": "formats.arch.qwen2:ARCH",
        "qwen3": "formats.arch.qwen3:ARCH",
        "gemma3": "formats.arch.gemma3:ARCH",
        "gpt2": "formats.arch.gpt2:ARCH",
        "mixtral": "formats.arch.mixtral:ARCH",
        "qwen3_moe": "formats.arch.qwen3_moe:ARCH",
    },
)

MODEL_TYPES = {  # config.json's "model_type" -> registered name
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma3_text": "gemma3",
    "gpt2": "gpt2",
    "mixtral": "mixtral",
    "qwen3_moe": "qwen3_moe",
}


def arch_of(config: dict[str, Any], where: str = "") -> Arch:
    """The family of a Hugging Face config."""
    model_type = str(config.get("model_type", ""))
    if model_type not in MODEL_TYPES:
        raise DataError(
            f'architecture "{model_type}" is not supported',
            where=where,
            how_to_fix=f"{did_you_mean(model_type, MODEL_TYPES)} (supported: {', '.join(sorted(MODEL_TYPES))})",
        )
    arch: Arch = ARCHITECTURES[MODEL_TYPES[model_type]]
    return arch
