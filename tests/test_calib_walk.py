"""The block-by-block walk computes what transformers computes, for every family, and collects what its linears see."""

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from calib.walk import Walk
from formats.containers import open_checkpoint

FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "gemma3_text", "gpt2", "mixtral", "qwen3_moe"]


def rows_for(vocab: int, samples: int = 5, length: int = 24) -> Tensor:
    return torch.randint(0, vocab, (samples, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(("family", "layers"), [*((family, 2) for family in FAMILIES), ("gemma3_text", 7)])
def test_walk_equals_transformers(family: str, layers: int, tiny_model) -> None:
    path = tiny_model(family, layers=layers)  # gemma's sixth layer attends globally
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with open_checkpoint(path) as checkpoint:
        rows = rows_for(checkpoint.shape(f"{checkpoint.arch.embedding}.weight")[0])
        walk = Walk(checkpoint, rows, exact=True, batch_tokens=2 * rows.shape[1])  # the last batch is smaller
        for i in range(walk.n_blocks):
            with walk.block(i) as block:
                for stage in block.stages:
                    block.collect(stage)
                    block.done(stage)
                block.propagate()
        hidden = walk.final_norm()(walk.hidden)
    with torch.no_grad():
        expected = model.base_model(rows).last_hidden_state
    assert (hidden - expected).abs().max() < 1e-4


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3_text", "mixtral"])
def test_statistics_are_of_what_the_linears_saw(family: str, tiny_model) -> None:
    path = tiny_model(family)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with open_checkpoint(path) as checkpoint:
        rows = rows_for(checkpoint.shape(f"{checkpoint.arch.embedding}.weight")[0])
        walk = Walk(checkpoint, rows, exact=True, batch_tokens=48)
        with walk.block(0) as block:
            stage = block.stages[1]  # the attention's output projection
            stats = block.collect(stage)[stage[0]]
            name = f"{block.prefix}.{stage[0]}"
    seen = []
    handle = model.get_submodule(name).register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.no_grad():
        model(rows)
    handle.remove()
    x = seen[0].flatten(0, 1)
    assert stats.tokens == len(x)
    assert torch.allclose(stats.hessian, x.T @ x / len(x), rtol=1e-3, atol=1e-6)


def test_each_expert_has_its_own_tokens(tiny_model) -> None:
    with open_checkpoint(tiny_model("qwen3_moe")) as checkpoint:
        rows = rows_for(checkpoint.shape("model.embed_tokens.weight")[0])
        walk = Walk(checkpoint, rows, exact=True)
        with walk.block(0) as block:
            for stage in block.stages:
                stats = block.collect(stage)
                block.done(stage)
            config = checkpoint.config
    per_expert = {name.rsplit(".", 1)[0]: s.tokens for name, s in stats.items()}
    assert len(per_expert) == 4
    assert sum(per_expert.values()) == rows.numel() * config["num_experts_per_tok"]


def test_quantised_weights_propagate(tiny_model) -> None:
    path = tiny_model("llama")
    with open_checkpoint(path) as checkpoint:
        rows = rows_for(checkpoint.shape("model.embed_tokens.weight")[0])
        walk = Walk(checkpoint, rows, exact=True)
        with walk.block(0) as block:
            for stage in block.stages:
                for name in stage:
                    block.replace(name, torch.zeros_like(block.weight(name)))
                block.done(stage)
            before = walk.hidden.clone()
            block.propagate()
    assert torch.equal(walk.hidden, before)  # with zeroed linears only the residual stream is left


def test_activations_beyond_the_budget_live_in_a_file(tiny_model, tmp_path) -> None:
    with open_checkpoint(tiny_model("llama")) as checkpoint:
        rows = rows_for(checkpoint.shape("model.embed_tokens.weight")[0])
        kept = Walk(checkpoint, rows, exact=True)
        spilled = Walk(checkpoint, rows, exact=True, activation_budget=100, spill_dir=tmp_path)
        assert list(tmp_path.iterdir())
        for walk in (kept, spilled):
            with walk.block(0) as block:
                block.propagate()
    assert torch.equal(kept.hidden, spilled.hidden)
