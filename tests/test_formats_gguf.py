"""GGUF models there and back: every family's logits, names, metadata; grids, ties, padding, splits."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from conftest import FAMILIES
from torch import Tensor

from formats.arch import is_transposed
from formats.checkpoint import Checkpoint
from formats.containers.gguf import GGUFCheckpoint, GGUFContainer, gguf_name, to_gguf
from formats.containers.safetensors import SafetensorsContainer
from formats.errors import DataError, UsageError
from formats.grids import parse_grid
from formats.qtensor import Grid, QTensor

GGUF, HF = GGUFContainer(), SafetensorsContainer()


def quantised(value: Tensor | QTensor, grid: Grid) -> QTensor:
    """Random codes and plausible parameters: packing does not care whether they fit."""
    if isinstance(value, QTensor):
        return value
    params = grid.fit(value.float())
    return QTensor(grid, grid.encode(value.float(), params), params)


def convert(source: Checkpoint, container: Any, out: Path, grids: Mapping[str, Grid] = {}, **options: Any) -> Path:
    out.mkdir(exist_ok=True)
    writer = container.open_writer(out, source, grids, options)
    for name in sorted(source.names()):  # an order unlike the file's
        value = source.read(name)
        if name in grids:
            value = value.T if isinstance(value, Tensor) and is_transposed(source.arch, name) else value
            value = quantised(value, grids[name])
        writer.write(name, value)
    writer.close()
    return out / "model.gguf" if container is GGUF else out


def logits(directory: Path) -> Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    ids = torch.arange(3, 99).reshape(2, 48)
    with torch.no_grad():
        result: Tensor = model(ids).logits
    return result


COMMON = {
    "general.architecture", "general.type", "general.name", "general.size_label", "general.basename",
    "general.version", "general.quantization_version", "general.file_type", "tokenizer.ggml.model",
    "tokenizer.ggml.pre", "tokenizer.ggml.tokens", "tokenizer.ggml.token_type", "tokenizer.ggml.merges",
    "tokenizer.ggml.bos_token_id", "tokenizer.ggml.eos_token_id", "tokenizer.ggml.padding_token_id",
    "tokenizer.chat_template",
}  # fmt: skip
SIZES = {
    "block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count",
    "attention.head_count_kv", "attention.layer_norm_rms_epsilon", "attention.key_length", "attention.value_length",
    "rope.freq_base",
}  # fmt: skip
LLAMA = SIZES | {"vocab_size", "rope.dimension_count"}
KEYS = {  # what convert_hf_to_gguf.py writes, read off its set_gguf_parameters, per family
    "llama": LLAMA,
    "mistral": LLAMA,
    "qwen2": SIZES,
    "qwen3": SIZES,
    "gemma3_text": SIZES | {"attention.sliding_window", "rope.freq_base_swa"},
    "gpt2": {
        "block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count",
        "attention.layer_norm_epsilon",
    },
    "mixtral": LLAMA | {"expert_count", "expert_used_count"},
    "qwen3_moe": SIZES | {"expert_count", "expert_used_count", "expert_feed_forward_length"},
}  # fmt: skip


@pytest.mark.parametrize("model_type", FAMILIES)
def test_logits_names_and_metadata_of_every_family(
    model_type: str, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    original = HF.open_reader(tiny_model(model_type))
    back = GGUF.open_reader(convert(original, GGUF, tmp_path / "gguf"))
    assert sorted(back.names()) == sorted(original.names())
    assert all(back.shape(name) == original.shape(name) for name in back.names())
    again = convert(back, HF, tmp_path / "hf")
    assert (logits(again) - logits(original.path)).abs().max() < 1e-4
    assert not (again / "model.gguf").exists()

    reader = gguf.GGUFReader(tmp_path / "gguf" / "model.gguf")
    keys = {k for k in reader.fields if not k.startswith("GGUF.")}
    assert keys == COMMON | {f"{back.arch.gguf_name}.{key}" for key in KEYS[model_type]}
    stored = {t.name: t for t in reader.tensors}
    assert stored.keys() == {gguf_name(back.arch, name)[0] for name in original.names()}
    assert all(t.tensor_type.name == "F32" for t in stored.values())
    if back.arch.experts:
        assert stored["blk.0.ffn_down_exps.weight"].shape.tolist()[-1] == 4


def test_gemma_norms_are_shifted_and_llama_rows_interleaved(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    gemma, llama = (HF.open_reader(tiny_model(t)) for t in ("gemma3_text", "llama"))
    shifted = gguf.GGUFReader(convert(gemma, GGUF, tmp_path / "gemma"))
    found = next(t for t in shifted.tensors if t.name == "blk.1.post_ffw_norm.weight")
    norm = gemma.read("model.layers.1.post_feedforward_layernorm.weight")
    assert isinstance(norm, Tensor) and np.allclose(found.data, norm.numpy() + 1)
    rows = gguf.GGUFReader(convert(llama, GGUF, tmp_path / "llama"))
    found = next(t for t in rows.tensors if t.name == "blk.0.attn_k.weight")
    key = llama.read("model.layers.0.self_attn.k_proj.weight")
    assert isinstance(key, Tensor)
    assert np.array_equal(found.data[:4], key[[0, 8, 1, 9]].numpy())  # heads of 16: i and i + 8 turn together


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "mixtral"])
def test_mixed_grids_equal_gguf_py_and_ours_exactly(
    model_type: str, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    source = HF.open_reader(tiny_model(model_type, hidden=256, layers=1))
    kinds = ["q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q4_k", "q6_k"]
    linears = [name for name in source.names() if name.removesuffix(".weight") in source.arch.linears(0, experts=4)]
    by_stored: dict[str, Grid] = {}
    for name in linears:
        stored = gguf_name(source.arch, name)[0]
        by_stored.setdefault(stored, parse_grid(kinds[len(by_stored) % len(kinds)]))
    grids = {name: by_stored[gguf_name(source.arch, name)[0]] for name in linears}
    back = GGUF.open_reader(convert(source, GGUF, tmp_path / "out", grids))
    stored = {t.name: gguf.dequantize(t.data, t.tensor_type) for t in gguf.GGUFReader(back.path).tensors}
    for name in back.names():
        value, (ours, expert) = back.read(name), gguf_name(back.arch, name)
        assert isinstance(value, QTensor) == (name in grids)
        assert back.stored_as(name) == grids.get(name, "float32")
        if isinstance(value, QTensor):
            assert value.grid == grids[name]
            original = source.read(name)
            assert isinstance(original, Tensor)
            original = original.T if is_transposed(source.arch, name) else original
            expected = quantised(original, grids[name])
            assert torch.equal(value.codes, expected.codes)
            assert torch.equal(value.dequantize(), expected.dequantize())
        dense = to_gguf(back.arch, name, back.read_linear(name), 64)
        assert isinstance(dense, Tensor)
        assert np.array_equal(stored[ours] if expert is None else stored[ours][expert], dense.numpy()), name


def test_gguf_to_gguf_carries_everything_over(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    first = GGUF.open_reader(convert(HF.open_reader(tiny_model("qwen3")), GGUF, tmp_path / "a"))
    grid = parse_grid("q8_0")
    name = "model.layers.0.mlp.up_proj.weight"
    convert(first, GGUF, tmp_path / "b", {name: grid}, imatrix={"file": "i.gguf", "chunks_count": 7})
    second = GGUF.open_reader(tmp_path / "b")
    assert isinstance(first, GGUFCheckpoint) and isinstance(second, GGUFCheckpoint)
    changed = {"general.file_type", "quantize.imatrix.file", "quantize.imatrix.chunks_count"}
    assert {k: v for k, v in second.fields.items() if k not in changed} == {
        k: v for k, v in first.fields.items() if k not in changed
    }
    assert second.fields["quantize.imatrix.chunks_count"].value == 7
    assert second.fields["general.file_type"].value == gguf.LlamaFileType.MOSTLY_Q8_0
    assert second.config == first.config


def test_tied_and_untied_heads_and_padded_vocabulary(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    source = HF.open_reader(tiny_model("llama", layers=1, vocab_size=400, tie_word_embeddings=True))
    tied = GGUF.open_reader(convert(source, GGUF, tmp_path / "tied"))
    assert "lm_head.weight" not in tied.names() and tied.config["tie_word_embeddings"] is True
    assert tied.config["vocab_size"] == 400 and tied.shape("model.embed_tokens.weight") == (400, 64)
    assert isinstance(tied, GGUFCheckpoint)
    assert tied.fields["tokenizer.ggml.tokens"].value[399] == "[PAD399]"
    assert tied.fields["tokenizer.ggml.token_type"].value[399] == gguf.TokenType.UNUSED

    grids = {"lm_head.weight": parse_grid("q8_0")}  # a tied head may get its own codes
    (tmp_path / "own").mkdir()
    writer = GGUF.open_writer(tmp_path / "own", source, grids, {})
    embedding = source.read("model.embed_tokens.weight")
    for name in source.names():
        writer.write(name, source.read(name))
    writer.write("lm_head.weight", quantised(embedding, grids["lm_head.weight"]))
    writer.close()
    own = GGUF.open_reader(tmp_path / "own")
    assert own.stored_as("lm_head.weight") == grids["lm_head.weight"] and own.config["tie_word_embeddings"] is False


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 16.0},
        {
            "rope_type": "llama3",
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 128,
        },
    ],
)
def test_rotary_scaling_survives(scaling: dict[str, Any], tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    rope = scaling | {"rope_theta": 500000.0}
    source = HF.open_reader(tiny_model("llama", hidden=256, layers=1, head_dim=128, rope_parameters=rope))
    back = GGUF.open_reader(convert(source, GGUF, tmp_path / "gguf"))
    assert back.config["rope_scaling"] == pytest.approx(scaling) and back.config["rope_theta"] == 500000.0
    assert ("rope_freqs.weight" in {t.name for t in gguf.GGUFReader(back.path).tensors}) == (
        "low_freq_factor" in scaling
    )
    assert (logits(convert(back, HF, tmp_path / "hf")) - logits(source.path)).abs().max() < 1e-4


def test_attention_bias_sliding_window_and_head_width(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    mistral = HF.open_reader(tiny_model("mistral", layers=1, sliding_window=16, head_dim=32))
    back = GGUF.open_reader(convert(mistral, GGUF, tmp_path / "m"))
    assert (back.config["model_type"], back.config["sliding_window"], back.config["head_dim"]) == ("mistral", 16, 32)
    assert (logits(convert(back, HF, tmp_path / "mh")) - logits(mistral.path)).abs().max() < 1e-4
    biased = HF.open_reader(tiny_model("llama", layers=1, attention_bias=True, mlp_bias=True))
    back = GGUF.open_reader(convert(biased, GGUF, tmp_path / "b"))
    assert (logits(convert(back, HF, tmp_path / "bh")) - logits(biased.path)).abs().max() < 1e-4


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sixteen_bit_floats_keep_vectors_in_32(dtype: str, tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    source = HF.open_reader(tiny_model("qwen2"))
    back = GGUF.open_reader(convert(source, GGUF, tmp_path / "out", dtype=dtype))
    for name in back.names():
        value, original = back.read(name), source.read(name)
        assert isinstance(value, Tensor) and isinstance(original, Tensor)
        expected = "float32" if original.dim() == 1 else dtype
        assert back.stored_as(name) == expected and torch.equal(value, original.to(getattr(torch, expected)))
    assert isinstance(back, GGUFCheckpoint)
    label = {"float16": gguf.LlamaFileType.MOSTLY_F16, "bfloat16": gguf.LlamaFileType.MOSTLY_BF16}[dtype]
    assert back.fields["general.file_type"].value == label


def test_split_files_read_as_one(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    whole = GGUF.open_reader(convert(HF.open_reader(tiny_model("llama")), GGUF, tmp_path / "a"))
    assert isinstance(whole, GGUFCheckpoint)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama", split_max_tensors=8)
    for key, field in whole.fields.items():
        if key != "general.architecture":
            writer.add_key_value(key, field.value, field.type, field.item)
    for tensor in gguf.GGUFReader(whole.path).tensors:
        writer.add_tensor(tensor.name, np.array(tensor.data))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    parts = sorted(tmp_path.glob("m-*.gguf"))
    assert len(parts) == 3
    for start in (parts[0], parts[2]):
        split = GGUF.open_reader(start)
        assert split.config == whole.config and sorted(split.names()) == sorted(whole.names())
        assert all(torch.equal(split.read_dense(n), whole.read_dense(n)) for n in split.names())
    parts[1].unlink()
    with pytest.raises(DataError, match="00002-of-00003"):
        GGUF.open_reader(parts[0])


def test_types_that_are_not_ours_come_decoded(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    source = HF.open_reader(tiny_model("llama", hidden=256, layers=1))
    whole = GGUF.open_reader(convert(source, GGUF, tmp_path / "a"))
    assert isinstance(whole, GGUFCheckpoint)
    name, kind = "blk.0.ffn_up.weight", gguf.GGMLQuantizationType.IQ2_XS
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    for key, field in whole.fields.items():
        if key != "general.architecture":
            writer.add_key_value(key, field.value, field.type, field.item)
    data = np.random.default_rng(0).integers(0, 60, (512, 74), dtype=np.uint8)
    for tensor in gguf.GGUFReader(whole.path).tensors:
        if tensor.name == name:
            writer.add_tensor(name, data, raw_dtype=kind)
        else:
            writer.add_tensor(tensor.name, np.array(tensor.data))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    value = GGUF.open_reader(tmp_path / "m.gguf").read("model.layers.0.mlp.up_proj.weight")
    assert isinstance(value, Tensor) and np.array_equal(value.numpy(), gguf.dequantize(data, kind))


@pytest.mark.parametrize(
    ("asked", "columns", "used"),
    [
        ("q4_k", 512, "q4_k"),
        ("q4_k", 576, "q5_0"),
        ("q5_k", 576, "q5_1"),
        ("q6_k", 576, "q8_0"),
        ("q3_k", 576, "iq4_nl"),
        ("q2_k", 576, "iq4_nl"),
        ("iq4_xs", 576, "iq4_nl"),
        ("q4_1", 576, "q4_1"),
    ],
)
def test_substitutes_for_rows_that_256_does_not_divide(asked: str, columns: int, used: str) -> None:
    assert GGUF.substitute("w", (8, columns), parse_grid(asked)).name == used


@pytest.mark.parametrize(
    ("asked", "columns", "hint"),
    [("int4-g32", 64, "q4_1"), ("int3-g64-sym", 64, "q3_k"), ("nf4", 64, "q4_k"), ("q4_0", 40, "skip")],
)
def test_what_gguf_cannot_store_is_refused_with_a_hint(asked: str, columns: int, hint: str) -> None:
    with pytest.raises(UsageError, match=hint):
        GGUF.substitute("w", (8, columns), parse_grid(asked))


def test_experts_of_a_matrix_share_one_type(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    source = HF.open_reader(tiny_model("mixtral"))
    name = "model.layers.0.block_sparse_moe.experts.1.w1.weight"
    with pytest.raises(UsageError, match="experts share one type"):
        GGUF.open_writer(tmp_path, source, {name: parse_grid("q4_0")}, {})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("model_type", "change"),
    [
        ("gemma3_text", {"query_pre_attn_scalar": 99}),
        ("gemma3_text", {"layer_types": ["full_attention", "sliding_attention"]}),
        ("qwen3_moe", {"norm_topk_prob": False}),
        ("llama", {"hidden_act": "gelu"}),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
    ],
)
def test_settings_that_llama_cpp_ignores_are_refused(
    model_type: str, change: dict[str, Any], tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    shutil.copytree(tiny_model(model_type), tmp_path / "m")
    path = tmp_path / "m" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(DataError, match=next(iter(change))):
        GGUF.open_writer(tmp_path, HF.open_reader(tmp_path / "m"), {}, {})


def test_mutants_of_the_rotary_order_change_the_logits(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    """Without the reordering a file still loads: only the logits tell."""
    source = HF.open_reader(tiny_model("llama"))
    back = GGUF.open_reader(convert(source, GGUF, tmp_path / "gguf"))
    assert isinstance(back, GGUFCheckpoint)
    back._head_dim = 8  # rows undone as if heads were half as wide
    assert (logits(convert(back, HF, tmp_path / "hf")) - logits(source.path)).abs().max() > 1e-2
