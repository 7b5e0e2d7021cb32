"""An OpenAI-compatible HTTP server over one engine (extra: `serve`)."""

import asyncio
import contextlib
import hmac
import json
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
from prometheus_client import generate_latest
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from formats.errors import BitwrightError, UsageError
from runtime.engine import Engine
from runtime.engine_thread import Busy, EngineThread, StatsCollector, Stopped, Ticket
from runtime.generate import load_draft
from runtime.model import load_model
from runtime.openai_api import (
    ChatRequest,
    ChatStyle,
    CompletionRequest,
    ErrorAnswer,
    GenerateAnswer,
    GenerateRequest,
    Generation,
    Style,
    TokenizeAnswer,
    TokenizeRequest,
)
from runtime.requests import Completion
from runtime.sampling import SamplingParams


@dataclass(frozen=True)
class Limits:
    """What one client may ask. body: bytes; prompt: tokens (None: the model's positions); sequences: prompts times n of
    one request; pending: prompts in the server at once, above which the answer is 429."""

    body: int = 1 << 20
    prompt: int | None = None
    n: int = 16
    sequences: int = 64
    max_tokens: int = 4096
    pending: int = 256


def error(status: int, message: str, kind: str = "invalid_request_error", code: str | None = None) -> JSONResponse:
    detail = {"message": message, "type": kind, "param": None, "code": code}
    return JSONResponse({"error": detail}, status, headers={"WWW-Authenticate": "Bearer"} if status == 401 else None)


class Guard:
    """Before anything else: the API key, compared in constant time, and the size of the body, which is read here."""

    OPEN = ("/health",)

    def __init__(self, app: ASGIApp, api_key: str | None, max_body: int) -> None:
        self.app, self.max_body = app, max_body
        self.expected = None if api_key is None else f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        given = headers.get(b"authorization", b"")
        if self.expected and scope["path"] not in self.OPEN and not hmac.compare_digest(given, self.expected):
            await error(401, "wrong or missing API key", "authentication_error", "invalid_api_key")(
                scope, receive, send
            )
            return
        body, more = b"", True
        while more and len(body) <= self.max_body:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body, more = body + message.get("body", b""), message.get("more_body", False)
        if len(body) > self.max_body:
            await error(413, f"the body is larger than {self.max_body} bytes")(scope, receive, send)
            return
        whole: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return whole.pop() if whole else await receive()

        await self.app(scope, replay, send)


class Service:
    """What the endpoints share: the engine's thread, the model's name, the limits."""

    def __init__(self, engine: Engine, name: str, limits: Limits) -> None:
        self.engine, self.name, self.limits = engine, name, limits
        self.thread = EngineThread(engine, limits.pending)
        self.stats = StatsCollector()
        self.created = int(time.time())
        self.positions: int = engine.model.config.max_positions
        self._tokenizing = ThreadPoolExecutor(1, "tokenizer")  # long texts must not hold up the event loop

    async def encode(self, text: str, special: bool = True) -> list[int]:
        def work() -> list[int]:
            return list(self.engine.tokenizer.encode(text, add_special_tokens=special))

        return await asyncio.get_running_loop().run_in_executor(self._tokenizing, work)

    async def encode_chat(self, request: ChatRequest) -> list[int]:
        try:
            text = self.engine.tokenizer.apply_chat_template(
                [message.plain() for message in request.messages], tokenize=False, add_generation_prompt=True
            )
        except (ValueError, jinja2.TemplateError) as problem:  # no template, or one that refuses the roles
            raise UsageError(f"the model's chat template does not take these messages: {problem}") from None
        return await self.encode(text, special=False)

    def decode(self, token: int) -> str:
        return str(self.engine.tokenizer.decode([token]))

    def room(self, prompt: Sequence[int], asked: int | None) -> int:
        """max_tokens for a prompt: what was asked, or as much as is allowed. Raises UsageError beyond the limits."""
        limit = min(self.limits.prompt or self.positions, self.positions - 1)
        if len(prompt) > limit:
            raise UsageError(f"the prompt has {len(prompt)} tokens, more than {limit}")
        if asked is None:
            return min(self.limits.max_tokens, self.positions - len(prompt), self._cache_room(prompt))
        if asked > self.limits.max_tokens:
            raise UsageError(f"max_tokens {asked} is above this server's limit of {self.limits.max_tokens}")
        return asked

    def _cache_room(self, prompt: Sequence[int]) -> int:
        return max(1, self.engine.blocks.num_blocks * self.engine.blocks.block_size - len(prompt))

    async def submit(self, request: Generation, prompts: list[list[int]], params: list[SamplingParams]) -> Ticket:
        if request.model not in (None, self.name):
            raise HTTPException(404, f'the model "{request.model}" is not served here; "{self.name}" is')
        if request.n > self.limits.n or request.n * len(prompts) > self.limits.sequences:
            raise UsageError(
                f"{len(prompts)} prompts with n {request.n}: at most n {self.limits.n}, {self.limits.sequences} in all"
            )
        return await self.thread.submit(prompts, params)

    async def answer(
        self, http: Request, request: Generation, prompts: list[list[int]], params: list[SamplingParams], style: Style
    ) -> Any:
        """Run the prompts and answer in full, or as a stream of events."""
        ticket = await self.submit(request, prompts, params)
        head = {"id": f"{style.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": self.name}
        prompt_tokens = sum(map(len, prompts))
        if request.stream:
            usage = request.stream_options is not None and request.stream_options.include_usage
            head |= {"object": style.part}
            return EventStream(ticket, _events(ticket, head, style, request.n, prompt_tokens if usage else None))
        completions = [Completion() for _ in range(request.n * len(prompts))]
        async with _watched(http.receive, ticket):
            async for position, output in ticket:
                completions[position * request.n + output.index].add(output)
        choices = [style.choice(i, completion) for i, completion in enumerate(completions)]
        generated = sum(len(completion.tokens) for completion in completions)
        return JSONResponse(
            head | {"object": style.whole, "choices": choices, "usage": _usage(prompt_tokens, generated)}
        )


def _usage(prompt: int, generated: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}


async def _events(
    ticket: Ticket, head: dict[str, Any], style: Style, n: int, prompt_tokens: int | None
) -> AsyncIterator[str]:
    """Server-sent events; prompt_tokens None: no usage at the end."""
    begun: set[int] = set()
    generated = 0
    try:
        async for position, output in ticket:
            index = position * n + output.index
            generated += len(output.tokens)
            if not (output.text or output.logprobs or output.finish_reason):
                continue
            delta = style.delta(index, output, index not in begun)
            begun.add(index)
            yield _event(head | {"choices": [delta]})
    except Stopped as problem:
        yield _event({"error": {"message": str(problem), "type": "server_error", "param": None, "code": None}})
        return
    if prompt_tokens is not None:
        yield _event(head | {"choices": [], "usage": _usage(prompt_tokens, generated)})
    yield "data: [DONE]\n\n"


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n"


class EventStream(StreamingResponse):
    """A stream that ends its ticket, whether it was read to the end, cut off, or never begun."""

    def __init__(self, ticket: Ticket, events: AsyncIterator[str]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self.ticket = ticket

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with _watched(receive, self.ticket):
            await super().__call__(scope, receive, send)


@contextlib.asynccontextmanager
async def _watched(receive: Receive, ticket: Ticket) -> AsyncIterator[None]:
    """Close the ticket at the end, or as soon as the client hangs up."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        ticket.close()

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        watcher.cancel()
        ticket.close()


def create_app(engine: Engine, name: str, *, api_key: str | None = None, limits: Limits | None = None) -> FastAPI:
    """The ASGI application; the engine runs in its own thread while the application does."""
    limits = limits or Limits()
    service = Service(engine, name, limits)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.thread.start()
        service.thread.registry.register(service.stats)
        yield
        left = service.thread.pending
        await service.thread.stop()
        print(
            f"stopped: {left} requests were cut off" if left else "stopped: every request was answered", file=sys.stderr
        )

    answers: dict[int | str, dict[str, Any]] = {
        status: {"model": ErrorAnswer} for status in (400, 401, 404, 413, 429, 500, 503)
    }
    app = FastAPI(title="Bitwright", version="1", lifespan=lifespan, responses=answers)
    app.add_middleware(Guard, api_key=api_key, max_body=limits.body)
    _handle_errors(app)
    _add_endpoints(app, service)
    _add_generation(app, service)
    app.openapi = _without_422(app.openapi)  # type: ignore[method-assign]
    return app


def _without_422(original: Callable[[], dict[str, Any]]) -> Callable[[], dict[str, Any]]:
    """The schema without FastAPI's own answer to invalid input: ours is 400, as OpenAI's."""

    def openapi() -> dict[str, Any]:
        schema = original()
        for path in schema["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)
        return schema

    return openapi


def _handle_errors(app: FastAPI) -> None:
    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, problem: RequestValidationError) -> JSONResponse:
        parts = [f"{'.'.join(map(str, e['loc'][1:])) or 'body'}: {e['msg']}" for e in problem.errors()[:5]]
        return error(400, "; ".join(parts))

    @app.exception_handler(BitwrightError)
    async def refused(request: Request, problem: BitwrightError) -> JSONResponse:
        return error(400, str(problem))

    @app.exception_handler(Busy)
    async def busy(request: Request, problem: Busy) -> JSONResponse:
        answer = error(429, str(problem), "rate_limit_error", "busy")
        answer.headers["Retry-After"] = str(problem.retry_after)
        return answer

    @app.exception_handler(Stopped)
    async def stopped(request: Request, problem: Stopped) -> JSONResponse:
        return error(503, str(problem), "server_error")

    @app.exception_handler(HTTPException)
    async def other(request: Request, problem: HTTPException) -> JSONResponse:
        answer = error(problem.status_code, str(problem.detail))
        answer.headers.update(problem.headers or {})
        return answer


def _add_endpoints(app: FastAPI, service: Service) -> None:
    @app.get("/health")
    async def health() -> dict[str, str]:
        if not service.thread.alive:
            raise Stopped("the engine is not running")
        return {"status": "ok"}

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> PlainTextResponse:
        service.stats.latest = await service.thread.call(service.engine.stats)
        return PlainTextResponse(generate_latest(service.thread.registry), media_type="text/plain; version=0.0.4")

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        model = {"id": service.name, "object": "model", "created": service.created, "owned_by": "bitwright"}
        return {"object": "list", "data": [model | {"max_model_len": service.positions}]}

    @app.post("/tokenize")
    async def tokenize(request: TokenizeRequest) -> TokenizeAnswer:
        tokens = await service.encode(request.prompt, request.add_special_tokens)
        return TokenizeAnswer(tokens=tokens, count=len(tokens), max_model_len=service.positions)


def _add_generation(app: FastAPI, service: Service) -> None:
    streams: dict[int | str, dict[str, Any]] = {200: {"content": {"text/event-stream": {}}}}

    @app.post("/v1/completions", response_model=None, responses=streams)
    async def completions(request: CompletionRequest, http: Request) -> Any:
        prompts = [await service.encode(p) if isinstance(p, str) else p for p in request.prompts()]
        params = [request.sampling(service.room(p, request.max_tokens), request.logprobs) for p in prompts]
        return await service.answer(http, request, prompts, params, Style(service.decode))

    @app.post("/v1/chat/completions", response_model=None, responses=streams)
    async def chat(request: ChatRequest, http: Request) -> Any:
        prompt = await service.encode_chat(request)
        longest = service.room(prompt, request.max_completion_tokens or request.max_tokens)
        params = request.sampling(longest, request.top_logprobs if request.logprobs else None)
        return await service.answer(http, request, [prompt], [params], ChatStyle(service.decode))

    @app.post("/generate")
    async def generate(request: GenerateRequest, http: Request) -> GenerateAnswer:
        prompt = await service.encode(request.prompt)
        params = SamplingParams(
            max_tokens=service.room(prompt, request.max_tokens), temperature=request.temperature, seed=request.seed
        )
        ticket = await service.thread.submit([prompt], [params])
        async with _watched(http.receive, ticket):
            text = "".join([output.text async for _, output in ticket])
        return GenerateAnswer(generated_text=text)


def serve_model(
    model: str | Path,
    host: str = "127.0.0.1",
    port: int = 8000,
    *,
    name: str | None = None,
    api_key: str | None = None,
    kv_tokens: int = 16384,
    kv_dtype: str = "float16",
    draft: str | None = None,
    kernel: str = "fast",
    device: str = "cpu",
    grace: int = 30,
) -> None:
    """Load a model and serve it until SIGINT or SIGTERM; then requests under way have `grace` seconds to end.

    name: for clients, by default the file's or directory's. draft: as `load_draft` takes it.
    """
    import uvicorn

    loaded = load_model(model, kernel=kernel, device=device)
    guesser = load_draft(model, draft, kernel=kernel, device=device)
    engine = Engine(loaded, loaded.tokenizer, kv_tokens=kv_tokens, kv_dtype=kv_dtype, draft=guesser)
    app = create_app(engine, name or loaded.path.resolve().stem, api_key=api_key)
    if host not in ("127.0.0.1", "::1", "localhost") and api_key is None:
        print(f"warning: {host} can be reached by others, and no API key is asked for", file=sys.stderr)
    print(
        f"serving {loaded.path} ({loaded.kernel} kernels) on http://{host}:{port} (/docs describes the interface)",
        file=sys.stderr,
    )
    uvicorn.run(app, host=host, port=port, timeout_graceful_shutdown=grace, log_level="warning")
