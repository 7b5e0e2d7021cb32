"""Whole runs on tiny models: every family, every container, interruptions, gates, allocation."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml

from compress.pipeline import run
from compress.progress import Progress
from compress.recipe_file import load_recipe
from formats.containers import open_checkpoint
from formats.errors import UsageError
from formats.qtensor import QTensor

TEXT = Path(__file__).read_text(encoding="utf-8") * 2


def write_recipe(folder: Path, **sections) -> Path:
    (folder / "text.txt").write_text(TEXT)
    recipe = {
        "version": 1,
        "calibration": {"data": "text.txt", "samples": 6, "length": 32},
        "steps": [{"algorithm": "gptq", "grid": "q4_0"}],
        "output": {"format": "gguf"},
        "evaluate": {"perplexity": {"data": "text.txt", "length": 32, "chunks": 4}},
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe | sections))
    return path


def compress(recipe: Path, model: Path, out: Path, *settings: str, **options):
    with Progress(quiet=True) as progress:
        return run(load_recipe(str(recipe), settings), str(model), out, progress=progress, command="test", **options)


@pytest.mark.parametrize(
    "family", ["llama", "mistral", "qwen2", "qwen3", "gemma3_text", "gpt2", "mixtral", "qwen3_moe"]
)
def test_every_family_goes_through(family: str, tiny_model, tmp_path) -> None:
    result = compress(write_recipe(tmp_path), tiny_model(family), tmp_path / "out")
    assert 0 < result["kld"] < 0.2 and result["top1"] > 0.5
    names = {p.name for p in (tmp_path / "out").iterdir()}
    assert {"model.gguf", "README.md", "recipe.yaml", "manifest.json", "layers.jsonl", "eval.json"} <= names
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.parametrize(
    ("container", "grid"),
    [
        ("safetensors", "int4-g32"),
        ("compressed-tensors", "int4-g32-sym"),
        ("compressed-tensors", "int8-channel-sym"),
        ("gptq", "int4-g32"),
        ("gptq", "int3-g32"),
        ("awq", "int4-g32"),
        ("gguf", "q5_1"),
    ],
)
def test_every_container_holds_what_was_chosen(container: str, grid: str, tiny_model, tmp_path) -> None:
    steps = [{"algorithm": "gptq", "grid": grid}]
    recipe = write_recipe(tmp_path, steps=steps, output={"format": container})
    result = compress(recipe, tiny_model("qwen2"), tmp_path / "out")
    assert result["kld"] < 0.3
    layers = [json.loads(line) for line in (tmp_path / "out" / "layers.jsonl").read_text().splitlines()]
    assert all(layer["error"] < layer["rtn_error"] for layer in layers if "layers" in layer["name"])


def test_calibration_beats_rounding(tiny_model, tmp_path) -> None:
    model, losses = tiny_model("llama", hidden=256), {}
    for name, steps in {
        "rtn": [{"algorithm": "rtn", "grid": "int3-g64"}],
        "importance": [{"algorithm": "rtn", "grid": "int3-g64", "importance": True}],
        "awq": [{"algorithm": "awq", "grid": "int3-g64", "points": 5}],
        "gptq": [{"algorithm": "gptq", "grid": "int3-g64"}],
        "awq+gptq": [{"algorithm": "awq", "points": 5}, {"algorithm": "gptq", "grid": "int3-g64"}],
    }.items():
        recipe = write_recipe(tmp_path, steps=steps, output={"format": "safetensors"})
        samples = "calibration.samples=32"
        losses[name] = compress(recipe, model, tmp_path / "out", samples, overwrite=True)["kld"]
    assert losses["gptq"] < 0.8 * losses["rtn"]
    assert losses["awq+gptq"] < 0.8 * losses["rtn"]
    assert losses["importance"] < 1.05 * losses["rtn"] and losses["awq"] < 1.05 * losses["rtn"]


def test_untouched_tensors_are_the_sources(tiny_model, tmp_path) -> None:
    overrides = [{"match": "*.down_proj", "skip": True}]
    recipe = write_recipe(tmp_path, output={"format": "safetensors"}, overrides=overrides)
    compress(recipe, tiny_model("llama"), tmp_path / "out", "steps.0.grid=int4-g32")
    with open_checkpoint(tiny_model("llama")) as source, open_checkpoint(tmp_path / "out") as result:
        assert source.names() == result.names()
        for name in source.names():
            same = torch.equal(source.read_dense(name), result.read_dense(name))
            assert same == ("proj" not in name or "down_proj" in name), name


def test_without_text_the_model_writes_its_own(tiny_model, tmp_path) -> None:
    recipe = write_recipe(tmp_path, calibration={"samples": 4, "length": 16})
    compress(recipe, tiny_model("llama"), tmp_path / "out")
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["calibration"]["generated"] is True
    assert "written by the model itself" in (tmp_path / "out" / "README.md").read_text()


def test_an_imatrix_of_one_run_serves_another(tiny_model, tmp_path) -> None:
    model, text = tiny_model("llama"), {"data": "text.txt", "samples": 32, "length": 32}
    importance = [{"algorithm": "rtn", "grid": "q4_0", "importance": True}]
    compress(write_recipe(tmp_path, steps=importance, calibration=text), model, tmp_path / "first")
    reuse = [importance[0] | {"imatrix": "first/calibration/imatrix.gguf"}]
    compress(write_recipe(tmp_path, steps=reuse, calibration={}), model, tmp_path / "second")
    with open_checkpoint(tmp_path / "first/model.gguf") as a, open_checkpoint(tmp_path / "second/model.gguf") as b:
        first, second = (c.read("model.layers.0.mlp.down_proj.weight") for c in (a, b))
    assert torch.equal(first.codes, second.codes)
    assert json.loads((tmp_path / "second" / "manifest.json").read_text())["calibration"] is None


def test_experts_without_tokens_are_named(tiny_model, tmp_path) -> None:
    steps = [{"algorithm": "gptq", "grid": "q4_0"}]
    recipe = write_recipe(tmp_path, steps=steps, calibration={"data": "text.txt", "samples": 1, "length": 8})
    compress(recipe, tiny_model("mixtral"), tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "too few tokens seen" in card and "model.layers.1.block_sparse_moe.experts.2.w2" in card


def test_allocation_meets_its_target_and_its_measurement_serves_another(tiny_model, tmp_path) -> None:
    model = tiny_model("llama", hidden=256)
    allocate = {"target_bpw": 5.0, "candidates": ["q2_k", "q3_k", "q4_k", "q6_k", "q8_0"]}
    recipe = write_recipe(tmp_path, steps=[{"algorithm": "gptq"}], allocate=allocate)
    first = compress(recipe, model, tmp_path / "first")
    assert 4.5 < first["bits_per_weight"] <= 5.0
    assert (tmp_path / "first" / "plots").is_dir()
    measurement = f"allocate.measurement={tmp_path / 'first' / 'sensitivity.json'}"
    second = compress(recipe, model, tmp_path / "second", measurement, "allocate.target_bpw=3.5")
    assert 3.0 < second["bits_per_weight"] <= 3.5 and second["kld"] > first["kld"]
    with pytest.raises(UsageError, match="smallest candidates"):
        compress(recipe, model, tmp_path / "third", measurement, "allocate.target_bpw=2.0")
    assert not (tmp_path / "third.partial").exists()
    with open_checkpoint(tmp_path / "first") as checkpoint:
        grids = {v.grid.name for n in checkpoint.names() if isinstance(v := checkpoint.read(n), QTensor)}
    assert len(grids) > 1


def test_a_resumed_run_refuses_another_recipe(tiny_model, tmp_path, monkeypatch) -> None:
    recipe = write_recipe(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("compress.pipeline._write", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            compress(recipe, tiny_model("llama"), tmp_path / "out")
    with pytest.raises(UsageError, match="made from something else") as error:
        compress(recipe, tiny_model("llama"), tmp_path / "out", "steps.0.damp=0.5", resume=True)
    assert "0.5" in str(error.value) and "0.03" in str(error.value)
    assert compress(recipe, tiny_model("llama"), tmp_path / "out", resume=True)["kld"] > 0


def test_kill_at_any_moment_and_resume_to_the_same_bytes(tiny_model, tmp_path) -> None:
    model, recipe = tiny_model("llama", layers=6), write_recipe(tmp_path)
    command = [Path(sys.executable).with_name("quantize"), "run", str(recipe), str(model)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
    subprocess.run([*command, "-o", tmp_path / "whole"], check=True, env=environment, capture_output=True)
    chance, out, work = random.Random(os.getpid()), tmp_path / "out", tmp_path / "out.partial" / "work"
    for _ in range(3):
        process = subprocess.Popen(
            [*command, "-o", out, "--resume"], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        before = len(list(work.glob("*.safetensors")))
        while process.poll() is None and len(list(work.glob("*.safetensors"))) <= before:
            time.sleep(0.01)
        time.sleep(chance.random() * 0.1)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert not out.exists()
    subprocess.run([*command, "-o", out, "--resume"], check=True, env=environment, capture_output=True)
    assert (out / "model.gguf").read_bytes() == (tmp_path / "whole" / "model.gguf").read_bytes()
    layers = [[json.loads(x) for x in (d / "layers.jsonl").read_text().splitlines()] for d in (out, tmp_path / "whole")]
    assert [{**x, "seconds": 0} for x in layers[0]] == [{**x, "seconds": 0} for x in layers[1]]
