"""Perplexity, divergence and their gates, against slow formulas and transformers itself."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from formats.errors import DataError, GateFailed, UsageError
from runtime.evaluate.divergence import Divergence, ReferenceLogits, store_reference
from runtime.evaluate.perplexity import Window, fixed_windows, read_windows, strided_windows
from runtime.evaluate.run import check_gates, evaluate


class Fixed:
    """A scorer with given logits [vocab, vocab]: what follows depends on the last token only."""

    def __init__(self, table: torch.Tensor) -> None:
        self.table, self.forwards = table, 0

    def logits(self, ids: list[int], last: int) -> torch.Tensor:
        self.forwards += 1
        return self.table[torch.tensor(ids[-last:])]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("The dog looked at the moon, and the moon did not look back.\n" * 40)
    return path


def test_fixed_windows_are_those_of_llama_perplexity() -> None:
    tokens = list(range(1, 100))
    windows = fixed_windows(tokens, 16, 3, bos=None)
    assert [w.ids for w in windows] == [tokens[0:16], tokens[16:32], tokens[32:48]]
    # its loop: for j in range(n_ctx / 2, n_ctx - 1): score token j + 1
    assert windows[1].targets.tolist() == [tokens[16 + j + 1] for j in range(8, 15)]
    with_bos = fixed_windows(tokens, 16, 3, bos=0)
    assert [w.ids[0] for w in with_bos] == [0, 0, 0]
    assert [w.ids[1:] for w in with_bos] == [w.ids[1:] for w in windows]
    assert len(fixed_windows(tokens, 16, 100, None)) == 6


def test_strided_windows_score_every_token_once() -> None:
    tokens = list(range(70))
    scored = [t for w in strided_windows(tokens, 16, 6, 10) for t in w.targets.tolist()]
    assert scored == tokens[1 : 1 + len(scored)]
    assert len(scored) == 15 + 9 * 6


@pytest.mark.parametrize("sizes", [(3, 1, None), (16, 0, None), (16, 1, 16), (16, 1, 0)])
def test_impossible_windows(tiny_tokenizer: Any, text: Path, sizes: tuple[int, int, int | None]) -> None:
    with pytest.raises(UsageError):
        read_windows(tiny_tokenizer, text, *sizes)


def test_texts_that_cannot_be_used(tiny_tokenizer: Any, text: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="fewer than one window"):
        read_windows(tiny_tokenizer, text, 100_000, 1)
    with pytest.raises(DataError, match="cannot read"):
        read_windows(tiny_tokenizer, tmp_path / "none.txt", 16, 1)
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 " * 100)
    with pytest.raises(DataError, match="UTF-8"):
        read_windows(tiny_tokenizer, tmp_path / "latin.txt", 16, 1)


def test_reading_a_prefix_gives_the_tokens_of_the_whole(tiny_tokenizer: Any, text: Path) -> None:
    whole = tiny_tokenizer(text.read_text()).input_ids
    windows = read_windows(tiny_tokenizer, text, 16, 4)
    assert [t for w in windows for t in w.ids] == whole[:64]


def test_divergence_equals_the_definitions(tmp_path: Path) -> None:
    torch.manual_seed(0)
    p_table, q_table = torch.randn(50, 50) * 3, torch.randn(50, 50) * 3
    windows = [Window(torch.randint(0, 50, (200,)).tolist(), 99) for _ in range(2)]
    store_reference(Fixed(p_table), windows, tmp_path / "reference")
    divergence = Divergence(ReferenceLogits(tmp_path / "reference"))
    klds, agree, shifts, ratio = [], [], [], []
    for window in windows:
        divergence.add(q_table[torch.tensor(window.ids[-100:-1])].log_softmax(-1), window.targets)
        for before, target in zip(window.ids[-100:-1], window.ids[-99:], strict=True):
            p, q = p_table[before].double().softmax(0), q_table[before].double().softmax(0)
            klds.append(float((p * (p / q).log()).sum()))
            agree.append(float(p.argmax() == q.argmax()))
            shifts.append(float(q[target] - p[target]))
            ratio.append(float((p[target] / q[target]).log()))
    found = divergence.summary()
    values = torch.tensor(klds, dtype=torch.float64)
    assert found["kld"] == pytest.approx(float(values.mean()), rel=1e-5)
    assert found["kld_stderr"] == pytest.approx(float(values.std()) / math.sqrt(198), rel=1e-4)
    assert found["kld_median"] == pytest.approx(float(values.median()), rel=1e-4)
    assert found["kld_p99"] == pytest.approx(float(values.quantile(0.99)), abs=1e-3)
    assert found["kld_max"] == pytest.approx(float(values.max()), abs=1e-3)
    assert found["top1"] == sum(agree) / len(agree)
    assert found["rms_dp"] == pytest.approx(math.sqrt(sum(s * s for s in shifts) / len(shifts)), abs=1e-4)
    assert found["ppl_ratio"] == pytest.approx(math.exp(sum(ratio) / len(ratio)), rel=1e-4)


def test_sixteen_bits_cost_the_divergence_nothing(tmp_path: Path) -> None:
    table = torch.randn(64, 64, generator=torch.Generator().manual_seed(1)) * 6
    windows = [Window(list(range(64)), 60)]
    store_reference(Fixed(table), windows, tmp_path / "r")
    divergence = Divergence(ReferenceLogits(tmp_path / "r"))
    divergence.add(table[3:63].log_softmax(-1), windows[0].targets)
    assert divergence.summary()["kld_max"] < 1e-6
    assert (tmp_path / "r" / "codes.bin").stat().st_size == 2 * 60 * 64


def test_evaluate_agrees_with_transformers(tiny_model: Callable[..., Path], text: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = tiny_model("llama")
    candidate = perturbed(source, tmp_path / "candidate")
    found = evaluate(candidate, against=source, text=text, length=32, chunks=4)

    rows = torch.tensor(AutoTokenizer.from_pretrained(source)(text.read_text()).input_ids[:128]).view(4, 32)
    p, q = (
        AutoModelForCausalLM.from_pretrained(d, dtype=torch.float32)(rows).logits[:, 16:31].log_softmax(-1).detach()
        for d in (source, candidate)
    )
    nll = [-x.gather(2, rows[:, 17:, None]).mean() for x in (p, q)]
    assert found["ref_ppl"] == pytest.approx(float(nll[0].exp()), rel=1e-4)
    assert found["ppl"] == pytest.approx(float(nll[1].exp()), rel=1e-4)
    assert found["ppl_ratio"] == pytest.approx(found["ppl"] / found["ref_ppl"], rel=1e-4)
    assert found["kld"] == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), rel=1e-3)
    assert found["top1"] == pytest.approx(float((p.argmax(-1) == q.argmax(-1)).float().mean()))
    assert (found["tokens"], found["chunks"], found["same_tokenizer"]) == (60, 4, True)
    alone = evaluate(candidate, text=text, length=32, chunks=4)
    assert alone["ppl"] == found["ppl"] and "kld" not in alone


@pytest.mark.parametrize("family", ["qwen2", "gemma3_text", "gpt2", "mixtral", "qwen3_moe"])
def test_every_family_is_scored_as_transformers_does(family: str, tiny_model: Callable[..., Path], text: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = tiny_model(family)
    ids = torch.tensor([AutoTokenizer.from_pretrained(source)(text.read_text()).input_ids[:32]])
    log_p = (
        AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)(ids).logits[0, 16:31].log_softmax(-1).detach()
    )
    nll = -log_p.gather(1, ids[0, 17:, None]).mean()
    assert evaluate(source, text=text, length=32, chunks=1)["ppl"] == pytest.approx(float(nll.exp()), rel=1e-4)


def test_the_runtime_and_transformers_measure_the_same(
    tiny_model: Callable[..., Path], text: Path, tmp_path: Path
) -> None:
    source = tiny_model("llama")
    candidate = perturbed(source, tmp_path / "candidate")
    dense, packed = (
        evaluate(candidate, against=source, text=text, length=40, chunks=3, engine=engine, kernel="reference")
        for engine in ("transformers", "runtime")
    )
    assert packed["engine"] == "runtime"
    for key in ("ppl", "kld", "rms_dp"):
        assert packed[key] == pytest.approx(dense[key], rel=1e-3)
    with pytest.raises(UsageError, match="engine"):
        evaluate(candidate, text=text, length=40, chunks=1, engine="vllm")


def test_second_candidate_costs_one_forward(
    tiny_model: Callable[..., Path], text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from runtime.evaluate import scorers

    forwards = []
    once = scorers.DenseScorer.logits
    monkeypatch.setattr(scorers.DenseScorer, "logits", lambda *args: forwards.append(1) or once(*args))
    source = tiny_model("llama")
    first = evaluate(source, against=source, text=text, length=32, chunks=3, cache=tmp_path / "cache")
    assert len(forwards) == 6
    assert evaluate(source, against=source, text=text, length=32, chunks=3, cache=tmp_path / "cache") == first
    assert len(forwards) == 9
    evaluate(source, against=source, text=text, length=16, chunks=3, cache=tmp_path / "cache")  # other windows
    assert len(forwards) == 15


def test_gates() -> None:
    result = {"kld": 0.2, "ppl_ratio": 1.05}
    check_gates(result, max_kld=0.2, max_ppl_ratio=1.06)
    with pytest.raises(GateFailed, match="kld"):
        check_gates(result, max_kld=0.1)
    with pytest.raises(GateFailed, match="ppl_ratio"):
        check_gates(result, max_ppl_ratio=1.01)
    with pytest.raises(GateFailed):
        check_gates({"kld": math.nan}, max_kld=1e9)
    with pytest.raises(UsageError, match="against"):
        check_gates({"ppl": 3.0}, max_kld=0.1)


def test_broken_models_are_named(tiny_model: Callable[..., Path], text: Path, tmp_path: Path) -> None:
    broken = perturbed(tiny_model("llama"), tmp_path / "nan", std=math.nan)
    with pytest.raises(DataError, match="NaN"):
        evaluate(broken, text=text, length=16, chunks=1)
    with pytest.raises(DataError, match="logits per token"):
        evaluate(tiny_model("llama", vocab_size=400), against=tiny_model("llama"), text=text, length=16, chunks=1)


def perturbed(source: Path, out: Path, std: float = 0.02) -> Path:
    """A copy of a model with noise on its weights."""
    import shutil

    shutil.copytree(source, out)
    torch.manual_seed(0)
    state = {k: v + std * torch.randn_like(v) for k, v in load_file(source / "model.safetensors").items()}
    save_file(state, out / "model.safetensors", metadata={"format": "pt"})
    return out
