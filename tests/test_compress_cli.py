"""The command: exit codes, what goes to stdout and to stderr, and each verb once on a tiny model."""

import io
import json
import shlex
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import compress.pipeline
from compress.cli import invoke
from compress.progress import Progress
from formats.errors import DataError, GateFailed, ResourceError

RECIPE = """\
version: 1
steps: [{algorithm: rtn, grid: {bits: 4, group_size: 32}}]
output: {format: gptq}
"""


@pytest.fixture
def recipe(tmp_path):
    (tmp_path / "r.yaml").write_text(RECIPE)
    return str(tmp_path / "r.yaml")


@pytest.fixture
def quantize(capsys, monkeypatch):
    """quantize(*arguments) -> (exit code, stdout, stderr)."""

    def quantize(*arguments):
        arguments = [str(a) for a in arguments]
        monkeypatch.setattr(sys, "argv", ["quantize", *arguments])
        code = invoke(arguments)
        return code, *capsys.readouterr()

    return quantize


@pytest.fixture(scope="module")
def packed(tiny_model, tmp_path_factory):
    """A GPTQ directory."""
    from formats.containers import CONTAINERS, open_checkpoint
    from formats.grids import parse_grid
    from formats.qtensor import QTensor

    out, grid = tmp_path_factory.mktemp("packed"), parse_grid("int4-g32-sym")
    with open_checkpoint(tiny_model()) as source:
        grids = {name: grid for name in source.names() if name.endswith("_proj.weight")}
        writer = CONTAINERS["gptq"]().open_writer(out, source, grids, {})
        for name in source.names():
            value = source.read(name)
            if name in grids:
                params = grid.fit(value)
                value = QTensor(grid, grid.encode(value, params), params)
            writer.write(name, value)
        writer.close()
    return out


def test_help_and_usage_errors(quantize):
    for verb in ("run", "plan", "check", "convert", "eval", "inspect", "list"):
        code, out, _ = quantize(verb, "--help")
        assert code == 0 and "Usage" in out
    for wrong in (
        ["rnu"],
        ["plan"],
        ["list", "grid"],
        ["check", "r.yaml", "--sett", "x"],
        ["eval", "m", "--chunks", "0"],
    ):
        code, out, err = quantize(*wrong)
        assert code == 2 and out == "" and "Error" in err
    assert quantize("--version")[:2] == (0, f"bitwright {version('bitwright')}\n")


def test_check_prints_the_resolved_recipe_or_all_mistakes(quantize, recipe, tmp_path):
    code, out, err = quantize("check", recipe, "--set", "steps.0.bits=3")
    assert code == 0 and "grid: int3-g32" in out and err == ""
    code, out, _ = quantize("check", recipe, "--output", "json")
    assert json.loads(out)["steps"][0]["grid"] == "int4-g32"
    code, out, err = quantize("check", recipe, "--set", "steps.0.bits=9", "--set", "sede=1")
    assert code == 2 and out == "" and err.startswith("error: ") and 'did you mean "seed"?' in err
    assert "less than or equal to 8" in err and "Traceback" not in err


def test_plan_runs_nothing(quantize, recipe, tiny_model, tmp_path):
    code, out, _ = quantize("plan", recipe, tiny_model())
    assert code == 0 and "int4-g32" in out and "bits per weight" in out and "estimate" in out
    code, out, _ = quantize("plan", recipe, tiny_model(), "--output", "json")
    assert json.loads(out)["container"] == "gptq"
    code, dry, _ = quantize("run", recipe, tiny_model(), "-o", tmp_path / "out", "--dry-run", "--output", "json")
    assert code == 0 and json.loads(dry)["tensors"] == json.loads(out)["tensors"]
    assert not (tmp_path / "out").exists()
    code, _, err = quantize("plan", recipe, tiny_model(), "--target", "llama.cpp")
    assert code == 2 and "reads gguf, not gptq" in err


def test_a_missed_gate_shows_the_result_and_keeps_the_output(quantize, tiny_model, tmp_path):
    (tmp_path / "text.txt").write_text("The quick brown fox jumps over the lazy dog.\n" * 20)
    evaluate = "evaluate: {perplexity: {data: text.txt, length: 32, chunks: 2}, gate: {max_kld: 1.0e-9}}\n"
    (tmp_path / "r.yaml").write_text(RECIPE + evaluate)
    for i, form in enumerate(("human", "json")):
        out = tmp_path / f"out{i}"
        code, shown, err = quantize("run", tmp_path / "r.yaml", tiny_model(), "-o", out, "--output", form)
        assert code == 5 and err.count("error: ") == 1 and "above the allowed 1e-09" in err
        assert "KL divergence" in shown if form == "human" else json.loads(shown)["kld"] > 1e-9
        assert (out / "manifest.json").exists() and not (tmp_path / f"out{i}.partial").exists()


def test_what_would_fail_late_is_told_early(quantize, recipe, tiny_model, tmp_path):
    """Before the model's weights are looked at: no phase of the run begins."""
    (tmp_path / "short.txt").write_text("too short")
    text = ["--set", f"evaluate.perplexity.data={tmp_path / 'short.txt'}"]
    for out, more, code, said in (
        ("out", text, 3, "fewer than one window"),
        ("r.yaml/out", [], 4, "cannot write here"),
        ("out", ["--device", "cuda:77"], 2, 'no device "cuda:77"'),
    ):
        found, shown, err = quantize("run", recipe, tiny_model(), "-o", tmp_path / out, *more)
        assert (found, shown) == (code, "") and err.startswith("error: ") and said in err
        assert not list(tmp_path.glob("out*"))


def test_models_that_are_not(quantize, recipe, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "cut.gguf").write_bytes(b"GGUF\x03\x00\x00")
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "config.json").write_text('{"model_type": "mamba"}')
    for model in (tmp_path / "missing", tmp_path / "empty", tmp_path / "cut.gguf", recipe):
        code, out, err = quantize("plan", recipe, model)
        assert code == 3 and out == "" and err.startswith("error: "), model
    code, _, err = quantize("inspect", tmp_path / "odd")
    assert code == 3 and '"mamba" is not supported' in err and "llama" in err


def test_inspect(quantize, packed):
    code, out, _ = quantize("inspect", packed)
    assert code == 0 and "int4-g32-sym" in out and "model.layers.*.mlp.up_proj.weight" in out and "####" in out
    code, out, _ = quantize("inspect", packed, "--output", "json")
    facts = json.loads(out)
    assert facts["container"] == "gptq" and facts["histogram"]["int4-g32-sym"] == 2 * (
        2 * 64 * 64 + 2 * 32 * 64 + 3 * 8192
    )
    code, _, err = quantize("inspect", packed, "--verify")
    assert code == 3 and "manifest.json" in err


def test_convert_keeps_the_codes(quantize, packed, tmp_path):
    import torch

    from formats.containers import open_checkpoint

    for format in ("compressed-tensors", "gguf"):  # int4-g32-sym is q4_0 by another name
        code, out, err = quantize("convert", packed, "-o", tmp_path / format, "--format", format)
        assert code == 0 and "14 tensors with their codes unchanged" in out, err
        with open_checkpoint(packed) as before, open_checkpoint(tmp_path / format) as after:
            for name in before.names():
                one, two = before.read(name), after.read(name)
                if hasattr(one, "codes"):
                    assert (
                        torch.equal(one.codes, two.codes) or format == "gguf"
                    )  # its q and k rows are permuted on disk
                    assert torch.equal(one.dequantize(), two.dequantize()), name
    code, out, _ = quantize("convert", packed, "-o", tmp_path / "plain", "--format", "safetensors", "--output", "json")
    assert json.loads(out)["decoded"] == 14
    code, _, err = quantize("convert", packed, "-o", tmp_path / "plain", "--format", "gguf")
    assert code == 2 and "exists already" in err


def test_convert_says_when_it_cannot(quantize, packed, tiny_model, tmp_path):
    from formats.containers import open_checkpoint

    quantize("convert", packed, "-o", tmp_path / "gguf", "--format", "gguf")
    code, out, err = quantize("convert", tmp_path / "gguf", "-o", tmp_path / "back", "--format", "gptq")
    assert code == 0, err
    with open_checkpoint(tmp_path / "back") as back:
        assert back.stored_as("model.layers.0.mlp.up_proj.weight").name == "int4-g32-sym"
    code, _, err = quantize("convert", tiny_model(), "-o", tmp_path / "x", "--format", "gptq")
    assert code == 2 and "the model is not quantised" in err
    code, _, err = quantize("convert", packed, "-o", tmp_path / "x", "--format", "ggfu")
    assert code == 2 and 'did you mean "gguf"?' in err
    code, _, err = quantize("convert", packed, "-o", tmp_path / "x", "--format", "gguf", "--shard-size", "big")
    assert code == 2 and "is not a size" in err
    assert not (tmp_path / "x").exists()


def test_eval(quantize, packed, tiny_model, tmp_path):
    (tmp_path / "text.txt").write_text("The quick brown fox jumps over the lazy dog, and the dog does not care.\n" * 20)
    arguments = [
        "eval",
        packed,
        "--against",
        tiny_model(),
        "--text",
        tmp_path / "text.txt",
        "--length",
        "32",
        "--chunks",
        "3",
    ]
    code, out, _ = quantize(*arguments, "--output", "json")
    found = json.loads(out)
    assert code == 0 and {"ppl", "ppl_stderr", "tokens", "kld", "top1", "ref_ppl"} <= found.keys()
    code, out, _ = quantize(*arguments, "--max-kld", found["kld"] / 2)
    assert code == 5 and "KL divergence" in out  # the result is printed all the same
    code, _, err = quantize("eval", packed)
    assert code == 2 and "--text" in err
    code, out, err = quantize("eval", packed, "--text", tmp_path / "text.txt", "--max-kld", "1")
    assert (code, out) == (2, "") and err.startswith("error: ") and "--against" in err


TASK = """\
task: local_text
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
output_type: loglikelihood_rolling
test_split: test
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list: [{{metric: byte_perplexity}}]
"""


def test_eval_tasks(quantize, tmp_path, monkeypatch):
    """Our own tasks, one in a user's folder and one in a user's file, on the embedded model, without a network."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "my tasks"
    folder.mkdir()
    (folder / "items.jsonl").write_text("".join(json.dumps({"text": f"import os{i}"}) + "\n" for i in range(3)))
    (folder / "local.yaml").write_text(TASK.format(data=json.dumps(str(folder / "items.jsonl"))))
    model = Path(__file__).parent.parent / "recipes" / "quickstart" / "model"
    code, out, _ = quantize("eval", model, "--tasks", f"bitwright,{folder}", "--limit", 3, "--output", "json")
    found = json.loads(out)
    assert code == 0 and {"results", "configs", "versions", "n-shot", "n-samples", "config"} <= found.keys()
    assert found["results"].keys() == {"bitwright_endings", "bitwright_sequences", "local_text"}
    assert found["results"]["local_text"]["byte_perplexity,none"] > 1
    assert found["n-samples"]["bitwright_endings"]["effective"] == 3
    code, table, _ = quantize("eval", model, "--tasks", folder / "local.yaml")
    (header, row) = table.splitlines()
    assert code == 0 and row.split()[:3] == ["local_text", "3", "byte_perplexity"]
    assert float(row.split()[3]) == pytest.approx(found["results"]["local_text"]["byte_perplexity,none"], abs=1e-3)
    code, out, err = quantize("eval", model, "--tasks", "bitwright_edings")
    assert (code, out) == (2, "") and "no such task: bitwright_edings" in err


@pytest.mark.parametrize("what", ["recipes", "algorithms", "grids", "containers", "architectures", "kernels"])
def test_list(quantize, what):
    code, out, _ = quantize("list", what)
    assert code == 0 and len(out.splitlines()) > 2
    code, out, _ = quantize("list", what, "--output", "json")
    assert all(entry["name"] and entry["about"] for entry in json.loads(out))


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (DataError("bad model", "m", "get another"), 3, "error: m: bad model\n  fix: get another"),
        (ResourceError("no space"), 4, "error: no space"),
        (GateFailed("too lossy"), 5, "error: too lossy"),
        (MemoryError(), 4, "out of memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"), 4, "out of memory"),
        (KeyboardInterrupt(), 130, "resume with\n  quantize run 'a b.yaml' m -o 'o u t' --resume"),
    ],
)
def test_exit_codes(quantize, monkeypatch, tmp_path, error, code, said):
    def fail(*_, **__):
        raise error

    (tmp_path / "a b.yaml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(compress.pipeline, "run", fail)
    found, out, err = quantize("run", "a b.yaml", "m", "-o", "o u t")
    assert (found, out) == (code, "") and said in err and "Traceback" not in err


def test_what_the_pipeline_is_given(quantize, monkeypatch, recipe):
    calls = []

    def run(recipe, model, out, **options):
        calls.append((recipe, model, out, options))
        return {
            "out": str(out),
            "bytes": 5_000_000,
            "bits_per_weight": 4.5,
            "ppl": 20.0,
            "ppl_stderr": 0.1,
            "tokens": 9,
        }

    monkeypatch.setattr(compress.pipeline, "run", run)
    code, out, _ = quantize("run", recipe, "mödel x", "-o", "out", "--resume", "--device", "cpu", "--set", "seed=4")
    assert code == 0 and "5.0 MB, 4.500 bits per weight" in out and "20.00 ± 0.10" in out
    (checked, model, folder, options) = calls[0]
    assert checked.seed == 4 and model == "mödel x" and folder.name == "out"
    assert options["resume"] and not options["overwrite"] and options["device"] == "cpu"
    assert options["command"] == f"quantize run {recipe} 'mödel x' -o out --device cpu --set seed=4"
    code, out, _ = quantize("run", recipe, "m", "-o", "out", "--output", "json")
    assert json.loads(out)["ppl"] == 20.0
    code, _, err = quantize("run", recipe, "-o", "out")
    assert code == 2 and "no model given" in err
    quantize("run", recipe, "-o", "out", "--set", "model=there")
    assert calls[-1][1] == "there"


STUB = """
import sys, types, compress.cli
module = types.ModuleType("compress.catalogue")
module.describe = module.recipe_rows = None
module.catalogue = lambda what: [dict(name=str(1 / {divisor}), about="about")] * 100_000
sys.modules["compress.catalogue"] = module
compress.cli.main()
"""


def test_internal_errors_show_a_trace_only_on_request():
    for debug in ([], ["--debug"]):
        command = [sys.executable, "-c", STUB.format(divisor=0), *debug, "list", "grids"]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 1 and "ZeroDivisionError" in done.stderr
        assert ("Traceback" in done.stderr) == bool(debug)


def test_a_closed_pipe_is_no_error():
    command = shlex.join([sys.executable, "-c", STUB.format(divisor=1), "list", "grids"])
    done = subprocess.run(f"{command} | head -1", shell=True, capture_output=True, text=True, executable="/bin/bash")
    assert done.stdout == "grids\n" and done.stderr == ""


def test_progress_without_a_terminal():
    stream = io.StringIO()
    with Progress(stream) as progress:
        progress.start("quantise", 12)
        progress.layer("model.layers.0.mlp.up_proj", "q4_k", 0.01234, 0.0456, 1.25)
        progress.advance()
        progress.note("[a note] with brackets")
    assert stream.getvalue().splitlines() == [
        "quantise: 12 steps",
        "[ 1/12] model.layers.0.mlp.up_proj  q4_k  error 0.0123 (round-to-nearest 0.0456)  1.2 s  left 0:00",
        "[a note] with brackets",
    ]
    assert "\x1b" not in stream.getvalue()


def test_progress_on_a_terminal(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setenv("TERM", "xterm")
    for colours in (True, False):
        if not colours:
            monkeypatch.setenv("NO_COLOR", "1")
        with Progress(Terminal()) as progress:
            progress.start("quantise", 2)
            progress.layer("layer-a", "q4_k", 0.1, 0.2, 1)
            progress._bar.refresh()
            shown = progress.console.file.getvalue()
        assert "quantise layer-a" in shown and "1/2" in shown
        assert ("\x1b[38" in shown or "\x1b[3" in shown) == colours
