"""The linear model of the loss against the loss itself."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from calib.sensitivity import end_to_end, measure
from formats.containers import open_checkpoint
from formats.grids import parse_grid


def kl_when_rounded(path, rows, name: str, grid) -> float:
    """Brute force: round one tensor, run both models."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.no_grad():
        log_p = model(rows).logits.log_softmax(-1)
        weight = model.get_parameter(name)
        params = grid.fit(weight.detach().clone())
        weight.copy_(grid.decode(grid.encode(weight, params), params))
        log_q = model(rows).logits.log_softmax(-1)
    return float((log_p.exp() * (log_p - log_q)).sum(-1).mean())


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_costs_follow_brute_force(family: str, tiny_model) -> None:
    path = tiny_model(family)
    with open_checkpoint(path) as checkpoint:
        rows = torch.randint(0, checkpoint.shape("model.embed_tokens.weight")[0], (16, 32))
        names = [f"model.layers.{i}.{n}.weight" for i in range(2) for n in ("self_attn.v_proj", "mlp.down_proj")]
        names.append("model.embed_tokens.weight")
        grids = [parse_grid("int2-g32"), parse_grid("int4-g32")]
        costs = measure(checkpoint, rows, {name: grids for name in names})
    for name in names:
        assert costs[name]["int4-g32"] < costs[name]["int2-g32"]
        for grid in grids:
            true = kl_when_rounded(path, rows, name, grid)
            assert 0.6 < costs[name][grid.name] / true < 1.6


def test_end_to_end_is_the_divergence_of_the_whole(tiny_model) -> None:
    path = tiny_model("llama")
    with open_checkpoint(path) as checkpoint:
        rows = torch.randint(0, checkpoint.shape("model.embed_tokens.weight")[0], (8, 32))
        name, grid = "model.layers.0.mlp.down_proj.weight", parse_grid("int2-g32")
        assert end_to_end(checkpoint, rows, {}) == pytest.approx(0, abs=1e-6)
        measured = end_to_end(checkpoint, rows, {name: grid})
    assert measured == pytest.approx(kl_when_rounded(path, rows, name, grid), rel=0.3)
