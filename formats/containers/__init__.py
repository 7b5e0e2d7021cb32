"""On-disk layouts by name, and the one door through which models are opened."""

from formats.registry import Registry

CONTAINERS = Registry(
    "container",
    {
        "safetensors": "formats.containers.safetensors:SafetensorsContainer",
        "gptq": "formats.containers.gptq:GPTQContainer",
        "awq": "formats.containers.awq:AWQContainer",
        "compressed-tensors": "formats.containers.compressed_tensors:CompressedTensorsContainer",
        "gguf": "formats.containers.gguf:GGUFContainer",
    },
)
