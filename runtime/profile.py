"""What a log of requests asks of a server: lengths, KV memory by policy, what caching and drafts would give."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from formats.containers import open_checkpoint
from formats.errors import DataError, UsageError
from runtime.blocks import BlockManager

_BYTES = {"float32": 4.0, "float16": 2.0, "bfloat16": 2.0, "int8": 1.0}


@dataclass(frozen=True)
class LoggedRequest:
    """prompt, output: lengths in tokens. key: the prompt itself as token ids, where the log has it."""

    prompt: int
    output: int
    key: tuple[int, ...] | None = None


def read_requests(path: Path) -> list[LoggedRequest]:
    """JSON lines with `prompt_tokens` (a number, or the token ids, which also show shared prefixes) and `output_tokens`
    or OpenAI's `completion_tokens`. Raises DataError with the line of a mistake."""
    requests = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read the log: {error}", where=str(path)) from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            prompt, output = entry["prompt_tokens"], entry.get("output_tokens", entry.get("completion_tokens"))
            key = tuple(int(token) for token in prompt) if isinstance(prompt, list) else None
            request = LoggedRequest(int(prompt) if key is None else len(key), int(output), key)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise DataError(
                f"not a logged request ({error!r})",
                where=f"{path}:{number}",
                how_to_fix='a line reads {"prompt_tokens": 812, "output_tokens": 64}',
            ) from None
        if request.prompt < 1 or request.output < 1:
            raise DataError("lengths must be at least 1", where=f"{path}:{number}")
        requests.append(request)
    if not requests:
        raise DataError("the log has no requests", where=str(path))
    return requests


def profile(
    log: Path,
    model: str | Path,
    *,
    memory: int,
    kv_dtype: str = "float16",
    block_size: int = 16,
    acceptance: float | None = None,
    guesses: int = 4,
    draft_cost: float = 0.1,
) -> dict[str, Any]:
    """Requests of `log` served by `model` with `memory` bytes of KV cache.

    acceptance: measured share of a draft's guesses that are accepted (from `bench --draft` or /metrics); draft_cost:
    time of one draft step over one target step. Raises UsageError for values that mean nothing.
    """
    if memory < 1 or kv_dtype not in _BYTES or not 0 <= (acceptance or 0) < 1 or guesses < 1 or draft_cost < 0:
        raise UsageError(
            f"cannot profile with memory {memory}, kv_dtype {kv_dtype}, acceptance {acceptance}, guesses {guesses}",
            how_to_fix=f"memory in bytes, kv_dtype one of {', '.join(_BYTES)}, 0 <= acceptance < 1, guesses at least 1",
        )
    requests = read_requests(log)
    per_token, positions = _kv_bytes_per_token(model, _BYTES[kv_dtype])
    result: dict[str, Any] = {
        "requests": len(requests),
        "lengths": {
            "prompt": _distribution([r.prompt for r in requests]),
            "output": _distribution([r.output for r in requests]),
            "total": _distribution([r.prompt + r.output for r in requests]),
        },
        "kv_bytes_per_token": per_token,
        "policies": _policies(requests, per_token, positions, memory, block_size),
        "prefix_caching": _prefix_caching(requests, block_size, int(memory / per_token) // block_size),
    }
    if acceptance is not None:
        per_step = (1 - acceptance ** (guesses + 1)) / (1 - acceptance)
        speedup = per_step / (1 + guesses * draft_cost)
        result["draft"] = {"tokens_per_step": per_step, "decode_speedup": speedup, "worth_it": speedup > 1}
    return result


def _kv_bytes_per_token(model: str | Path, nbytes: float) -> tuple[float, int]:
    """(bytes of keys and values per token, positions of the model)."""
    from transformers import AutoConfig

    with open_checkpoint(model) as checkpoint:
        config = AutoConfig.for_model(**checkpoint.config)
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return 2 * config.num_hidden_layers * kv_heads * head_dim * nbytes, int(config.max_position_embeddings)


def _distribution(lengths: Sequence[int]) -> dict[str, float]:
    levels = {f"p{p}": float(np.percentile(lengths, p)) for p in (50, 90, 99)}
    return {"mean": float(np.mean(lengths))} | levels | {"max": float(max(lengths))}


def _policies(
    requests: Sequence[LoggedRequest], per_token: float, positions: int, memory: int, block: int
) -> dict[str, dict[str, float]]:
    """Memory held per running request, and how many run at once, under three policies.

    Means are over steps, not requests, for a long output is met more often: a request holds its place for as many steps
    as it has output tokens. "reserve_max" keeps room for the model's positions (as far as any request could grow),
    "reserve_total" for the final length (which no server knows in advance), "paged" the blocks that are filled.
    """
    prompt, output = (np.array([getattr(r, name) for r in requests], dtype=np.int64) for name in ("prompt", "output"))
    steps = output.sum()
    filled = float(((prompt + (output + 1) / 2) * output).sum() / steps)
    grown = [block * float((-(-(p + np.arange(1, o + 1)) // block)).sum()) for p, o in zip(prompt, output, strict=True)]
    held = {
        "reserve_max": float(positions),
        "reserve_total": float(((prompt + output) * output).sum() / steps),
        "paged": sum(grown) / float(steps),
    }
    return {
        name: {
            "mb_per_request": tokens * per_token / 1e6,
            "concurrent": memory / (tokens * per_token),
            "waste": 1 - filled / tokens,
        }
        for name, tokens in held.items()
    }


def _prefix_caching(requests: Sequence[LoggedRequest], block: int, blocks: int) -> dict[str, float] | None:
    """Prompt tokens that a prefix cache would have saved, by replaying the prompts one after another on the real
    allocator of `blocks` blocks. None where the log has lengths only."""
    prompts = [r.key for r in requests if r.key is not None]
    if not prompts:
        return None
    manager = BlockManager(max(blocks, max(math.ceil(len(p) / block) for p in prompts)), block)
    hits = 0
    for prompt in prompts:
        table = manager.match(prompt, len(prompt) - 1)
        hits += table.length
        manager.reserve(table, len(prompt))
        table.length = len(prompt)
        manager.publish(table, prompt)
        manager.release(table)
    hit = hits / sum(map(len, prompts))
    return {"hit_rate": hit, "prefill_speedup": 1 / (1 - hit)}


def rows(result: dict[str, Any]) -> list[tuple[str, str]]:
    """A profile as (what, value) for people."""
    lines = [("requests", str(result["requests"]))]
    for name, values in result["lengths"].items():
        text = ", ".join(f"{key} {value:.0f}" for key, value in values.items())
        lines.append((f"{name} tokens", text))
    for name, policy in result["policies"].items():
        text = f"{policy['mb_per_request']:.2f} MB per request, {policy['concurrent']:.1f} at once"
        lines.append((name.replace("_", " "), f"{text}, {policy['waste']:.1%} empty"))
    prefix, draft = result["prefix_caching"], result.get("draft")
    unknown = "unknown: the log has no token ids"
    saved = (
        f"{prefix['hit_rate']:.1%} of prompt tokens, prefill x{prefix['prefill_speedup']:.2f}" if prefix else unknown
    )
    lines.append(("prefix caching saves", saved))
    if draft:
        text = f"{draft['tokens_per_step']:.2f} tokens per step, decode x{draft['decode_speedup']:.2f}"
        lines.append(("a draft gives", text + ("" if draft["worth_it"] else " (not worth it)")))
    return lines
