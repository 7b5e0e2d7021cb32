"""One run, end to end: check, calibrate, allocate, quantise, write, read back, measure, report."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from calib.text import CalibrationSet, generate_text, load_text
from compress.algorithms import Outcome
from compress.allocate import allocate
from compress.plan import Plan, make_plan
from compress.preflight import preflight
from compress.progress import Progress
from compress.quantize import Quantizer, too_few
from compress.recipe import PerplexitySpec, Recipe
from compress.report import LayerLog, OutputDirectory, sha256, source_hashes, write_report
from compress.work import Parts, Work
from formats.checkpoint import Checkpoint
from formats.containers import open_checkpoint
from formats.dense import load_tokenizer
from formats.qtensor import Grid, QTensor


def run(
    recipe: Recipe,
    model: str,
    out: Path,
    *,
    resume: bool = False,
    overwrite: bool = False,
    device: str = "cpu",
    progress: Progress,
    command: str,
) -> dict[str, Any]:
    """Compress `model` into the directory `out`. Returns a summary with sizes and, where measured, the loss.

    Whether that loss passes the recipe's gate is for the caller to ask: `runtime.evaluate.run.check_gates`.
    """
    with open_checkpoint(model) as checkpoint:
        plan = make_plan(recipe, checkpoint)
        tokenizer = load_tokenizer(checkpoint)
        output = OutputDirectory(out, resume=resume, overwrite=overwrite, needed=2 * plan.nbytes)
        if recipe.evaluate is not None:
            _read_windows(recipe.evaluate.perplexity, tokenizer)  # a text that is missing or short is told now
        progress.start("check", len(checkpoint.names()))
        preflight(plan, checkpoint, out, tokenizer, progress.update)
        with output as folder:
            fingerprint = _fingerprint(recipe, checkpoint)
            work = Work(folder / "work", fingerprint)
            text = _calibration(recipe, checkpoint, tokenizer, work, device, progress)
            curve: list[tuple[int, float]] = []
            if recipe.allocate is not None:
                assert text is not None
                source = fingerprint["source"]
                plan, curve = allocate(plan, checkpoint, text.tokens, source, folder, device=device, progress=progress)
            log = LayerLog(folder)
            _quantize(plan, checkpoint, text, work, folder, log, device, progress)
            _write(plan, checkpoint, work, folder, progress)
            _verify(plan, folder, work, progress)
            if plan.container.name == "gguf" and text is not None:
                _save_imatrix(folder / "calibration" / "imatrix.gguf", checkpoint, text, work)
            evaluation = _evaluate(recipe, checkpoint, folder, progress)
            starved = [
                name.removesuffix(".weight")
                for name, (mean, tokens) in work.importances().items()
                if too_few(tokens, len(mean))
            ]
            shutil.rmtree(work.folder)
            if evaluation is not None and curve:
                _plot_curve(folder, plan, curve, evaluation)
            notes = [f"rounded without calibration, too few tokens seen: {', '.join(starved)}"] if starved else []
            write_report(
                folder,
                plan,
                checkpoint,
                command=command,
                calibration=text,
                evaluation=evaluation,
                layers=log.records,
                notes=notes,
            )
            output.commit()
    summary = {"out": str(out), "bytes": plan.nbytes, "bits_per_weight": round(plan.bits_per_weight, 4)}
    return summary | (evaluation or {})


def _fingerprint(recipe: Recipe, checkpoint: Checkpoint) -> dict[str, Any]:
    """Everything that the codes depend on."""
    chosen = recipe.model_dump(mode="json", exclude={"evaluate", "description", "model"})
    data = [Path(source).expanduser() for source in recipe.calibration.data or []]
    return {
        "recipe": chosen,
        "source": source_hashes(checkpoint),
        "text": {str(path): sha256(path) for path in data if path.is_file()},
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }


def _read_windows(spec: PerplexitySpec, tokenizer: Any) -> None:
    from runtime.evaluate.perplexity import read_windows

    read_windows(tokenizer, Path(spec.data), spec.length, spec.chunks)


def _calibration(
    recipe: Recipe, checkpoint: Checkpoint, tokenizer: Any, work: Work, device: str, progress: Progress
) -> CalibrationSet | None:
    if not recipe.needs_text:
        return None
    spec, seed = recipe.calibration, recipe.calibration_seed
    if spec.data:
        return load_text(
            spec.data,
            tokenizer,
            samples=spec.samples,
            length=spec.length,
            seed=seed,
            split=spec.split,
            column=spec.column,
            chat_template=spec.chat_template,
        )
    kept = work.load_tokens()
    if kept is not None:
        return CalibrationSet(kept[0], **kept[1])
    progress.note("no calibration text is given: the model writes its own")
    progress.start("write text", spec.samples)
    text = generate_text(
        checkpoint,
        tokenizer,
        samples=spec.samples,
        length=spec.length,
        seed=seed,
        device=device,
        progress=progress.update,
    )
    about = {key: value for key, value in vars(text).items() if key != "tokens"}
    work.save_tokens(text.tokens, about)
    return text


def _quantize(
    plan: Plan,
    checkpoint: Checkpoint,
    text: CalibrationSet | None,
    work: Work,
    folder: Path,
    log: LayerLog,
    device: str,
    progress: Progress,
) -> None:
    """Bring every part into `work`."""
    progress.start("quantise", len(plan.grids))
    known = {record["name"] for record in log.records}

    def on_layer(name: str, grid: Grid, outcome: Outcome, seconds: float) -> None:
        progress.layer(name, grid.name, outcome.error, outcome.rtn_error, seconds)
        if name not in known:
            log.write(name, grid.name, outcome.error, outcome.rtn_error, outcome.damp, seconds)

    rows = text.tokens if text is not None and any(step.needs_text for step in plan.recipe.steps) else None
    Quantizer(plan, checkpoint, work, on_layer, rows, device, spill_dir=work.folder).run()


def _save_imatrix(path: Path, checkpoint: Checkpoint, text: CalibrationSet, work: Work) -> None:
    """The mean squared inputs, for llama-quantize or for another run."""
    from formats.containers.imatrix import Imatrix, write_imatrix

    seen = work.importances()
    imatrix = Imatrix(
        {name: mean for name, (mean, _) in seen.items()},
        {name: tokens for name, (_, tokens) in seen.items()},
        datasets=[text.source],
        chunk_size=text.tokens.shape[1],
    )
    if seen:
        path.parent.mkdir(exist_ok=True)
        write_imatrix(path, checkpoint.arch, imatrix)


def _finished(work: Work) -> Iterator[Parts]:
    return (work.load(path.stem) for path in sorted(work.folder.glob("*.safetensors")) if path.stem != "tokens")


def _write(plan: Plan, checkpoint: Checkpoint, work: Work, folder: Path, progress: Progress) -> None:
    """The container's files: finished tensors from `work`, everything else from the source."""
    names = checkpoint.names()
    progress.start("write", len(names))
    with torch.no_grad():
        writer = plan.container.open_writer(folder, checkpoint, plan.grids, plan.options)
        written = set()
        for parts in _finished(work):
            for name, value in parts.items():
                writer.write(name, value)
                written.add(name)
                progress.advance()
        for name in names:
            if name not in written:
                writer.write(name, _float_tensor(checkpoint, name))
                progress.advance()
        writer.close()


def _float_tensor(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    """A tensor that stays float, in its own dtype; float32 when the source holds it quantised."""
    value = checkpoint.read(name)
    return checkpoint.read_dense(name) if isinstance(value, QTensor) else value


def _verify(plan: Plan, folder: Path, work: Work, progress: Progress) -> None:
    """Read the files back through the container's reader: every code and parameter must be what was chosen."""
    progress.start("read back", len(plan.grids))
    path = _model_path(folder)
    with plan.container.open_reader(path) as reader:
        for parts in _finished(work):
            for name, value in parts.items():
                if not isinstance(value, QTensor):
                    continue
                expected = value.dequantize()
                stored = reader.stored_as(name)
                if isinstance(stored, str):  # a float container holds the values in its own dtype
                    expected = expected.to(getattr(torch, stored)).float()
                assert torch.equal(reader.read_linear(name), expected), f"{name} read back differs from what was chosen"
                progress.advance()


def _model_path(folder: Path) -> Path:
    """What to open: the GGUF file, or the directory."""
    file = folder / "model.gguf"
    return file if file.exists() else folder


def _evaluate(recipe: Recipe, checkpoint: Checkpoint, folder: Path, progress: Progress) -> dict[str, Any] | None:
    if recipe.evaluate is None:
        return None
    from runtime.evaluate.run import evaluate

    spec = recipe.evaluate.perplexity
    progress.start("evaluate", spec.chunks)
    return evaluate(
        _model_path(folder),
        against=checkpoint.path,
        text=spec.data,
        length=spec.length,
        chunks=spec.chunks,
        progress=progress.update,
    )


def _plot_curve(folder: Path, plan: Plan, curve: list[tuple[int, float]], evaluation: dict[str, Any]) -> None:
    """plots/: what other targets would have cost by the measurement, and the loss of the one chosen."""
    from compress.plots import Point, size_quality

    chosen = Point(f"{plan.bits_per_weight:.2f} bpw", plan.nbytes / 1e6, evaluation["kld"], evaluation["kld_stderr"])
    (folder / "plots").mkdir(exist_ok=True)
    size_quality([chosen], folder / "plots" / "allocation", curve=[(size / 1e6, cost) for size, cost in curve])
