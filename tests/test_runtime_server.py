"""The server through the real openai client: answers, limits, load, disconnects, shutdown."""

import asyncio
import contextlib
import json
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")
httpx = pytest.importorskip("httpx")
openai = pytest.importorskip("openai")

from runtime.engine import Engine  # noqa: E402
from runtime.model import load_model  # noqa: E402
from runtime.sampling import SamplingParams  # noqa: E402
from runtime.server import Limits, create_app  # noqa: E402

KEY = "a key"


def make_engine(model: Path, **options: Any) -> Engine:
    loaded = load_model(model, kernel="reference")
    return Engine(loaded, loaded.tokenizer, **({"kv_tokens": 1024, "attention": "reference"} | options))


@contextlib.contextmanager
def running(app: Any) -> Iterator[str]:
    """The application under uvicorn on a free port of the loopback interface; its address."""
    import uvicorn

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="warning", timeout_graceful_shutdown=5))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()


@pytest.fixture(scope="module")
def served(tiny_model: Callable[..., Path]) -> Iterator[tuple[str, Engine]]:
    engine = make_engine(tiny_model("llama"))
    app = create_app(engine, "tiny", api_key=KEY, limits=Limits(body=20_000, n=4, max_tokens=64, pending=128))
    with running(app) as address:
        yield address, engine


@pytest.fixture(scope="module")
def client(served: tuple[str, Engine]) -> Any:
    return openai.OpenAI(base_url=f"{served[0]}/v1", api_key=KEY, max_retries=0)


@pytest.fixture(scope="module")
def alone(tiny_model: Callable[..., Path]) -> Callable[..., Any]:
    """What the engine answers to one request and nothing else."""
    engine = make_engine(tiny_model("llama"))
    return lambda prompt, **params: engine.generate([prompt], SamplingParams(**params))[0]


def test_completions(client: Any, alone: Callable[..., Any]) -> None:
    answer = client.completions.create(model="tiny", prompt="The dog", max_tokens=8, temperature=0, logprobs=2)
    expected = alone("The dog", max_tokens=8, temperature=0, logprobs=2)[0]
    choice = answer.choices[0]
    assert choice.text == expected.text and choice.finish_reason == expected.finish_reason
    assert choice.logprobs.token_logprobs == pytest.approx([e.logprob for e in expected.logprobs], abs=1e-5)
    assert len(choice.logprobs.top_logprobs[0]) == 2
    assert answer.usage.completion_tokens == len(expected.tokens)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_n_seed_and_several_prompts(client: Any, alone: Callable[..., Any]) -> None:
    options = dict(max_tokens=6, temperature=0.9, seed=7, n=2)
    answer = client.completions.create(model="tiny", prompt=["The dog", [5, 6, 7]], **options)
    texts = [choice.text for choice in answer.choices]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert texts == [c.text for prompt in ("The dog", [5, 6, 7]) for c in alone(prompt, **options)]
    assert texts[0] != texts[1]
    again = client.completions.create(model="tiny", prompt="The dog", **options)
    assert [choice.text for choice in again.choices] == texts[:2]


def test_stop_strings(client: Any, alone: Callable[..., Any]) -> None:
    whole = alone("The dog", max_tokens=20, temperature=0, ignore_eos=True)[0].text
    stop = whole[5:7]
    answer = client.completions.create(
        model="tiny", prompt="The dog", max_tokens=20, temperature=0, stop=stop, extra_body={"ignore_eos": True}
    )
    assert answer.choices[0].text == whole[: whole.index(stop)]
    assert answer.choices[0].finish_reason == "stop"


def test_chat_and_its_stream_say_the_same(client: Any) -> None:
    options: dict[str, Any] = dict(
        model="tiny",
        messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Where is the moon?"}],
        max_completion_tokens=12,
        seed=3,
        n=2,
        logprobs=True,
        top_logprobs=1,
    )
    whole = client.chat.completions.create(**options)
    texts, reasons, entries, usage = ["", ""], [None, None], 0, None
    for chunk in client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
            entries += len(choice.logprobs.content) if choice.logprobs else 0
    assert texts == [choice.message.content for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert whole.choices[0].message.role == "assistant"
    assert usage == whole.usage and entries == usage.completion_tokens
    assert whole.choices[0].logprobs.content[0].top_logprobs[0].logprob <= 0


def test_the_small_endpoints(served: tuple[str, Engine], client: Any, alone: Callable[..., Any]) -> None:
    address, engine = served
    headers = {"Authorization": f"Bearer {KEY}"}
    assert httpx.get(f"{address}/health").json() == {"status": "ok"}
    assert [model.id for model in client.models.list()] == ["tiny"]
    tokens = httpx.post(f"{address}/tokenize", json={"prompt": "The dog"}, headers=headers).json()
    assert tokens["tokens"] == engine.tokenizer.encode("The dog") and tokens["max_model_len"] == 256
    body = {"prompt": "The dog", "max_tokens": 5, "temperature": 0}
    generated = httpx.post(f"{address}/generate", json=body, headers=headers).json()
    assert generated == {"generated_text": alone("The dog", max_tokens=5, temperature=0)[0].text}
    metrics = httpx.get(f"{address}/metrics", headers=headers).text
    for name in ("requests_running", "kv_blocks_used", "prefix_cache_hit_ratio", "ttft_seconds_bucket"):
        assert f"bitwright_{name}" in metrics
    counted = [line for line in metrics.splitlines() if line.startswith("bitwright_generated_tokens_total")]
    assert float(counted[0].split()[1]) >= 5


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        ("completions", {"prompt": "x", "max_tokens": 65}, 400, "max_tokens"),
        ("completions", {"prompt": "x", "max_tokens": 0}, 400, "max_tokens"),
        ("completions", {"prompt": "x", "n": 5}, 400, "at most n 4"),
        ("completions", {"prompt": ["x"] * 40, "n": 2}, 400, "64 in all"),
        ("completions", {"prompt": "moon " * 400}, 400, "tokens"),
        ("completions", {"prompt": [5, 100_000]}, 400, "vocabulary"),
        ("completions", {"prompt": "x", "temperature": -1}, 400, "temperature"),
        ("completions", {"prompt": "x", "logit_bias": {"400": 1}}, 400, "logit_bias"),
        ("completions", {"prompt": "x", "tools": []}, 400, "tools"),
        ("completions", {"prompt": "x", "model": "gpt-4"}, 404, "gpt-4"),
        ("completions", {"prompt": "x" * 30_000}, 413, "larger"),
        ("chat/completions", {"messages": []}, 400, "messages"),
        ("chat/completions", {"messages": [{"role": "king", "content": "x"}]}, 400, "role"),
        ("nothing", {}, 404, "Not Found"),
    ],
)
def test_refusals(served: tuple[str, Engine], path: str, body: dict[str, Any], status: int, says: str) -> None:
    answer = httpx.post(f"{served[0]}/v1/{path}", json=body, headers={"Authorization": f"Bearer {KEY}"})
    assert answer.status_code == status
    assert says in answer.json()["error"]["message"]


def test_odd_bodies(served: tuple[str, Engine]) -> None:
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    for content in (
        b"",
        b"[1, 2]",
        b'{"prompt": NaN}',
        b'{"prompt": "x", "temperature": NaN}',
        b'{"prompt": "x", "seed": 1e999}',
        b'{"prompt": "\\ud800"}',
        b"\xff\xfe",
        b'{"prompt": "x"',
    ):
        answer = httpx.post(f"{served[0]}/v1/completions", content=content, headers=headers)
        assert answer.status_code == 400, content
        assert answer.json()["error"]["message"]

    def endless() -> Iterator[bytes]:
        for _ in range(100):
            yield b" " * 1000

    assert httpx.post(f"{served[0]}/v1/completions", content=endless(), headers=headers).status_code == 413


def test_the_key(served: tuple[str, Engine]) -> None:
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": KEY}):
        answer = httpx.get(f"{served[0]}/v1/models", headers=headers)
        assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{served[0]}/v1", api_key="wrong").models.list()


def test_every_answer_under_load_is_the_one_given_alone(served: tuple[str, Engine], alone: Callable[..., Any]) -> None:
    """200 requests, 40 at a time, of every kind, on a cache that holds a few of them only."""
    address, engine = served
    jobs = []
    for i in range(200):
        prompt = ("The quick brown fox jumps over the lazy dog. " * (i % 4)) + f"In {i % 50}"
        params = dict(max_tokens=3 + i % 9, temperature=(i % 3) * 0.5, seed=i, n=1 + (i % 5 == 0))
        jobs.append((prompt, params))

    async def all_at_once() -> list[list[str]]:
        clients = openai.AsyncOpenAI(base_url=f"{address}/v1", api_key=KEY, max_retries=0)
        gate = asyncio.Semaphore(40)

        async def ask(i: int) -> list[str]:
            prompt, params = jobs[i]
            async with gate:
                if i % 2:
                    answer = await clients.completions.create(model="tiny", prompt=prompt, **params)
                    return [choice.text for choice in answer.choices]
                texts = [""] * params["n"]
                stream = await clients.completions.create(model="tiny", prompt=prompt, **params, stream=True)
                async for chunk in stream:
                    texts[chunk.choices[0].index] += chunk.choices[0].text
                return texts

        return await asyncio.gather(*map(ask, range(len(jobs))))

    answers = asyncio.run(all_at_once())
    for (prompt, params), texts in zip(jobs, answers, strict=True):
        assert texts == [completion.text for completion in alone(prompt, **params)]
    assert not engine.has_work() and engine.stats().blocks_used == 0


def test_hanging_up_frees_the_memory(tiny_model: Callable[..., Path]) -> None:
    engine = make_engine(tiny_model("llama"))
    step = engine.step
    engine.step = lambda: time.sleep(0.02) or step()  # type: ignore[method-assign, func-returns-value]
    body = {"prompt": "The dog", "max_tokens": 200, "ignore_eos": True}
    with running(create_app(engine, "tiny")) as address:
        for stream in (True, False):
            if stream:
                with httpx.stream("POST", f"{address}/v1/completions", json=body | {"stream": True}) as answer:
                    assert next(answer.iter_lines()).startswith("data: ")
            else:
                with pytest.raises(httpx.ReadTimeout):
                    httpx.post(f"{address}/v1/completions", json=body, timeout=0.3)
            deadline = time.monotonic() + 2
            while (engine.has_work() or engine.stats().blocks_used) and time.monotonic() < deadline:
                time.sleep(0.02)
            assert not engine.has_work() and engine.stats().blocks_used == 0
        metrics = httpx.get(f"{address}/metrics").text
        assert 'bitwright_requests_total{outcome="cancelled"} 2.0' in metrics


def test_too_many_requests_are_told_when_to_come_back(tiny_model: Callable[..., Path]) -> None:
    engine = make_engine(tiny_model("llama"))
    step = engine.step
    engine.step = lambda: time.sleep(0.02) or step()  # type: ignore[method-assign, func-returns-value]
    with running(create_app(engine, "tiny", limits=Limits(pending=2))) as address:
        body = {"prompt": "The dog", "max_tokens": 40, "ignore_eos": True}
        answers: list[Any] = []
        threads = [
            threading.Thread(target=lambda: answers.append(httpx.post(f"{address}/v1/completions", json=body)))
            for _ in range(6)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        codes = sorted(answer.status_code for answer in answers)
        assert codes == [200, 200, 429, 429, 429, 429]
        assert all(int(a.headers["Retry-After"]) >= 1 for a in answers if a.status_code == 429)
        assert httpx.post(f"{address}/v1/completions", json=body).status_code == 200


def test_shutdown_lets_requests_end(tiny_model: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    engine = make_engine(tiny_model("llama"))
    step = engine.step
    engine.step = lambda: time.sleep(0.02) or step()  # type: ignore[method-assign, func-returns-value]
    answers: list[Any] = []
    with running(create_app(engine, "tiny")) as address:
        body = {"prompt": "The dog", "max_tokens": 30, "ignore_eos": True}
        thread = threading.Thread(target=lambda: answers.append(httpx.post(f"{address}/v1/completions", json=body)))
        thread.start()
        while not engine.has_work():
            time.sleep(0.01)
    thread.join()
    assert answers[0].status_code == 200 and answers[0].json()["usage"]["completion_tokens"] == 30
    assert "every request was answered" in capsys.readouterr().err


def test_a_dead_engine_is_reported(tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    engine = make_engine(tiny_model("llama"))
    engine.step = broken  # type: ignore[assignment, method-assign]
    with running(create_app(engine, "tiny")) as address:
        assert httpx.post(f"{address}/generate", json={"prompt": "x"}).status_code == 503
        assert httpx.get(f"{address}/health").status_code == 503
        assert httpx.get(f"{address}/metrics").status_code == 503


def test_the_schema_is_complete(served: tuple[str, Engine]) -> None:
    schema = httpx.get(f"{served[0]}/openapi.json", headers={"Authorization": f"Bearer {KEY}"}).json()
    assert {
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/models",
        "/generate",
        "/tokenize",
        "/health",
        "/metrics",
    } == set(schema["paths"])
    assert "422" not in json.dumps(list(schema["paths"].values()))


@pytest.mark.slow
def test_schemathesis_finds_nothing(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    """Needs the `schemathesis` command, from whatever environment, on the PATH.

    One check is left out: that what the schema allows is accepted. Prompts that are longer than the model's positions,
    or tokens outside its vocabulary, are refused by rules that no schema can state.
    """
    command = shutil.which("schemathesis")
    if command is None:
        pytest.skip("schemathesis is not installed")
    with running(create_app(make_engine(tiny_model("llama")), "tiny")) as address:
        options = ["--max-examples", "50", "--exclude-checks", "positive_data_acceptance"]
        done = subprocess.run(
            [command, "run", f"{address}/openapi.json", *options],
            capture_output=True,
            text=True,
            timeout=600,
            cwd=tmp_path,
        )
        assert done.returncode == 0, done.stdout[-3000:]
