"""Benchmarks run, report what they promise, and their workloads decode to the same tokens; `generate` and `bench`."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from compress.cli import invoke
from formats.containers import open_checkpoint
from formats.errors import UsageError
from formats.qtensor import QTensor
from runtime.bench import bench, compare, weigh_draft
from runtime.generate import Rounded, generate, load_draft
from runtime.model import load_model
from runtime.sampling import SamplingParams

Make = Callable[..., Path]


def test_bench_reports_speed_deviation_latency_and_memory(tiny_model: Make) -> None:
    result = bench(tiny_model("llama"), prompt=24, generate=6, batches=(1, 3), repetitions=2)
    for key in ("prefill_tps", "decode_tps", "ttft_ms", "peak_rss_mb", "weights_mb", "inter_token_p95_ms"):
        assert result[key] > 0, key
    assert result["kernel"] == "cpu-int8"
    assert [row["batch"] for row in result["batches"]] == [1, 3] and result["decode_sd"] >= 0
    with pytest.raises(UsageError, match="positions"):
        bench(tiny_model("llama"), prompt=250, generate=60)
    with pytest.raises(UsageError, match="batch"):
        bench(tiny_model("llama"), batches=(0,))


def test_compare_runs_every_technique(tiny_model: Make) -> None:
    rungs = {rung.technique: rung for rung in compare(tiny_model("llama"), requests=4, longest=16, kernel="cpu")}
    assert list(rungs) == [
        "no cache", "KV cache", "paged", "8-bit KV", "8-bit", "4-bit", "static batch", "continuous batch", "speculative"
    ]  # fmt: skip
    assert rungs["no cache"].speedup == 1 and all(rung.tokens_per_second > 0 for rung in rungs.values())
    assert rungs["4-bit"].memory_mb < rungs["8-bit"].memory_mb < rungs["paged"].memory_mb
    assert rungs["8-bit KV"].memory_mb < rungs["paged"].memory_mb <= rungs["KV cache"].memory_mb


@pytest.mark.parametrize("draft", ["ngram", "self", "self:q8_0"])
def test_weighing_a_draft(tiny_model: Make, draft: str) -> None:
    lines: list[str] = []
    path = tiny_model("llama")
    result = weigh_draft(path, draft, ["The dog. The dog. The dog."], generate=16, progress=lines.append)
    assert result["identical"] is True and "forecast" in lines[0]
    assert result["worth_it"] == ("not" not in lines[0]) and result["speedup"] > 0
    assert (result["draft_mb"] > 0) == (draft != "ngram")


def test_rounding_on_load_leaves_other_tensors_alone(tiny_model: Make) -> None:
    for family in ("llama", "gpt2"):
        with open_checkpoint(tiny_model(family)) as checkpoint:
            rounded = Rounded(checkpoint, "q8_0")
            kinds = {name: type(rounded.read(name)) for name in rounded.names()}
            assert any(kind is QTensor for kind in kinds.values())
            for name, kind in kinds.items():
                assert (kind is QTensor) == (rounded.stored_as(name) != checkpoint.stored_as(name))
                assert kind is not QTensor or checkpoint.read(name).dim() == 2  # type: ignore[union-attr]
            ours, exact = load_model(rounded, kernel="reference"), load_model(checkpoint, kernel="reference")
        for a, b in zip(ours.linears(), exact.linears(), strict=True):
            x = torch.randn(2, a.in_features)
            torch.testing.assert_close(a(x), b(x), rtol=0.05, atol=0.05)


def test_generate_shows_the_text_it_returns(tiny_model: Make) -> None:
    pieces: list[str] = []
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    plain = generate(tiny_model("llama"), "The dog", params, show=pieces.append)
    assert "".join(pieces) == plain["text"] and plain["tokens"] == 12 and plain["finish_reason"] == "length"
    guessed = generate(tiny_model("llama"), "The dog", params, draft="self")
    assert guessed["text"] == plain["text"] and guessed["tokens_per_step"] >= 1
    assert load_draft("anything", None) is None


def test_the_commands(tiny_model: Make, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tiny_model("llama"))
    assert invoke(["generate", path, "-p", "The dog", "--max-tokens", "5", "--temperature", "0"]) == 0
    text, facts = capsys.readouterr()
    assert "cpu-int8 kernels" in facts
    arguments = ["generate", path, "-p", "The dog", "--max-tokens", "5", "--temperature", "0", "--output", "json"]
    assert invoke([*arguments, "--speculate", "ngram"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert text.startswith(result["text"]) and {"tokens", "tps", "text"} <= set(result)
    assert invoke(["bench", path, "--prompt", "8", "--generate", "4", "--batch", "1,2", "--output", "json"]) == 0
    assert {"prefill_tps", "decode_tps", "ttft_ms", "peak_rss_mb"} <= set(json.loads(capsys.readouterr().out))
    assert invoke(["bench", path, "--prompt", "8", "--generate", "4", "--repetitions", "1"]) == 0
    assert "decode" in capsys.readouterr().out
    assert invoke(["generate", path, "-p", "x", "--draft", path, "--speculate", "ngram"]) == 2
    assert invoke(["bench", path, "--batch", "two"]) == 2
