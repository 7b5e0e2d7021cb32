"""Commands that run models: evaluation and serving."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from compress.cli_options import DeviceOption, Format, FormatOption, ModelArgument, pick_device, read_size
from formats.errors import UsageError

KernelOption = Annotated[str, typer.Option(help="fast, auto (exact) or one of `quantize list kernels`")]


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
    """Measure perplexity and divergence, or run lm-eval tasks."""
    from compress.card import eval_rows
    from compress.progress import Progress
    from compress.show import show_json, show_table
    from runtime.evaluate.run import check_gates
    from runtime.evaluate.run import evaluate as measure

    if tasks:
        from runtime.evaluate.harness import rows, run_tasks

        answers = run_tasks(model, tasks.split(","), limit=limit, device=pick_device(device))
        if output == Format.json:
            show_json(answers)
        else:
            show_table(("task", "items", "metric", "value", "+-"), rows(answers))
        return
    if against is None and (max_kld, max_ppl_ratio) != (None, None):
        raise UsageError("a gate needs a reference", how_to_fix="name the source model with --against")
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
            device=pick_device(device),
            cache=cache,
            progress=progress.update,
        )
    if output == Format.json:
        show_json(result)
    else:
        show_table(("measured", ""), eval_rows(result))
    check_gates(result, max_kld=max_kld, max_ppl_ratio=max_ppl_ratio)


def generate(
    model: ModelArgument,
    prompt: Annotated[str, typer.Option("-p", "--prompt", help="text to continue")],
    max_tokens: Annotated[int, typer.Option(help="tokens to make, at most", min=1)] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy", min=0)] = 0.0,
    seed: Annotated[int | None, typer.Option(help="makes sampling reproducible")] = None,
    draft: Annotated[str | None, typer.Option(help="a smaller model that guesses, or self: this one in 4 bits")] = None,
    speculate: Annotated[str | None, typer.Option(help="ngram: guess from the text so far")] = None,
    kernel: KernelOption = "fast",
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
        pick_device(device),
        show=lambda text: print(text, end="", flush=True) if human else None,
    )
    if not human:
        show_json(result)
        return
    print()
    facts = [f"{result['tokens']} tokens", f"{result['tps']} tokens/s", str(result["finish_reason"])]
    facts.append(f"{result['kernel']} kernels")
    facts += [
        f"{name.replace('_', ' ')} {result[name]}" for name in ("acceptance", "tokens_per_step") if name in result
    ]
    print(", ".join(facts), file=sys.stderr)


def bench(
    model: ModelArgument,
    prompt: Annotated[int, typer.Option(help="prompt tokens", min=1)] = 512,
    generate: Annotated[int, typer.Option(help="tokens to make", min=1)] = 64,
    batch: Annotated[str, typer.Option(help="batch sizes: 1,4,16")] = "1",
    repetitions: Annotated[int, typer.Option(help="timed runs of each", min=1)] = 3,
    techniques: Annotated[bool, typer.Option("--compare", help="one table of all serving techniques")] = False,
    draft: Annotated[str | None, typer.Option(help="is this draft worth it? a model, self or ngram")] = None,
    text: Annotated[str, typer.Option(help="prompt for --draft")] = "The following is a list of",
    kernel: KernelOption = "fast",
    device: DeviceOption = "auto",
    output: FormatOption = Format.human,
) -> None:
    """Measure speed, latency and memory."""
    from dataclasses import asdict

    from compress.show import show_json, show_table
    from runtime import bench as library

    def progress(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    place: dict[str, Any] = {"kernel": kernel, "device": pick_device(device), "progress": progress}
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
            memory = f"peak memory {result['peak_rss_mb']} MB, packed weights {result['weights_mb']} MB"
            print(f"{memory}, {result['kernel']} kernels")


def compare(
    models: Annotated[list[Path], typer.Argument(help="output directories, or any model files", metavar="MODEL")],
    against: Annotated[str | None, typer.Option(help="measure them all now, against this model")] = None,
    text: Annotated[Path | None, typer.Option(help="on this plain text file")] = None,
    length: Annotated[int, typer.Option(help="tokens per window", min=4)] = 512,
    chunks: Annotated[int, typer.Option(help="windows", min=1)] = 20,
    plot: Annotated[Path | None, typer.Option(help="write PLOT.png and PLOT.svg: size against loss")] = None,
    output: FormatOption = Format.human,
) -> None:
    """Print one table of several models' sizes and losses.

    As runs recorded them or, with --against and --text, measured now.
    """
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


def profile(
    log: Annotated[Path, typer.Argument(help="JSON lines: prompt_tokens (or their ids), output_tokens", metavar="LOG")],
    model: Annotated[str, typer.Option(help="served by this model: directory, .gguf file or hub id")],
    memory: Annotated[
        int,
        typer.Option(help="for the KV cache, 8GB unless given", parser=read_size, metavar="SIZE", show_default=False),
    ] = 8_000_000_000,
    kv_dtype: Annotated[str, typer.Option(help="float32, float16, bfloat16 or int8")] = "float16",
    acceptance: Annotated[float | None, typer.Option(help="measured share of a draft's guesses accepted")] = None,
    guesses: Annotated[int, typer.Option(help="tokens that a draft guesses at once")] = 4,
    draft_cost: Annotated[float, typer.Option(help="time of a draft's step over the model's")] = 0.1,
    output: FormatOption = Format.human,
) -> None:
    """Report what a log of requests needs of a server.

    Lengths, KV memory by policy, gains from prefix caching and from a draft.
    """
    from compress.show import show_json, show_table
    from runtime.profile import profile as profile_log
    from runtime.profile import rows

    options: dict[str, Any] = {"acceptance": acceptance, "guesses": guesses, "draft_cost": draft_cost}
    result = profile_log(log, model, memory=memory, kv_dtype=kv_dtype, **options)
    if output == Format.json:
        show_json(result)
    else:
        show_table(("", ""), rows(result))


def serve(
    model: ModelArgument,
    host: Annotated[str, typer.Option(help="address to listen on")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="port to listen on", min=1, max=65535)] = 8000,
    name: Annotated[str | None, typer.Option(help="the model's name for clients")] = None,
    api_key: Annotated[str | None, typer.Option(help="demand this key", envvar="BITWRIGHT_API_KEY")] = None,
    kv_tokens: Annotated[int, typer.Option(help="size of the KV cache", min=16)] = 16384,
    kv_dtype: Annotated[str, typer.Option(help="of the KV cache: float32, float16, bfloat16 or int8")] = "float16",
    draft: Annotated[str | None, typer.Option(help="a smaller model that guesses, self or ngram")] = None,
    kernel: KernelOption = "fast",
    device: DeviceOption = "auto",
) -> None:
    """Serve MODEL over HTTP with OpenAI's interface."""
    try:
        from runtime.server import serve_model
    except ModuleNotFoundError as error:
        raise UsageError(f"the server needs {error.name}", how_to_fix="pip install 'bitwright[serve]'") from error
    options: dict[str, Any] = {"kv_tokens": kv_tokens, "kv_dtype": kv_dtype, "draft": draft, "kernel": kernel}
    serve_model(model, host, port, name=name, api_key=api_key, device=pick_device(device), **options)
