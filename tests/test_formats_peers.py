"""Slow: files of ours in other people's engines, and files of theirs in our readers. PEERS names the directory of their
environments, see tests/peers/install.sh; without it nothing runs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent / "peers"))

import gguf
import matrix
import numpy as np
from quantised import decoded, logits

from formats.containers import open_checkpoint

PEERS = Path(os.environ.get("PEERS", ".venv-peers"))
QUICKSTART = Path(__file__).parents[1] / "recipes" / "quickstart" / "model"
pytestmark = pytest.mark.slow


def python_of(peer: str) -> Path:
    python = PEERS.absolute() / peer / "bin" / "python"
    if not python.exists():
        pytest.skip(f"{peer} is not installed")
    return python


@pytest.mark.parametrize("family", matrix.FAMILIES)
def test_their_engines_read_ours(family: str) -> None:
    python_of("gptqmodel")
    for row in matrix.run(PEERS.absolute(), (family,)):
        print(row)
        assert matrix.is_right(*row[3:]), row


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return matrix.make_source("llama", tmp_path_factory.mktemp("source"), hidden=256)


def made_by(peer: str, source: Path, out: Path, method: str) -> Path:
    command = [str(python_of(peer)), str(matrix.HERE / "foreign.py"), peer, str(source), str(out), method]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment |= {"OMP_NUM_THREADS": "1", "GPTQMODEL_CPU_WORKERS": "2"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return out


@pytest.mark.parametrize(
    ("scheme", "grids"),
    [
        ("W4A16", {"int4-g128-sym"}),
        ("W4A16_ASYM", {"int4-g128"}),
        ("W8A8", {"int8-channel-sym"}),
        ("mixed", {"int4-g128-sym", "int8-g128-sym"}),
    ],
)
def test_we_read_what_llm_compressor_wrote(source: Path, tmp_path: Path, scheme: str, grids: set[str]) -> None:
    out = made_by("llmcompressor", source, tmp_path / "theirs", scheme)
    with open_checkpoint(out) as model:
        assert {str(model.stored_as(name)) for name in model.names()} == grids | {"bfloat16"}
    ours = logits(decoded(out, tmp_path / "decoded"))
    if scheme in ("W4A16", "mixed"):
        assert (matrix.in_transformers(out, dequantize=False) - ours).abs().max() < 1e-5
    assert (ours - logits(source)).abs().max() < 1.5


@pytest.mark.parametrize("method", ["gptq-sym", "gptq-act-order", "gptq-mixed"])
def test_we_read_what_gptqmodel_wrote(source: Path, tmp_path: Path, method: str) -> None:
    """(It quantises to AWQ on a GPU only.)"""
    out = made_by("gptqmodel", source, tmp_path / method, method)
    with open_checkpoint(out) as model:
        grids = {str(model.stored_as(name)) for name in model.names()}
    assert any(grid.startswith("int4-g32") for grid in grids)
    assert ("int8-g64-sym" in grids) == (method == "gptq-mixed")
    ours = logits(decoded(out, tmp_path / "decoded"))
    theirs = matrix.in_peer(PEERS.absolute(), [out], tmp_path)[method]
    assert np.abs(theirs - ours.numpy()).max() < 1e-3
    assert torch.isfinite(ours).all()


@pytest.mark.parametrize("kind", ["Q4_K_M", "Q3_K_S", "Q2_K", "IQ4_XS", "Q5_1"])
def test_we_read_mixtures_of_llama_quantize(kind: str, tmp_path: Path) -> None:
    """Mainline's tool, in PEERS/llama.cpp/build/bin; gguf-py says what each tensor holds."""
    tools = PEERS.absolute() / "llama.cpp" / "build" / "bin"
    if not (tools / "llama-quantize").exists():
        pytest.skip("llama.cpp is not built")
    convert = [Path(sys.executable).with_name("quantize"), "convert", QUICKSTART, "-o", tmp_path / "float"]
    subprocess.run([*convert, "--format", "gguf", "--dtype", "float32"], check=True, capture_output=True)
    file = tmp_path / "theirs.gguf"
    command = [tools / "llama-quantize", tmp_path / "float" / "model.gguf", file, kind, "1"]
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, "LD_LIBRARY_PATH": str(tools)})
    stored = {t.name: t for t in gguf.GGUFReader(file).tensors}
    with open_checkpoint(file) as checkpoint:
        names = {"token_embd": "model.embed_tokens"}
        for i in range(4):
            names |= {f"blk.{i}.ffn_{n}": f"model.layers.{i}.mlp.{n}_proj" for n in ("up", "gate", "down")}
            names |= {f"blk.{i}.attn_v": f"model.layers.{i}.self_attn.v_proj"}
        for theirs, ours in names.items():
            tensor = stored[f"{theirs}.weight"]
            want = gguf.dequantize(tensor.data, tensor.tensor_type)
            assert np.array_equal(checkpoint.read_dense(f"{ours}.weight").numpy(), want), ours
    assert len({t.tensor_type for t in stored.values()}) > 1
