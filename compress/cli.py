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

from formats.errors import BitwrightError, ResourceError, UsageError

app = typer.Typer(
    help="Compress language models offline, and prove what it did.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


_Refused: type[Exception] = typer.BadParameter.mro()[2]  # base of typer's usage errors, which has no public name


class Format(StrEnum):
    human = "human"
    json = "json"


def _size(text: Any) -> int:
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


@app.callback()
def options(
    debug: Annotated[bool, typer.Option("--debug", help="show tracebacks of internal errors")] = False,
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
    """Compress MODEL by RECIPE into OUT, read it back, and measure what was lost."""
    from compress.pipeline import run as run_pipeline
    from compress.progress import Progress
    from compress.recipe_file import load_recipe

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
            device=_device(device),
            progress=progress,
            command=_command(drop="--resume"),
        )
    _show_result(result, output)


@app.command()
def plan(
    recipe: RecipeArgument,
    model: ModelArgument,
    setting: SetOption = [],  # noqa: B006
    target: Annotated[str | None, typer.Option(help="engine to satisfy: vllm, sglang, transformers, llama.cpp")] = None,
    output: FormatOption = Format.human,
) -> None:
    """Print bits per tensor, file size, peak memory and estimated time; run nothing."""
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
    shard_size: Annotated[int, typer.Option(help="largest file, e.g. 5GB", parser=_size)] = 5_000_000_000,
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


@app.command("eval")
def evaluate(
    model: ModelArgument,
    text: Annotated[Path | None, typer.Option(help="held-out plain text file")] = None,
    against: Annotated[str | None, typer.Option(help="reference model, for KL divergence and top-1 agreement")] = None,
    length: Annotated[int, typer.Option(help="tokens per window", min=4)] = 512,
    chunks: Annotated[int, typer.Option(help="windows", min=1)] = 20,
    stride: Annotated[int | None, typer.Option(help="overlapping windows that move on by this many tokens")] = None,
    engine: Annotated[str, typer.Option(help="transformers (decoded weights) or runtime (packed)")] = "transformers",
    cache: Annotated[Path | None, typer.Option(help="keep the reference's logits here for the next candidate")] = None,
    tasks: Annotated[str, typer.Option(help="lm-eval tasks, task files or folders, separated by commas")] = "",
    limit: Annotated[int | None, typer.Option(help="items per task", min=1)] = None,
    max_kld: Annotated[float | None, typer.Option(help="exit with 5 above this KL divergence")] = None,
    max_ppl_ratio: Annotated[float | None, typer.Option(help="exit with 5 above this ratio of perplexities")] = None,
    device: DeviceOption = "auto",
    output: FormatOption = Format.human,
) -> None:
    """Measure perplexity and, against a reference, divergence; or run lm-eval tasks."""
    from compress.card import eval_rows
    from compress.progress import Progress
    from compress.show import show_json, show_table
    from runtime.evaluate.run import check_gates
    from runtime.evaluate.run import evaluate as measure

    if tasks:
        from runtime.evaluate.harness import run_tasks

        show_json(run_tasks(model, tasks.split(","), limit=limit, device=_device(device)))
        return
    if text is None:
        raise UsageError("nothing to evaluate on", how_to_fix="name a text with --text, or lm-eval tasks with --tasks")
    with Progress() as progress:
        progress.start("evaluate", chunks)
        result = measure(
            model,
            against=against,
            text=text,
            length=length,
            chunks=chunks,
            stride=stride,
            engine=engine,
            device=_device(device),
            cache=cache,
            progress=progress.update,
        )
    if output == Format.json:
        show_json(result)
    else:
        show_table(("measured", ""), eval_rows(result))
    check_gates(result, max_kld=max_kld, max_ppl_ratio=max_ppl_ratio)


@app.command()
def generate(
    model: ModelArgument,
    prompt: Annotated[str, typer.Option("-p", "--prompt", help="text to continue")],
    max_tokens: Annotated[int, typer.Option(min=1)] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy", min=0)] = 0.0,
    seed: Annotated[int | None, typer.Option(help="makes sampling reproducible")] = None,
    draft: Annotated[str | None, typer.Option(help="a smaller model that guesses, or self: this one in 4 bits")] = None,
    speculate: Annotated[str | None, typer.Option(help="ngram: guess from the text so far")] = None,
    kernel: Annotated[str, typer.Option(help="see `quantize list kernels`")] = "auto",
    device: DeviceOption = "auto",
    output: FormatOption = Format.human,
) -> None:
    """Continue a text, shown as it is made."""
    from compress.show import show_json
    from runtime.generate import generate as continue_text
    from runtime.sampling import SamplingParams

    if speculate not in (None, "ngram") or (draft and speculate):
        raise UsageError("--speculate takes ngram, and not together with --draft", "generate")
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
    human = output == Format.human
    result = continue_text(
        model,
        prompt,
        params,
        draft or speculate,
        kernel,
        _device(device),
        show=lambda text: print(text, end="", flush=True) if human else None,
    )
    if not human:
        show_json(result)
        return
    print()
    facts = [f"{result['tokens']} tokens", f"{result['tps']} tokens/s", str(result["finish_reason"])]
    facts += [
        f"{name.replace('_', ' ')} {result[name]}" for name in ("acceptance", "tokens_per_step") if name in result
    ]
    print(", ".join(facts), file=sys.stderr)


@app.command()
def bench(
    model: ModelArgument,
    prompt: Annotated[int, typer.Option(help="prompt tokens", min=1)] = 512,
    generate: Annotated[int, typer.Option(help="tokens to make", min=1)] = 64,
    batch: Annotated[str, typer.Option(help="batch sizes: 1,4,16")] = "1",
    repetitions: Annotated[int, typer.Option(min=1)] = 3,
    techniques: Annotated[bool, typer.Option("--compare", help="one table of all serving techniques")] = False,
    draft: Annotated[str | None, typer.Option(help="is this draft worth it? a model, self or ngram")] = None,
    text: Annotated[str, typer.Option(help="prompt for --draft")] = "The following is a list of",
    kernel: Annotated[str, typer.Option(help="see `quantize list kernels`")] = "auto",
    device: DeviceOption = "auto",
    output: FormatOption = Format.human,
) -> None:
    """Measure speed, latency and memory."""
    from dataclasses import asdict

    from compress.show import show_json, show_table
    from runtime import bench as library

    def progress(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    place: dict[str, Any] = {"kernel": kernel, "device": _device(device), "progress": progress}
    if techniques:
        rows = [asdict(rung) for rung in library.compare(model, longest=generate, draft=draft or "ngram", **place)]
    elif draft:
        rows = [library.weigh_draft(model, draft, [text], generate=generate, **place)]
    else:
        if not all(size.strip().isdigit() for size in batch.split(",")):
            raise UsageError(f"--batch {batch} is not a list of numbers", "bench", "write it like 1,4,16")
        sizes = [int(size) for size in batch.split(",")]
        result = library.bench(model, prompt, generate, sizes, repetitions, **place)
        rows = result["batches"]
    if output == Format.json:
        show_json(rows if techniques else rows[0] if draft else result)
    elif draft and not techniques:
        show_table(("measured", ""), [(key.replace("_", " "), str(value)) for key, value in rows[0].items()])
    else:
        show_table([key.replace("_", " ") for key in rows[0]], [list(row.values()) for row in rows])
        if not techniques:
            print(f"peak memory {result['peak_rss_mb']} MB, packed weights {result['weights_mb']} MB")


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

    if verify:
        print(check_integrity(Path(model)))
        return
    with open_checkpoint(model) as checkpoint:
        facts = inspect_model(checkpoint)
    if output == Format.json:
        show_json(facts)
    else:
        show_model(facts, condensed(facts["tensors"]))


@app.command()
def compare(
    models: Annotated[list[Path], typer.Argument(help="output directories, or any model files", metavar="MODEL...")],
    against: Annotated[str | None, typer.Option(help="measure them all now, against this model")] = None,
    text: Annotated[Path | None, typer.Option(help="on this plain text file")] = None,
    length: Annotated[int, typer.Option(help="tokens per window", min=4)] = 512,
    chunks: Annotated[int, typer.Option(help="windows", min=1)] = 20,
    plot: Annotated[Path | None, typer.Option(help="write PLOT.png and PLOT.svg: size against loss")] = None,
    output: FormatOption = Format.human,
) -> None:
    """Print one table of sizes and losses: as runs recorded them or, with --against and --text, measured now."""
    from tempfile import TemporaryDirectory

    from compress.compare import HEADER, gather, table
    from compress.compare import plot as draw
    from compress.show import show_json, show_table
    from runtime.evaluate.run import evaluate as measure

    if (against is None) != (text is None):
        raise UsageError("--against and --text go together")
    with TemporaryDirectory() as cache:
        options: dict[str, Any] = {"against": against, "text": text, "length": length, "chunks": chunks, "cache": cache}
        entries = gather(models, (lambda path: measure(path, **options)) if text else None)
    if plot is not None:
        draw(entries, plot)
    if output == Format.json:
        show_json([entry.summary() for entry in entries])
    else:
        show_table(HEADER, table(entries))


@app.command()
def profile(
    log: Annotated[Path, typer.Argument(help="JSON lines: prompt_tokens (or their ids), output_tokens")],
    model: Annotated[str, typer.Option(help="served by this model: directory, .gguf file or hub id")],
    memory: Annotated[str, typer.Option(help="for the KV cache, e.g. 8GB")] = "8GB",
    kv_dtype: Annotated[str, typer.Option(help="float32, float16, bfloat16 or int8")] = "float16",
    acceptance: Annotated[float | None, typer.Option(help="measured share of a draft's guesses accepted")] = None,
    guesses: Annotated[int, typer.Option(help="tokens that a draft guesses at once")] = 4,
    draft_cost: Annotated[float, typer.Option(help="time of a draft's step over the model's")] = 0.1,
    output: FormatOption = Format.human,
) -> None:
    """Report what a log of requests needs: lengths, KV memory by policy, gains from caching and drafts."""
    from compress.recipe import parse_size
    from compress.show import show_json, show_table
    from runtime.profile import profile as profile_log
    from runtime.profile import rows

    options: dict[str, Any] = {"acceptance": acceptance, "guesses": guesses, "draft_cost": draft_cost}
    try:
        result = profile_log(log, model, memory=parse_size(memory), kv_dtype=kv_dtype, **options)
    except ValueError as error:
        raise UsageError(str(error), where="--memory") from None
    if output == Format.json:
        show_json(result)
    else:
        show_table(("", ""), rows(result))


@app.command()
def serve(
    model: ModelArgument,
    host: Annotated[str, typer.Option(help="address to listen on")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="port to listen on", min=1, max=65535)] = 8000,
    name: Annotated[str | None, typer.Option(help="the model's name for clients")] = None,
    api_key: Annotated[str | None, typer.Option(help="demand this key", envvar="BITWRIGHT_API_KEY")] = None,
    kv_tokens: Annotated[int, typer.Option(help="size of the KV cache", min=16)] = 16384,
    kv_dtype: Annotated[str, typer.Option(help="of the KV cache: float32, float16, bfloat16 or int8")] = "float16",
    draft: Annotated[str | None, typer.Option(help='a smaller model with the same vocabulary, or "ngram"')] = None,
    kernel: Annotated[str, typer.Option(help="how packed weights are multiplied")] = "auto",
    device: DeviceOption = "auto",
) -> None:
    """Serve MODEL over HTTP with OpenAI's interface."""
    try:
        from runtime.server import serve_model
    except ModuleNotFoundError as error:
        raise UsageError(f"the server needs {error.name}", how_to_fix="pip install 'bitwright[serve]'") from error
    options: dict[str, Any] = {"kv_tokens": kv_tokens, "kv_dtype": kv_dtype, "draft": draft, "kernel": kernel}
    serve_model(model, host, port, name=name, api_key=api_key, device=_device(device), **options)


class Listable(StrEnum):
    recipes = "recipes"
    algorithms = "algorithms"
    grids = "grids"
    containers = "containers"
    architectures = "architectures"


@app.command("list")
def list_(what: Annotated[Listable, typer.Argument()], output: FormatOption = Format.human) -> None:
    """Print the names that recipes and options may use, and what each is for."""
    from compress.catalogue import catalogue
    from compress.show import show_json, show_table

    entries = catalogue(what.value)
    if output == Format.json:
        show_json([{"name": name, "about": about} for name, about in entries])
    else:
        show_table((what.value, ""), entries)


def _plan(recipe: Any, model: str, output: Format) -> None:
    from compress.plan import make_plan
    from compress.show import show_json, show_plan
    from formats.containers import open_checkpoint

    with open_checkpoint(model) as checkpoint:
        made = make_plan(recipe, checkpoint)
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


def _device(name: str) -> str:
    if name != "auto":
        return name
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _command(drop: str = "") -> str:
    """This very command line, as a shell would take it."""
    return shlex.join(["quantize", *(arg for arg in sys.argv[1:] if arg != drop)])


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
    print(
        "interrupted" + (f"; resume with\n  {_command(drop='--resume')} --resume" if resumable else ""), file=sys.stderr
    )
    return 130


def main() -> None:
    sys.excepthook = _internal_error
    sys.exit(invoke(sys.argv[1:]))
