"""The judge's decoders agree with our readers, and its figures with `evaluate`: no code is shared between the two."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from quantised import write_quantised

from formats.containers import open_checkpoint
from runtime.evaluate.run import evaluate

sys.path.insert(0, str(Path(__file__).with_name("bench")))
from layouts import decode, stored_bytes
from quality import Judge, table

CASES = [
    ("gptq", "int4-g32", {}),
    ("gptq", "int3-g32", {}),
    ("gptq", "int8-g64-sym", {}),
    ("gptq", "int2-g32", {"act_order": True}),
    ("awq", "int4-g64", {}),
    ("compressed-tensors", "int4-g32", {}),
    ("compressed-tensors", "int4-g64-sym", {}),
    ("compressed-tensors", "int8-channel-sym", {}),
    ("gguf", "q4_1", {}),
    ("gguf", "q6_k", {}),
]


@pytest.fixture
def config(tiny_model: Callable[..., Path]) -> object:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(tiny_model("llama", hidden=256))


@pytest.mark.parametrize(("container", "grid", "options"), CASES)
def test_decoders_agree(
    container: str, grid: str, options: dict[str, bool], tiny_model: Callable[..., Path], tmp_path: Path, config: object
) -> None:
    with open_checkpoint(tiny_model("llama", hidden=256)) as source:
        write_quantised(source, tmp_path / "out", container, grid, **options)
    with open_checkpoint(tmp_path / "out") as ours:
        found = dict(decode(ours.path, config))
        assert set(found) == set(ours.names())
        for name in ours.names():
            expected = ours.read_dense(name)
            assert torch.allclose(found[name], expected, rtol=1e-6, atol=1e-7), name
        assert stored_bytes(ours.path) > 0


def test_the_judge_and_evaluate_find_the_same(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    reference = tiny_model("llama", hidden=256)
    with open_checkpoint(reference) as source:
        write_quantised(source, tmp_path / "out", "gguf", "q4_0")
    with open_checkpoint(tmp_path / "out") as ours:
        candidate = ours.path
    text = tmp_path / "text.txt"
    text.write_text("The dog looked at the moon, and the moon did not look back.\n" * 40)
    judge = Judge(reference, text, length=48, chunks=3)
    verdict = judge.judge("candidate", candidate)
    found = evaluate(candidate, against=reference, text=text, length=48, chunks=3)
    assert verdict.kld == pytest.approx(found["kld"], rel=1e-4)
    assert verdict.kld_stderr == pytest.approx(found["kld_stderr"], rel=1e-4)
    assert (verdict.ppl, verdict.ppl_stderr) == pytest.approx((found["ppl"], found["ppl_stderr"]), rel=1e-4)
    assert verdict.top1 == pytest.approx(found["top1"])
    assert judge.itself("reference", reference).ppl == pytest.approx(found["ref_ppl"], rel=1e-4)
    assert table([verdict]).count("\n") == 2
