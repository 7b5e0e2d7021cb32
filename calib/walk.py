"""The block-by-block walk: load a block, run it on the calibration set, collect, replace weights, propagate, free.

Transformers' own modules do the computing, so any decoder it knows can be compressed. Only one block's weights are in
memory at a time; between blocks only the hidden states of the calibration tokens survive.
"""

import copy
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.initialization import no_init_weights

from calib.experts import checkpoint_name, expand_pairs, expand_stages, module_path, split_experts
from calib.precision import matmul_dtype
from calib.stats import InputStats
from formats.arch import is_transposed
from formats.checkpoint import Checkpoint
from formats.qtensor import QTensor

PROBE_TOKENS = 1024  # tokens on which variants of a block are compared


class _Stop(BaseException):
    """Ends a partial forward once the inputs of the stage have been seen."""


class _Recorder(nn.Module):
    """Stands in for a decoder block: notes how it is called and passes the hidden states on."""

    def __init__(self) -> None:
        super().__init__()
        self.call: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self.attention_type = "full_attention"

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self.call = (args, kwargs)
        return hidden


def hf_config(checkpoint: Checkpoint) -> PreTrainedConfig:
    """The checkpoint's configuration as a transformers object."""
    options = {k: v for k, v in checkpoint.config.items() if k not in ("model_type", "transformers_version")}
    return AutoConfig.for_model(checkpoint.config["model_type"], **options)


class Store:
    """Hidden states of all samples, [samples, length, hidden]; a memory-mapped file when over the budget."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, budget: int, spill_dir: Path | None) -> None:
        numel = int(torch.Size(shape).numel())
        self.spilled = numel * dtype.itemsize > budget
        if self.spilled:
            self._file = tempfile.NamedTemporaryFile(dir=spill_dir, prefix="activations-", suffix=".bin")  # noqa: SIM115
            self.data = torch.from_file(self._file.name, shared=True, size=numel, dtype=dtype).view(shape)
        else:
            self.data = torch.empty(shape, dtype=dtype)


class Walk:
    """Runs a checkpoint over calibration rows one decoder block at a time.

    rows: int64 [samples, length]. Weights and the residual stream are float32; matrix products run in `dtype`: bfloat16
    where that is fast, unless `exact`. activation_budget: bytes of hidden states kept in memory before they spill into
    spill_dir.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        rows: Tensor,
        *,
        device: str = "cpu",
        exact: bool = False,
        batch_tokens: int = 8192,
        activation_budget: int = 2 << 30,
        spill_dir: Path | None = None,
    ) -> None:
        self.checkpoint, self.arch, self.device = checkpoint, checkpoint.arch, torch.device(device)
        self.dtype = torch.float32 if exact else matmul_dtype(self.device)
        self.config = hf_config(checkpoint)
        self.n_blocks: int = self.config.num_hidden_layers
        self.batch = max(1, batch_tokens // rows.shape[1])
        self._build_skeleton()
        self._calls: dict[int, list[tuple[tuple[Any, ...], dict[str, Any]]]] = {}
        hidden = self.config.hidden_size
        self._stores: dict[str, Store] = {}
        self._budget, self._spill_dir = activation_budget, spill_dir
        self.hidden = self.store("hidden", (*rows.shape, hidden), torch.float32)
        for at in self.batches():
            self.hidden[at] = self._embed(rows[at].to(self.device))
        self.probe_rows = slice(0, max(1, min(len(rows), PROBE_TOKENS // rows.shape[1])))
        self._embed(rows[self.probe_rows].to(self.device))
        self.embed_scale = float(getattr(self._embedding[0], "embed_scale", 1.0))  # of looked-up embeddings (gemma)
        self._embedding.to("meta")

    def store(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Room for one number per token and channel that every block uses again; uninitialised."""
        if name not in self._stores or self._stores[name].data.shape != shape:
            self._stores[name] = Store(shape, dtype, self._budget, self._spill_dir)
        return self._stores[name].data

    def batches(self) -> Iterator[slice]:
        samples = len(self.hidden)
        return (slice(a, min(a + self.batch, samples)) for a in range(0, samples, self.batch))

    def _build_skeleton(self) -> None:
        """The model with a single block: embeddings and rotary tables, whose buffers only a real constructor fills."""
        small = copy.deepcopy(self.config)
        small.num_hidden_layers = 1
        if getattr(small, "layer_types", None):
            small.layer_types = small.layer_types[:1]
        small.tie_word_embeddings = False  # the head is never run: keep it off the memory
        with no_init_weights():
            model = AutoModelForCausalLM.from_config(small, attn_implementation="sdpa", dtype=torch.float32)
        model.lm_head.to("meta")
        self._skeleton = model.eval()
        path, _, _ = self.arch.block.rpartition(".")
        block = model.get_submodule(f"{path}.0")
        self._block_class, self.attn_implementation = type(block), model.config._attn_implementation
        self.config._attn_implementation = self.attn_implementation
        base: Any = model.base_model
        base.config = self.config
        if hasattr(base, "rotary_emb"):  # its tables depend on the kinds of all layers
            base.rotary_emb = type(base.rotary_emb)(self.config)
        self._recorders = [_Recorder() for _ in range(self.n_blocks)]
        model.set_submodule(path, nn.ModuleList(self._recorders))
        self._embedding = nn.ModuleList(m for m in model.base_model.children() if isinstance(m, nn.Embedding))
        self._load(model, [n for n, _ in model.base_model.named_parameters() if "norm" not in n and "ln_f" not in n])
        model.base_model.to(self.device)

    def _load(self, model: Any, names: list[str]) -> None:
        prefix = model.base_model_prefix + "."
        state = {prefix + n: self.checkpoint.read_dense(prefix + n) for n in names}
        model.load_state_dict(state, strict=False)

    @torch.no_grad()
    def _embed(self, tokens: Tensor) -> Tensor:
        """Hidden states that enter block 0; records along the way how each block is called for this batch size."""
        final_hidden = None

        def keep(_: nn.Module, args: tuple[Any, ...]) -> None:
            nonlocal final_hidden
            final_hidden = args[0]

        norm = self._skeleton.get_submodule(self.arch.final_norm)
        handle = norm.register_forward_pre_hook(keep)
        self._skeleton.base_model(tokens, use_cache=False)
        handle.remove()
        calls = [r.call for r in self._recorders]
        assert all(c is not None for c in calls) and final_hidden is not None
        self._calls.setdefault(len(tokens), calls)  # type: ignore[arg-type]
        return final_hidden

    @contextmanager
    def block(self, i: int) -> Iterator["Block"]:
        """Block i with its weights loaded; freed on exit."""
        with no_init_weights():
            module = self._block_class(self.config, layer_idx=i).float()
        module = split_experts(module, self.arch).eval().requires_grad_(self.dtype != torch.float32)
        prefix = self.arch.block.format(i=i)
        for name, parameter in module.named_parameters():
            parameter.data.copy_(self.checkpoint.read_dense(f"{prefix}.{checkpoint_name(self.arch, name)}"))
        yield Block(self, module.to(self.device), i)
        for child in module.modules():  # what stands in for a forward refers to the block: without this, a cycle
            child.__dict__.pop("forward", None)

    def final_norm(self) -> Any:
        """The norm before the head, with its weights."""
        norm = self._skeleton.get_submodule(self.arch.final_norm)
        for name, parameter in norm.named_parameters():
            parameter.data = self.checkpoint.read_dense(f"{self.arch.final_norm}.{name}").to(self.device)
        return norm.requires_grad_(False)

    def head_stats(self) -> InputStats:
        """Inputs of the head: the final norm of the last block's outputs."""
        norm, stats = self.final_norm(), InputStats(self.hidden.shape[-1], self.device)
        for at in self.batches():
            stats.add(norm(self.hidden[at].to(self.device)))
        stats.finish()
        return stats

    def precision(self) -> torch.autocast:
        """Matrix products in `dtype`. Weights that require gradients are cast once per context."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.dtype == torch.bfloat16)

    def call(self, module: nn.Module, i: int, hidden: Tensor) -> Tensor:
        """Block i on hidden states [batch, length, hidden]; the batch is one of `batches`."""
        args, kwargs = self._calls[len(hidden)][i]
        with self.precision():
            out = module(hidden, *args, **kwargs)
        return out[0] if isinstance(out, tuple) else out

    @torch.no_grad()
    def run_block(self, module: nn.Module, i: int, at: slice) -> Tensor:
        """Block i applied to the stored hidden states of one batch, [samples, length, hidden]."""
        return self.call(module, i, self.hidden[at].to(self.device))


@dataclass
class Probe:
    """What a block does to the probe rows: its output, and what its linears see, float32 [tokens, in] by name."""

    output: Tensor
    inputs: dict[str, Tensor]


class Block:
    """One loaded decoder block of a walk."""

    def __init__(self, walk: Walk, module: nn.Module, index: int) -> None:
        self.walk, self.module, self.index = walk, module, index
        self.prefix = walk.arch.block.format(i=index)
        self.stages = expand_stages(walk.arch, walk.checkpoint.config)
        config = walk.config
        self.head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self._done: set[str] = set()
        self._kept: dict[str, Tensor] = {}

    def linear(self, name: str) -> Any:
        return self.module.get_submodule(module_path(self.walk.arch, name))

    def weight(self, name: str) -> Tensor:
        """A linear's weight, float32 [out, in]."""
        weight = self.linear(name).weight.detach()
        return weight.T.contiguous() if is_transposed(self.walk.arch, f".{name}") else weight.clone()

    @torch.no_grad()
    def replace(self, name: str, weight: Tensor) -> None:
        """Put a linear's quantised weight, [out, in], in its place."""
        self.linear(name).weight.copy_(weight.T if is_transposed(self.walk.arch, f".{name}") else weight)

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, Tensor | QTensor]) -> None:
        """Put finished tensors (full names) of an earlier run in place."""
        for name, value in tensors.items():
            path = name.removeprefix(self.prefix + ".")
            if isinstance(value, QTensor):
                self.replace(path.removesuffix(".weight"), value.dequantize())
            else:
                self.module.get_parameter(module_path(self.walk.arch, path)).copy_(value)

    def collect(self, stage: tuple[str, ...]) -> dict[str, InputStats]:
        """Run the block as far as the stage's linears and accumulate their inputs.

        Members that see the same tensor share one InputStats (routed experts have one each).
        """
        owners = {name: _input_owner(name, stage) for name in stage}
        stats = {o: InputStats(self.weight(o).shape[1], self.walk.device) for o in dict.fromkeys(owners.values())}
        keep = self._keep(stage)

        def see(owner: str, x: Tensor) -> None:
            stats[owner].add(x)
            if keep is not None:
                keep[self._at] = x.to(keep.device)

        with self.walk.precision():
            for at in self.walk.batches():
                self._at = at
                self._partial(list(stats), see)
        for s in stats.values():
            s.finish()
        return {name: stats[owner] for name, owner in owners.items()}

    @torch.no_grad()
    def _partial(self, names: list[str], see: Callable[[str, Tensor], None]) -> None:
        """Run a batch as far as all the named linears have seen their input."""
        waiting = set(names)

        def watch(name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
            def hook(_: nn.Module, args: tuple[Any, ...]) -> None:
                see(name, args[0])
                waiting.discard(name)
                if not waiting:
                    raise _Stop

            return hook

        handles = [self.linear(name).register_forward_pre_hook(watch(name)) for name in names]
        try:
            self.walk.run_block(self.module, self.index, self._at)
        except _Stop:
            pass
        finally:
            for handle in handles:
                handle.remove()

    def _keep(self, stage: tuple[str, ...]) -> Tensor | None:
        """Room for the inputs of the linear that a child module (attention, MLP) ends with, else None.

        All linears before it are final, so its inputs are too, and nothing before it need run again.
        """
        child, _, rest = stage[0].partition(".")
        mine = [name for s in self.stages for name in s if name.startswith(child + ".")]
        if len(stage) > 1 or stage[0] != mine[-1] or "." in rest:
            return None
        shape = (*self.walk.hidden.shape[:-1], self.weight(stage[0]).shape[1])
        self._kept[child] = self.walk.store(child, shape, self.walk.dtype)
        return self._kept[child]

    def output(self) -> Tensor:
        """The block's output on the probe rows, as its weights are now."""
        return self.walk.run_block(self.module, self.index, self.walk.probe_rows).float()

    def probe(self, names: Sequence[str]) -> Probe:
        """Run the probe rows once, noting the named linears' inputs. Experts that see no token are left out."""
        inputs: dict[str, Tensor] = {}

        def watch(name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
            def hook(_: nn.Module, args: tuple[Any, ...]) -> None:
                inputs[name] = args[0].reshape(-1, args[0].shape[-1]).float()

            return hook

        handles = [self.linear(name).register_forward_pre_hook(watch(name)) for name in names]
        output = self.output()
        for handle in handles:
            handle.remove()
        return Probe(output, inputs)

    def scale_pairs(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """The family's (operator, linears that read its output), each routed expert's spelled out."""
        return expand_pairs(self.walk.arch, self.walk.checkpoint.config)

    def output_width(self, operator: str) -> int:
        """Channels that an operator, a norm or a linear, gives out."""
        weight = self.linear(operator).weight
        return int(weight.shape[-1 if weight.ndim == 1 or is_transposed(self.walk.arch, f".{operator}") else 0])

    @torch.no_grad()
    def divide_output(self, operator: str, s: Tensor) -> dict[str, Tensor]:
        """Divide an operator's output channels by s [width], exactly. Returns the changed parameters by full name."""
        module = self.linear(operator)
        if module.weight.ndim == 1:  # some norms multiply by 1 + weight
            offset = self.walk.arch.norm_offset
            module.weight.copy_((module.weight + offset) / s - offset)
        else:
            self.replace(operator, self.weight(operator) / s[:, None])
        if getattr(module, "bias", None) is not None:
            module.bias.copy_(module.bias / s)
        return {f"{self.prefix}.{operator}.{n}": p.detach().clone() for n, p in module.named_parameters()}

    def done(self, stage: tuple[str, ...]) -> None:
        """The stage's weights are final. A child module that has none left need not run again in full."""
        self._done.update(stage)
        linears = [name for s in self.stages for name in s]
        for child in {name.split(".")[0] for name in stage}:
            mine = [name for name in linears if name.startswith(child + ".")]
            if self._done.issuperset(mine):
                module = self.module.get_submodule(module_path(self.walk.arch, child))
                if child in self._kept:
                    self._resume_at(module, self.linear(mine[-1]), self._kept[child])
                elif linears[-1] not in mine:
                    self._remember(module)

    def _resume_at(self, child: Any, last: nn.Module, inputs: Tensor) -> None:
        """Let a child module be its last linear on the kept inputs."""
        attention = "Attention" in type(child).__name__  # such modules give (output, weights)

        def forward(*_: Any, **__: Any) -> Any:
            output = last(inputs[self._at].to(self.walk.device))
            return (output, None) if attention else output

        child.forward = forward

    def _remember(self, child: Any) -> None:
        """Let a child module run once more for each batch, then answer from memory."""
        forward, outputs = child.forward, {}

        def remembered(*args: Any, **kwargs: Any) -> Any:
            if self._at.start not in outputs:
                outputs[self._at.start] = forward(*args, **kwargs)
            return outputs[self._at.start]

        child.forward = remembered

    def propagate(self) -> None:
        """Replace the stored hidden states by this block's outputs."""
        with self.walk.precision():
            for at in self.walk.batches():
                self._at = at
                output = self.walk.run_block(self.module, self.index, at)
                self.walk.hidden[at] = output.float().to(self.walk.hidden.device)


def _input_owner(name: str, stage: tuple[str, ...]) -> str:
    """The first member of the stage that sees the same input: the first of all, or of the same routed expert."""
    parent = name.rpartition(".")[0]
    if any(part.isdigit() for part in parent.split(".")):
        return next(other for other in stage if other.rpartition(".")[0] == parent)
    return next(other for other in stage if not any(part.isdigit() for part in other.split(".")))
