"""Importance matrices: the GGUF layout field by field, the .dat one through a real llama-quantize."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from formats.arch import ARCHITECTURES
from formats.checkpoint import Checkpoint
from formats.containers.gguf import GGUFContainer
from formats.containers.imatrix import Imatrix, read_imatrix, write_imatrix
from formats.containers.safetensors import SafetensorsContainer
from formats.errors import DataError


def example(names: list[str], width: int) -> Imatrix:
    generator = torch.Generator().manual_seed(0)
    means = {name: torch.rand(width, generator=generator) + 0.1 for name in names}
    return Imatrix(means, {name: 1024 + i for i, name in enumerate(names)}, ["calib.txt"], chunk_size=256)


def test_layout_is_llama_imatrix_and_reads_back(tmp_path: Path) -> None:
    arch = ARCHITECTURES["llama"]
    matrix = example(["model.layers.1.mlp.down_proj.weight", "model.layers.0.self_attn.q_proj.weight"], 64)
    write_imatrix(tmp_path / "i.gguf", arch, matrix)
    reader = gguf.GGUFReader(tmp_path / "i.gguf")
    fields = {k: f.contents() for k, f in reader.fields.items()}
    assert fields["general.type"] == "imatrix" and fields["imatrix.datasets"] == ["calib.txt"]
    assert (fields["imatrix.chunk_count"], fields["imatrix.chunk_size"]) == (4, 256)
    tensors = {t.name: t for t in reader.tensors}
    assert list(tensors) == [
        "blk.0.attn_q.weight.in_sum2",
        "blk.0.attn_q.weight.counts",
        "blk.1.ffn_down.weight.in_sum2",
        "blk.1.ffn_down.weight.counts",
    ]
    sums, counts = tensors["blk.0.attn_q.weight.in_sum2"], tensors["blk.0.attn_q.weight.counts"]
    assert sums.shape.tolist() == [64, 1] and counts.shape.tolist() == [1, 1] and counts.data.item() == 1025
    mean = matrix.mean_squares["model.layers.0.self_attn.q_proj.weight"].numpy()
    assert np.allclose(sums.data[0] / 1025, mean)
    back = read_imatrix(tmp_path / "i.gguf", arch)
    assert back.tokens == matrix.tokens and back.datasets == matrix.datasets and back.chunk_size == 256
    assert all(torch.allclose(back.mean_squares[n], matrix.mean_squares[n]) for n in matrix.mean_squares)


def test_ggml_writes_a_single_row_with_one_dimension(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "i.gguf", arch="", use_temp_file=False)
    writer.add_tensor("blk.0.attn_q.weight.in_sum2", np.full(64, 6, np.float32))
    writer.add_tensor("blk.0.attn_q.weight.counts", np.full(1, 3, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    back = read_imatrix(tmp_path / "i.gguf", ARCHITECTURES["llama"])
    (name,) = back.tokens
    assert back.tokens[name] == 3 and torch.equal(back.mean_squares[name], torch.full((64,), 2.0))


def test_experts_are_stacked_and_unseen_ones_count_one(tmp_path: Path) -> None:
    arch = ARCHITECTURES["qwen3_moe"]
    names = [f"model.layers.0.mlp.experts.{e}.up_proj.weight" for e in range(12)]
    matrix = example(names, 64)
    matrix.tokens[names[10]] = 0
    write_imatrix(tmp_path / "i.gguf", arch, matrix)
    stacked = gguf.GGUFReader(tmp_path / "i.gguf").tensors[0]
    assert stacked.name == "blk.0.ffn_up_exps.weight.in_sum2" and stacked.shape.tolist() == [64, 12]
    back = read_imatrix(tmp_path / "i.gguf", arch)
    assert torch.equal(back.mean_squares[names[10]], torch.ones(64))
    assert torch.allclose(back.mean_squares[names[11]], matrix.mean_squares[names[11]])
    del matrix.mean_squares[names[3]]
    with pytest.raises(DataError, match="expert 3 is missing"):
        write_imatrix(tmp_path / "j.gguf", arch, matrix)


def test_damage_and_foreign_entries_are_refused(tmp_path: Path) -> None:
    matrix = example(["model.layers.0.self_attn.q_norm.weight"], 64)
    write_imatrix(tmp_path / "i.gguf", ARCHITECTURES["qwen3"], matrix)
    with pytest.raises(DataError, match="no matrix of llama"):
        read_imatrix(tmp_path / "i.gguf", ARCHITECTURES["llama"])
    data = (tmp_path / "i.gguf").read_bytes()
    (tmp_path / "j.gguf").write_bytes(data.replace(b"weight.counts", b"weight.cuonts"))
    with pytest.raises(DataError, match="no counts"):
        read_imatrix(tmp_path / "j.gguf", ARCHITECTURES["qwen3"])
    (tmp_path / "k.dat").write_bytes(b"\x01\x00\x00\x00" + bytes(64))
    with pytest.raises(DataError, match="wrong magic"):
        read_imatrix(tmp_path / "k.dat", ARCHITECTURES["qwen3"])


def weighed_by(tool: str | Path, source: Checkpoint, folder: Path, suffix: str) -> bool:
    """Does this llama-quantize take our file, name its data set, and favour the columns that it says matter?"""
    writer = GGUFContainer().open_writer(folder, source, {}, {})
    for name in source.names():
        writer.write(name, source.read(name))
    writer.close()
    linears = [f"{linear}.weight" for linear in source.arch.linears(0)]
    matrix = Imatrix({n: torch.ones(source.shape(n)[1]) for n in linears}, dict.fromkeys(linears, 512), ["calib.txt"])
    probe = "model.layers.0.mlp.up_proj.weight"
    matrix.mean_squares[probe] = torch.tensor([1000.0] * 16 + [1e-3] * 16).repeat(8)
    write_imatrix(folder / f"i{suffix}", source.arch, matrix)
    errors = {}
    for label, options in (("plain", []), ("weighed", ["--imatrix", str(folder / f"i{suffix}")])):
        out = folder / f"{label}.gguf"
        done = subprocess.run(
            [str(tool), *options, str(folder / "model.gguf"), str(out), "Q4_0", "1"],
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr[-500:]
        value, original = GGUFContainer().open_reader(out).read(probe), source.read(probe)  # their files are input, too
        error = (value.dequantize() - original).square().mean(0).reshape(8, 2, 16)  # type: ignore[union-attr,operator]
        errors[label] = float(error[:, 0].sum() / error[:, 1].sum())
    assert "calib.txt" in done.stdout + done.stderr
    return errors["weighed"] < 0.7 * errors["plain"]


def source_of(tiny_model: Callable[..., Path]) -> Checkpoint:
    return SafetensorsContainer().open_reader(tiny_model("llama", hidden=256, layers=1))


def test_llama_quantize_uses_it(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    """ik_llama.cpp's reads the .dat layout."""
    ik_llama_cpp = pytest.importorskip("ik_llama_cpp")
    assert weighed_by(ik_llama_cpp.find_quantize_bin(), source_of(tiny_model), tmp_path, ".dat")


@pytest.mark.slow
def test_mainline_reads_ours_and_we_read_its(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    """Mainline's tools, which read and write the GGUF layout: PEERS/llama.cpp/build/bin, where that exists."""
    tools = Path(os.environ.get("PEERS", ".venv-peers")) / "llama.cpp" / "build" / "bin"
    if not (tools / "llama-imatrix").exists():
        pytest.skip("llama.cpp is not built")
    source = source_of(tiny_model)
    assert weighed_by(tools / "llama-quantize", source, tmp_path, ".gguf")
    (tmp_path / "text.txt").write_text("The quick brown fox jumps over the lazy dog, and the dog does not care.\n" * 20)
    options = ["-m", "model.gguf", "-f", "text.txt", "-o", "theirs.gguf", "-c", "64", "--chunks", "2", "-t", "1"]
    command = [str(tools.absolute() / "llama-imatrix"), *options]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-500:]
    theirs = read_imatrix(tmp_path / "theirs.gguf", source.arch)
    assert {f"{linear}.weight" for linear in source.arch.linears(0)} <= theirs.mean_squares.keys()
    assert set(theirs.tokens.values()) == {128} and theirs.chunk_size == 64 and theirs.chunks == 2
    assert all((mean > 0).all() for mean in theirs.mean_squares.values())
