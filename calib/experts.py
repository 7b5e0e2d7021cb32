"""Routed experts as separate linears: transformers fuses them in 3-D parameters, calibration needs them one by one."""

from typing import Any

import torch
from torch import Tensor, nn

from formats.arch import Arch


def module_path(arch: Arch, name: str) -> str:
    """Where transformers keeps, in its block module, what checkpoints call `name`."""
    for disk, module in arch.extra.get("module_names", {}).items():
        if name.startswith(disk):
            return module + name[len(disk) :]
    return name


def checkpoint_name(arch: Arch, path: str) -> str:
    """The inverse of `module_path`."""
    for disk, module in arch.extra.get("module_names", {}).items():
        if path.startswith(module):
            return disk + path[len(module) :]
    return path


def _count(config: dict[str, Any]) -> int:
    return int(config.get("num_local_experts") or config.get("num_experts") or 0)


def expand_stages(arch: Arch, config: dict[str, Any]) -> tuple[tuple[str, ...], ...]:
    """The family's stages with {e} spelled out for every routed expert."""
    return tuple(
        tuple(
            name.replace("{e}", str(e)) for e in (range(_count(config)) if "{e}" in stage[0] else [0]) for name in stage
        )
        for stage in arch.stages
    )


def expand_pairs(arch: Arch, config: dict[str, Any]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """The family's scale pairs with {e} spelled out for every routed expert."""
    return tuple(
        (operator.replace("{e}", str(e)), tuple(name.replace("{e}", str(e)) for name in targets))
        for operator, targets in arch.scale_pairs
        for e in (range(_count(config)) if "{e}" in operator else [0])
    )


class Expert(nn.Module):
    """One gated feed-forward expert; its three linears carry the names that checkpoints use."""

    def __init__(self, names: tuple[str, str, str], hidden: int, inner: int, activation: nn.Module) -> None:
        super().__init__()
        self.gate, self.up, self.down = names
        self.add_module(self.gate, nn.Linear(hidden, inner, bias=False))
        self.add_module(self.up, nn.Linear(hidden, inner, bias=False))
        self.add_module(self.down, nn.Linear(inner, hidden, bias=False))
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        linear = self._modules
        return linear[self.down](self.activation(linear[self.gate](x)) * linear[self.up](x))  # type: ignore[misc]


class Experts(nn.ModuleList):
    """Takes the place of transformers' fused experts module, with the same call."""

    def forward(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden [tokens, hidden], top_k_index and top_k_weights [tokens, k] -> [tokens, hidden]."""
        out = torch.zeros_like(hidden)
        for e, expert in enumerate(self):
            token, slot = torch.where(top_k_index == e)
            if len(token):
                y = expert(hidden[token]) * top_k_weights[token, slot, None]
                out.index_add_(0, token, y.to(out.dtype))
        return out


def split_experts(block: nn.Module, arch: Arch) -> nn.Module:
    """Replace a block's fused experts, if it has any, by separate ones. Weights are left uninitialised."""
    if arch.experts is None:
        return block
    names = [name.rpartition(".")[2] for stage in arch.stages for name in stage if "{e}" in name]
    gate, up, down = names
    path = module_path(arch, arch.experts.rpartition(".")[0])
    fused: Any = block.get_submodule(path)
    count, width, hidden = fused.gate_up_proj.shape
    experts = (Expert((gate, up, down), hidden, width // 2, fused.act_fn) for _ in range(count))
    block.set_submodule(path, Experts(experts))
    return block
