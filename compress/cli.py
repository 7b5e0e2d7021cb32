"""The `quantize` command. Commands import what they need when they run, so that --help is instant."""

import os
import shlex
import sys
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any

import typer

from compress.cli_models import bench, compare, evaluate, generate, profile, serve
from compress.cli_options import (
    DeviceOption,
    Format,
    FormatOption,
    ModelArgument,
    OutOption,
    OverwriteOption,
    RecipeArgument,
    SetOption,
    pick_device,
    read_size,
)
from formats.errors import BitwrightError, ResourceError, UsageError

app = typer.Typer(
    help="Compress language models offline, and prove what it did.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


_Refused: type[Exception] = typer.BadParameter.mro()[2]  # base of typer's usage errors, which has no public name


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"bitwright {version('bitwright')}")
        raise typer.Exit


@app.callback()
def options(
    debug: Annotated[bool, typer.Option("--debug", help="show tracebacks of internal errors")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="print the version", callback=_version, is_eager=True)
    ] = False,
) -> None:
    sys.excepthook = sys.__excepthook__ if debug else _internal_error


@app.command()
def run(
    recipe: RecipeArgument,
    model: Annotated[str | None, typer.Argument(help="directory, .gguf file or hub id", metavar="MODEL")] = None,
    out: OutOption = ...,  # type: ignore[assignment]
    setting: SetOption = [],  # noqa: B006
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print the plan only")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="continue an interrupted run")] = False,
    overwrite: OverwriteOption = False,
    device: DeviceOption = "auto",
    output: FormatOption = Format.human,
) -> None:
    """Compress MODEL by RECIPE, read it back, and measure the loss."""
    from compress.pipeline import run as run_pipeline
    from compress.progress import Progress
    from compress.recipe_file import load_recipe
    from runtime.evaluate.run import check_gates

    checked = load_recipe(recipe, setting)
    source = model or checked.model
    if source is None:
        raise UsageError("no model given", how_to_fix="name it after the recipe, or in the recipe as `model:`")
    if dry_run:
        _plan(checked, source, output)
        return
    with Progress() as progress:
        result = run_pipeline(
            checked,
            source,
            out,
            resume=resume,
            overwrite=overwrite,
            device=pick_device(device),
            progress=progress,
            command=_command(),
        )
    _show_result(result, output)
    if checked.evaluate is not None:
        check_gates(result, **checked.evaluate.gate.model_dump())


@app.command()
def plan(
    recipe: RecipeArgument,
    model: ModelArgument,
    setting: SetOption = [],  # noqa: B006
    target: Annotated[str | None, typer.Option(help="engine to satisfy: vllm, sglang, transformers, llama.cpp")] = None,
    output: FormatOption = Format.human,
) -> None:
    """Print bits per tensor, size, memory and time; run nothing."""
    from compress.recipe_file import load_recipe

    settings = [*setting, f"output.target={target}"] if target else setting
    _plan(load_recipe(recipe, settings), model, output)


@app.command()
def check(recipe: RecipeArgument, setting: SetOption = [], output: FormatOption = Format.human) -> None:  # noqa: B006
    """Validate a recipe, and print it with everything filled in."""
    from compress.recipe_file import dump_recipe, load_recipe
    from compress.show import show_json

    checked = load_recipe(recipe, setting)
    if output == Format.json:
        show_json(checked.model_dump(exclude_none=True))
    else:
        print(dump_recipe(checked), end="")


@app.command()
def convert(
    model: ModelArgument,
    out: OutOption,
    container: Annotated[str, typer.Option("--format", help="gguf, gptq, awq, compressed-tensors or safetensors")],
    dtype: Annotated[str | None, typer.Option(help="of float tensors: float32, bfloat16 or float16")] = None,
    shard_size: Annotated[
        int, typer.Option(help="largest file, 5GB unless given", parser=read_size, metavar="SIZE", show_default=False)
    ] = 5_000_000_000,
    overwrite: OverwriteOption = False,
    output: FormatOption = Format.human,
) -> None:
    """Store MODEL in another container, its codes untouched."""
    from compress.convert import convert as convert_model
    from compress.show import show_json

    options = {"dtype": dtype, "shard_size": shard_size}
    result = convert_model(model, out, container, options=options, overwrite=overwrite)
    if output == Format.json:
        show_json(result)
    else:
        grids = f" ({', '.join(result['grids'])})" if result["grids"] else ""
        decoded = f", {result['decoded']} decoded to floats" if result["decoded"] else ""
        print(f"{out}: {container}, {result['codes_kept']} tensors with their codes unchanged{grids}{decoded}")


@app.command()
def inspect(
    model: ModelArgument,
    verify: Annotated[bool, typer.Option("--verify", help="compare a directory with its manifest instead")] = False,
    output: FormatOption = Format.human,
) -> None:
    """Print tensors, grids, a histogram of widths, and metadata."""
    from compress.inspect import check_integrity, condensed, inspect_model
    from compress.show import show_json, show_model
    from formats.containers import open_checkpoint
    from runtime.linear import kernels_by_grid

    if verify:
        line = check_integrity(Path(model))
        show_json({"path": model, "intact": True}) if output == Format.json else print(line)
        return
    with open_checkpoint(model) as checkpoint:
        facts = inspect_model(checkpoint) | {"kernels": kernels_by_grid(checkpoint)}
    if output == Format.json:
        show_json(facts)
    else:
        show_model(facts, condensed(facts["tensors"]))


for verb in (evaluate, generate, bench, compare, profile, serve):
    app.command("eval" if verb is evaluate else None)(verb)


class Listable(StrEnum):
    recipes = "recipes"
    algorithms = "algorithms"
    grids = "grids"
    containers = "containers"
    architectures = "architectures"
    kernels = "kernels"


@app.command("list")
def list_(what: Annotated[Listable, typer.Argument(metavar="WHAT")], output: FormatOption = Format.human) -> None:
    """Print the names that recipes and options may use."""
    from compress.catalogue import catalogue, describe, recipe_rows
    from compress.show import show_json, show_table
    from runtime.linear import KERNELS

    entries = describe(KERNELS) if what == Listable.kernels else catalogue(what.value)
    if output == Format.json:
        show_json(entries)
    elif what == Listable.recipes:
        header, rows, note = recipe_rows(entries)
        show_table(header, rows)
        print(f"\n{note}")
    else:
        show_table((what.value, ""), [(entry["name"], entry["about"]) for entry in entries])


def _plan(recipe: Any, model: str, output: Format) -> None:
    from compress.allocate import planned
    from compress.show import show_json, show_plan
    from formats.containers import open_checkpoint

    with open_checkpoint(model) as checkpoint:
        made = planned(recipe, checkpoint)
    if output == Format.json:
        show_json(made.summary())
    else:
        show_plan(made.summary(), made.condensed())


def _show_result(result: dict[str, Any], output: Format) -> None:
    from compress.card import eval_rows
    from compress.show import show_json, show_table

    if output == Format.json:
        show_json(result)
        return
    size = f"{result['bytes'] / 1e6:.1f} MB, {result['bits_per_weight']:.3f} bits per weight"
    show_table(("result", result["out"]), [("weights", size), *(eval_rows(result) if "ppl" in result else [])])


def _command() -> str:
    """The command line that does this again from the start, as a shell takes it."""
    return shlex.join(["quantize", *(arg for arg in sys.argv[1:] if arg not in ("--debug", "--resume"))])


def _internal_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    print(f"internal error: {kind.__name__}: {error}", file=sys.stderr)
    print("  this is a bug; `quantize --debug ...` shows where", file=sys.stderr)


def _out_of_memory(error: BaseException) -> bool:
    return isinstance(error, MemoryError) or "memory" in str(error) and "alloc" in str(error).lower()


def invoke(arguments: Sequence[str]) -> int:
    """Run one command line; returns its exit code. Internal errors pass through."""
    try:
        code = app(list(arguments), standalone_mode=False)
        return _interrupted(arguments) if code == 130 else code if isinstance(code, int) else 0
    except BitwrightError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except _Refused as error:
        error.show()  # type: ignore[attr-defined]
        return UsageError.exit_code
    except (KeyboardInterrupt, typer.Abort):
        return _interrupted(arguments)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (MemoryError, RuntimeError) as error:
        if not _out_of_memory(error):
            raise
        print(f"error: out of memory: {error}", file=sys.stderr)
        return ResourceError.exit_code


def _interrupted(arguments: Sequence[str]) -> int:
    resumable = "run" in arguments and "--dry-run" not in arguments
    print("interrupted" + (f"; resume with\n  {_command()} --resume" if resumable else ""), file=sys.stderr)
    return 130


def main() -> None:
    sys.excepthook = _internal_error
    sys.exit(invoke(sys.argv[1:]))
