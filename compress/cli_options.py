"""What the commands have in common on their command lines."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from formats.errors import UsageError


class Format(StrEnum):
    human = "human"
    json = "json"


def read_size(text: Any) -> int:
    from compress.recipe import parse_size

    return int(parse_size(text))


RecipeArgument = Annotated[str, typer.Argument(help="recipe file, or a shipped recipe's name", metavar="RECIPE")]
ModelArgument = Annotated[str, typer.Argument(help="directory, .gguf file or hub id", metavar="MODEL")]
SetOption = Annotated[
    list[str], typer.Option("--set", help="override a value: --set steps.0.bits=3", metavar="KEY=VALUE")
]
OutOption = Annotated[Path, typer.Option("-o", "--out", help="output directory", metavar="OUT")]
FormatOption = Annotated[Format, typer.Option("--output", help="how results are printed on stdout")]
DeviceOption = Annotated[str, typer.Option(help="cpu, cuda, cuda:1; auto takes a GPU if there is one")]
OverwriteOption = Annotated[
    bool, typer.Option("--overwrite", help="replace an existing output, once the new one is whole")
]


def pick_device(name: str) -> str:
    """What --device names, if this machine has it; for auto a GPU, if there is one."""
    import torch

    gpus = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    if name == "auto":
        return "cuda" if gpus else "cpu"
    known = ["cpu", "cuda", *gpus] if gpus else ["cpu"]
    if name not in known:
        raise UsageError(f'no device "{name}" here', "--device", f"auto, {', '.join(known)}")
    return name
