"""Figures of a request log, against small cases worked out by hand."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from formats.errors import DataError, UsageError
from runtime.profile import profile, read_requests, rows


def write(path: Path, *entries: dict[str, Any]) -> Path:
    path.write_text("\n".join(json.dumps(entry) for entry in entries) + "\n\n")
    return path


def test_a_single_request_by_hand(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    log = write(tmp_path / "log.jsonl", {"prompt_tokens": 15, "output_tokens": 3})
    found = profile(log, tiny_model("llama"), memory=1_024_000, kv_dtype="float16")
    per_token = 2 * 2 * 2 * 16 * 2  # keys and values, layers, kv heads, head width, bytes
    assert found["kv_bytes_per_token"] == per_token
    policies = found["policies"]
    # while it is in the cache it has 16, 17, 18 tokens: one block, then two, then two
    assert policies["paged"]["mb_per_request"] == pytest.approx((16 + 32 + 32) / 3 * per_token / 1e6)
    assert policies["paged"]["waste"] == pytest.approx(1 - 17 / (80 / 3))
    assert policies["reserve_total"]["concurrent"] == pytest.approx(1_024_000 / (18 * per_token))
    assert policies["reserve_max"]["concurrent"] == pytest.approx(1_024_000 / (256 * per_token))
    assert found["prefix_caching"] is None and "draft" not in found
    assert found["lengths"]["total"]["max"] == 18


def test_long_outputs_weigh_more(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    log = write(
        tmp_path / "log.jsonl",
        {"prompt_tokens": 10, "completion_tokens": 1},
        {"prompt_tokens": 10, "completion_tokens": 9},
    )
    held = profile(log, tiny_model("llama"), memory=10**6)["policies"]["reserve_total"]["mb_per_request"]
    assert held == pytest.approx((11 * 1 + 19 * 9) / 10 * 256 / 1e6)


def test_shared_prefixes_are_found(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    system = list(range(32))
    log = write(
        tmp_path / "log.jsonl",
        *({"prompt_tokens": system + [100 + i] * 8, "output_tokens": 4} for i in range(5)),
    )
    found = profile(log, tiny_model("llama"), memory=10**6, kv_dtype="int8")["prefix_caching"]
    assert found["hit_rate"] == pytest.approx(4 * 32 / (5 * 40))
    assert found["prefill_speedup"] == pytest.approx(1 / (1 - 0.64))


def test_drafts(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    log = write(tmp_path / "log.jsonl", {"prompt_tokens": 5, "output_tokens": 5})
    options: dict[str, Any] = dict(memory=10**6, guesses=2)
    good = profile(log, tiny_model("llama"), acceptance=0.5, draft_cost=0.1, **options)
    assert good["draft"] == {"tokens_per_step": 1.75, "decode_speedup": pytest.approx(1.75 / 1.2), "worth_it": True}
    bad = profile(log, tiny_model("llama"), acceptance=0.0, **options)
    assert bad["draft"]["tokens_per_step"] == 1 and not bad["draft"]["worth_it"]
    assert any("not worth it" in value for _, value in rows(bad))
    assert len(rows(good)) == 9


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no requests"),
        ("{", ":1"),
        ('{"prompt_tokens": 3}', ":1"),
        ('{"prompt_tokens": 3, "output_tokens": 1}\n[1]', ":2"),
        ('{"prompt_tokens": 0, "output_tokens": 1}', "at least 1"),
    ],
)
def test_broken_logs_name_the_line(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "log.jsonl").write_text(text)
    with pytest.raises(DataError, match=says):
        read_requests(tmp_path / "log.jsonl")


def test_values_that_mean_nothing(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    log = write(tmp_path / "log.jsonl", {"prompt_tokens": 5, "output_tokens": 5})
    for wrong in ({"memory": 0}, {"memory": 1, "kv_dtype": "int3"}, {"memory": 1, "acceptance": 1.0}):
        with pytest.raises(UsageError):
            profile(log, tiny_model("llama"), **wrong)
    with pytest.raises(DataError):
        read_requests(tmp_path / "missing.jsonl")
