"""The model card: metadata for model hubs, what was done, how to repeat it, and what was lost."""

from collections.abc import Mapping, Sequence
from typing import Any

import yaml
from jinja2 import Environment, StrictUndefined

from calib.text import CalibrationSet
from compress.plan import Plan
from formats.checkpoint import Checkpoint

_USE = {
    "gguf": "llama-cli -m model.gguf -p 'Once upon a time'",
    "safetensors": 'vllm serve .    # or AutoModelForCausalLM.from_pretrained(".") in transformers',
}

_TEMPLATE = """\
---
{{ header }}---

# {{ name }}, {{ "%.2f" | format(plan.bits_per_weight) }} bits per weight

`{{ name }}` compressed by {{ steps }} onto {{ grids }} and stored as {{ format }}:
{{ "%.1f" | format(plan.nbytes / 1e6) }} MB of weights, {{ "%.3f" | format(plan.bits_per_weight) }} bits per weight, \
embeddings included.

## What was lost

{% if evaluation %}
| measured on the files as written | |
| --- | --- |
{% for what, value in evaluation %}
| {{ what }} | {{ value }} |
{% endfor %}
{% else %}
Not measured: the recipe has no `evaluate` section.
{% endif %}

## How it was made

{{ text }}

```sh
{{ command }}
```

`recipe.yaml` is the recipe with everything filled in, `manifest.json` holds the hashes of source, text and outputs,
`layers.jsonl` the error of each layer.
{% if worst %}

Largest relative output errors:

| layer | grid | error | round to nearest |
| --- | --- | --- | --- |
{% for w in worst %}
| `{{ w.name }}` | {{ w.grid }} | {{ "%.3g" | format(w.error) }} | {{ "%.3g" | format(w.rtn_error) }} |
{% endfor %}
{% endif %}
{% for picture in pictures %}

![Errors of all layers]({{ picture }})
{% endfor %}

## How to run it

```sh
{{ use }}
```

## Tensors

| tensors | number | grid | bits | MB | |
| --- | --- | --- | --- | --- | --- |
{% for row in tensors %}
| {{ row | join(" | ") }} |
{% endfor %}
{% if notes %}

## Notes

{% for note in notes %}
- {{ note }}
{% endfor %}
{% endif %}
"""


def model_card(
    plan: Plan,
    checkpoint: Checkpoint,
    *,
    command: str,
    calibration: CalibrationSet | None,
    evaluation: Mapping[str, Any] | None,
    layers: Sequence[Mapping[str, Any]],
    notes: Sequence[str],
    pictures: Sequence[str] = (),
) -> str:
    """README.md as text. layers: records of layers.jsonl; evaluation: what `runtime.evaluate` measured."""
    path, container = checkpoint.path, plan.container.name
    name = path.stem if path.is_file() else path.resolve().name
    algorithms = [step.algorithm for step in plan.recipe.steps]
    header = {
        "base_model": plan.recipe.model or name,
        "library_name": "gguf" if container == "gguf" else "transformers",
        "pipeline_tag": "text-generation",
        "tags": list(dict.fromkeys(["quantized", "bitwright", container, *algorithms])),
    }
    environment = Environment(
        trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined, keep_trailing_newline=True
    )
    return environment.from_string(_TEMPLATE).render(
        header=yaml.safe_dump(header, sort_keys=False, allow_unicode=True),
        name=name,
        plan=plan,
        steps=" then ".join(algorithms),
        grids=", ".join(sorted({grid.name for grid in plan.grids.values()})),
        format=container,
        evaluation=None if evaluation is None else eval_rows(evaluation),
        text=_text_line(plan, calibration),
        command=command,
        worst=sorted(layers, key=lambda layer: -layer["error"])[:5],
        use=_USE.get(container, _USE["safetensors"]),
        tensors=[
            (f"`{name}`", count, grid, f"{bits:.3f}", f"{size / 1e6:.2f}", note)
            for name, count, grid, bits, size, note in plan.condensed()
        ],
        notes=notes,
        pictures=pictures,
    )


def _text_line(plan: Plan, calibration: CalibrationSet | None) -> str:
    if calibration is None:
        return "No calibration text was used."
    samples, length = calibration.tokens.shape
    line = f"Calibrated on {samples} x {length} tokens, {calibration.source} (seed {calibration.seed})."
    wanted = plan.recipe.calibration.samples
    return line if samples == wanted else f"{line} The recipe asked for {wanted} samples; the text had no more."


def eval_rows(evaluation: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What an evaluation found, as (quantity, value with its standard error)."""

    def value(key: str, digits: int, scale: float = 1) -> str:
        error = evaluation.get(f"{key}_stderr")
        text = f"{evaluation[key] * scale:.{digits}f}"
        return text if error is None else f"{text} ± {error * scale:.{digits}f}"

    rows = [("perplexity", value("ppl", 2))]
    if "ref_ppl" in evaluation:
        rows.append(("perplexity of the source", value("ref_ppl", 2)))
    if "kld" in evaluation:
        digits = 4 if evaluation["kld"] >= 0.01 else 6
        rows.append(("KL divergence (nats per token)", value("kld", digits)))
        rows.append(("same most likely token (%)", value("top1", 1, 100)))
    return [*rows, ("tokens scored", str(evaluation["tokens"]))]
