"""AWQ: folding changes no float logit, and scaling pays."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from calib.walk import Walk
from compress.algorithms.awq import fold_scales
from compress.recipe import AwqStep
from formats.containers import open_checkpoint
from formats.grids import parse_grid

FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "gemma3_text", "gpt2", "mixtral", "qwen3_moe"]


def salient(checkpoint, rows, factor: float = 30.0) -> Walk:
    """A walk whose hidden states have a few channels far larger than the others, as real models do."""
    walk = Walk(checkpoint, rows, exact=True)
    walk.hidden[..., :3] *= factor
    return walk


@pytest.mark.parametrize("family", FAMILIES)
def test_folding_leaves_the_float_model_as_it_was(family: str, tiny_model) -> None:
    path = tiny_model(family)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with open_checkpoint(path) as checkpoint:
        rows = torch.randint(0, checkpoint.shape(f"{checkpoint.arch.embedding}.weight")[0], (4, 24))
        walk, folded = salient(checkpoint, rows), 0
        with torch.no_grad():
            before = model(rows).logits
        with walk.block(0) as block:
            grids = {name: parse_grid("int3-g16") for stage in block.stages for name in stage}
            output = block.output()
            changed = fold_scales(block, grids, AwqStep(algorithm="awq", points=6))
            assert (block.output() - output).abs().max() < 1e-4 * output.abs().max()
            folded = len(changed)
    assert folded
    with torch.no_grad():
        assert torch.equal(model(rows).logits, before)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_scaled_rounding_loses_less(family: str, tiny_model) -> None:
    with open_checkpoint(tiny_model(family)) as checkpoint:
        rows = torch.randint(0, checkpoint.shape("model.embed_tokens.weight")[0], (8, 24))
        errors = []
        for scaled in (False, True):
            walk = salient(checkpoint, rows)
            with walk.block(0) as block:
                grids = {name: parse_grid("int3-g32") for stage in block.stages for name in stage}
                output = block.output()
                if scaled:
                    fold_scales(block, grids, AwqStep(algorithm="awq"))
                for name, grid in grids.items():
                    weight = block.weight(name)
                    params = grid.fit(weight)
                    block.replace(name, grid.decode(grid.encode(weight, params), params))
                errors.append(float((block.output() - output).square().sum()))
    assert errors[1] < 0.9 * errors[0]
