"""Runs in a peer's own environment: quantises a model with it and saves the result, for our readers to open.

python foreign.py gptqmodel SOURCE OUT METHOD      METHOD: gptq-sym, gptq-act-order, gptq-mixed
python foreign.py llmcompressor SOURCE OUT SCHEME  SCHEME: W4A16, W4A16_ASYM, W8A8, mixed
"""

import sys
from pathlib import Path
from typing import Any

import torch

torch.set_num_threads(1)


def rows(count: int) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, 380, (count, 64), generator=generator)
    return [{"input_ids": row.tolist(), "attention_mask": [1] * 64} for row in tokens]


def gptqmodel(source: str, out: str, method: str) -> None:
    from gptqmodel import BACKEND, GPTQModel, QuantizeConfig

    dynamic = {"-:.*layers\\.0\\.mlp\\.down_proj": {}, "+:.*layers\\.1\\.self_attn": {"bits": 8, "group_size": 64}}
    options: dict[str, dict[str, Any]] = {
        "gptq-sym": {"bits": 4, "group_size": 32, "desc_act": False},
        "gptq-act-order": {"bits": 4, "group_size": 32, "desc_act": True, "sym": False},
        "gptq-mixed": {"bits": 4, "group_size": 32, "dynamic": dynamic},
    }
    model = GPTQModel.load(source, QuantizeConfig(**options[method]), device="cpu")
    model.quantize(rows(24), batch_size=8, backend=BACKEND.AUTO)
    model.save(out)


def llmcompressor(source: str, out: str, scheme: str) -> None:
    from compressed_tensors.quantization import QuantizationScheme, preset_name_to_scheme
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    if scheme == "mixed":
        wide: QuantizationScheme = preset_name_to_scheme("W8A16", ["re:.*down_proj$"])
        narrow: QuantizationScheme = preset_name_to_scheme("W4A16", ["re:.*self_attn.*", "re:.*(gate|up)_proj$"])
        recipe = QuantizationModifier(config_groups={"group_0": wide, "group_1": narrow}, ignore=["lm_head"])
    else:
        recipe = QuantizationModifier(targets="Linear", scheme=scheme, ignore=["lm_head"])
    oneshot(model=model, recipe=recipe)
    model.save_pretrained(out, save_compressed=True)


if __name__ == "__main__":
    peer, source, out, method = sys.argv[1:]
    Path(out).mkdir(parents=True, exist_ok=True)
    {"gptqmodel": gptqmodel, "llmcompressor": llmcompressor}[peer](source, out, method)
