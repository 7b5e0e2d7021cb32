"""The comparison's numbers, its refusals, and pictures that are there and the same every time."""

import json
import shutil
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from compress.compare import HEADER, gather, plot, table
from compress.plots import Point, layer_errors, size_quality
from formats.errors import UsageError

EVALUATION = {
    "ppl": 21.0,
    "ppl_stderr": 0.5,
    "kld": 0.05,
    "kld_stderr": 0.001,
    "top1": 0.9,
    "ref_ppl": 20.0,
    "ppl_ratio": 1.05,
    "windows_sha256": "abc",
}


@pytest.fixture
def outputs(tiny_model: Callable[..., Path], tmp_path: Path) -> list[Path]:
    paths = []
    for i, family in enumerate(("llama", "qwen2")):
        out = tmp_path / f"out-{family}"
        shutil.copytree(tiny_model(family), out)
        (out / "eval.json").write_text(json.dumps(EVALUATION | {"kld": 0.05 + i / 10}))
        paths.append(out)
    return paths


def test_recorded_evaluations_make_the_table(outputs: list[Path]) -> None:
    entries = gather(outputs)
    assert {e.name for e in entries} == {"out-llama", "out-qwen2"}
    assert [e.nbytes for e in entries] == sorted(e.nbytes for e in entries)
    llama = next(e for e in entries if e.name == "out-llama")
    assert llama.bits_per_weight == 32
    row = dict(zip(HEADER, table([llama])[0], strict=True))
    assert (row["KLD"], row["top-1 %"], row["bits/weight"]) == ("0.0500", "90.0", "32.00")
    assert llama.summary()["bytes"] == llama.nbytes


def test_sizes_are_those_of_the_file(outputs: list[Path]) -> None:
    for entry, path in zip(gather(outputs[:1]), outputs, strict=False):
        data = (path / "model.safetensors").read_bytes()
        assert entry.nbytes == len(data) - 8 - int.from_bytes(data[:8], "little")


def test_what_cannot_be_compared(outputs: list[Path], tiny_model: Callable[..., Path]) -> None:
    with pytest.raises(UsageError, match="no recorded"):
        gather([tiny_model("llama")])
    (outputs[0] / "eval.json").write_text(json.dumps(EVALUATION | {"windows_sha256": "other"}))
    with pytest.raises(UsageError, match="different texts"):
        gather(outputs)
    measured = gather(outputs, evaluate=lambda path: dict(EVALUATION))
    assert [e.evaluation["kld"] for e in measured] == [0.05, 0.05]


def test_pictures(outputs: list[Path], tmp_path: Path) -> None:
    png, svg = plot(gather(outputs), tmp_path / "plots" / "size")
    assert png.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and png.stat().st_size > 10_000
    assert ElementTree.parse(svg).getroot().tag.endswith("svg")
    first = [path.read_bytes() for path in (png, svg)]
    plot(gather(outputs), tmp_path / "plots" / "size")
    assert first == [path.read_bytes() for path in (png, svg)]


def test_names_do_not_cover_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure
    from matplotlib.text import Text

    kept: list[Figure] = []
    monkeypatch.setattr("compress.plots._save", lambda figure, stem: kept.append(figure) or [])
    points = [Point(f"model-{i}", 90 + i / 2, 0.1 + i / 1000, series="ours") for i in range(5)]
    size_quality(points, tmp_path / "x", curve=[(80, 0.2), (100, 0.05)])
    kept[0].draw_without_rendering()
    boxes = [Text.get_window_extent(text) for text in kept[0].axes[0].texts]
    assert len(boxes) == 5
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])


def test_layer_errors(tmp_path: Path) -> None:
    def record(block: int, kind: str, **more: Any) -> dict[str, Any]:
        name = f"model.layers.{block}.{kind}.weight"
        return {"name": name, "error": 0.01 * (block + 1), "rtn_error": 0.02 * (block + 1)} | more

    layers = [record(b, k) for b in range(3) for k in ("self_attn.q_proj", "mlp.down_proj")]
    layers.append({"name": "model.embed_tokens.weight", "error": 0.1, "rtn_error": 0.1})
    layers.append(record(3, "mlp.down_proj", error=0.0, rtn_error=None))
    assert [path.suffix for path in layer_errors(layers, tmp_path / "layers")] == [".png", ".svg"]
    layers += [record(b, f"mlp.experts.{e}.up_proj") for b in range(2) for e in range(40)]
    assert len(layer_errors(layers, tmp_path / "layers")) == 2
    assert b"experts" in (tmp_path / "layers.svg").read_bytes()  # one panel for all of them
    assert layer_errors(layers[6:7], tmp_path / "none") == []
