"""The one thread that runs the engine, seen from asyncio: submit, listen, cancel, measure."""

import asyncio
import queue
import statistics
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from formats.errors import BitwrightError
from runtime.engine import Engine
from runtime.requests import Output, Stats
from runtime.sampling import SamplingParams

T = TypeVar("T")
_TTFT = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_INTER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


class Busy(Exception):
    """As many requests are waiting as may. retry_after: seconds, by how long recent requests took."""

    def __init__(self, retry_after: int) -> None:
        super().__init__(f"the server is busy; try again in {retry_after} s")
        self.retry_after = retry_after


class Stopped(Exception):
    """The engine does not run (any more)."""


@dataclass(eq=False)
class Ticket:
    """One or more prompts under way. Iterate over it for (position of the prompt, output) until all have ended.

    `close`, at any time and any number of times, cancels what is left: its memory is free after the step that runs now.
    """

    owner: "EngineThread"
    unfinished: dict[int, int] = field(default_factory=dict)  # request id -> sequences that have not ended
    position: dict[int, int] = field(default_factory=dict)  # request id -> which of the prompts
    outputs: "asyncio.Queue[Output | None]" = field(default_factory=asyncio.Queue)
    latest: dict[tuple[int, int], float] = field(default_factory=dict)
    started: float = field(default_factory=time.perf_counter)
    closed: bool = False

    async def __aiter__(self) -> AsyncIterator[tuple[int, Output]]:
        while any(self.unfinished.values()):
            output = await self.outputs.get()
            if output is None:
                raise Stopped("the request was cancelled")
            if output.finish_reason:
                self.unfinished[output.request_id] -= 1
            yield self.position[output.request_id], output

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.outputs.put_nowait(None)
            self.owner.release(self)


class EngineThread:
    """Owns an engine. All methods but the thread's own belong to the event loop that called `start`."""

    def __init__(self, engine: Engine, max_pending: int = 256) -> None:
        self.engine, self.max_pending, self.pending = engine, max_pending, 0
        self.alive = False
        self._calls: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._tickets: dict[int, Ticket] = {}
        self._asked: set[asyncio.Future[Any]] = set()
        self._durations: deque[float] = deque(maxlen=32)
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.registry = CollectorRegistry()
        self._ttft = Histogram("bitwright_ttft_seconds", "Time to first token", buckets=_TTFT, registry=self.registry)
        self._inter_token = Histogram(
            "bitwright_inter_token_seconds", "Time between tokens", buckets=_INTER_TOKEN, registry=self.registry
        )
        self.ended = Counter("bitwright_requests", "Requests by how they ended", ["outcome"], registry=self.registry)

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.alive = True
        self._thread.start()

    async def stop(self) -> None:
        """End the thread after the step that runs now; whoever still listens gets `Stopped`."""
        self.alive = False
        self._calls.put(None)
        await asyncio.to_thread(self._thread.join)

    async def submit(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> Ticket:
        """Queue prompts (tokens), all or none. Raises Busy, Stopped, or the engine's BitwrightError."""
        if not self.alive:
            raise Stopped("the engine is not running")
        if self.pending + len(prompts) > self.max_pending:
            typical = statistics.fmean(self._durations) if self._durations else 1.0
            raise Busy(min(60, max(1, round(typical))))
        ticket, admitted = Ticket(self), self._future()
        self.pending += len(prompts)

        def add() -> None:
            ids: list[int] = []
            try:
                for prompt, wanted in zip(prompts, params, strict=True):
                    ids.append(self.engine.add_request(prompt, wanted))
            except BitwrightError as error:
                for added in ids:
                    self.engine.cancel(added)
                self._loop.call_soon_threadsafe(_settle, admitted, None, error)
            else:
                self._loop.call_soon_threadsafe(self._admit, ticket, dict(zip(ids, params, strict=True)), admitted)

        self._calls.put(add)
        try:
            await admitted
        except (BitwrightError, Stopped, asyncio.CancelledError):
            if ticket.unfinished:  # admitted, but who asked was cancelled in that moment
                ticket.close()
            else:
                admitted.cancel()
                self.pending -= len(prompts)
            raise
        return ticket

    async def call(self, function: Callable[[], T]) -> T:
        """The function's result, computed by the engine's thread between two steps."""
        if not self.alive:
            raise Stopped("the engine is not running")
        result = self._future()
        self._calls.put(lambda: self._loop.call_soon_threadsafe(_settle, result, function(), None))
        answer: T = await result
        return answer

    def release(self, ticket: Ticket) -> None:
        """A ticket's holder is done with it."""
        left = [request for request, sequences in ticket.unfinished.items() if sequences]
        for request in ticket.unfinished:
            self._tickets.pop(request, None)
        for request in left:
            self._calls.put(lambda request=request: self.engine.cancel(request))  # type: ignore[misc]
        self.pending -= len(ticket.unfinished)
        self.ended.labels("cancelled").inc(len(left))
        self.ended.labels("finished").inc(len(ticket.unfinished) - len(left))
        if not left:
            self._durations.append(time.perf_counter() - ticket.started)

    def _future(self) -> "asyncio.Future[Any]":
        """A future that fails when the engine does."""
        future = self._loop.create_future()
        self._asked.add(future)
        future.add_done_callback(self._asked.discard)
        return future

    def _admit(self, ticket: Ticket, params: dict[int, SamplingParams], admitted: "asyncio.Future[None]") -> None:
        """Outputs can only be delivered after this, for both are queued on the loop by the engine's thread."""
        if admitted.cancelled():
            for request in params:
                self._calls.put(lambda request=request: self.engine.cancel(request))  # type: ignore[misc]
            return
        ticket.unfinished = {request: wanted.n for request, wanted in params.items()}
        ticket.position = {request: position for position, request in enumerate(params)}
        self._tickets |= dict.fromkeys(params, ticket)
        admitted.set_result(None)

    def _deliver(self, outputs: Iterable[Output]) -> None:
        now = time.perf_counter()
        for output in outputs:
            ticket = self._tickets.get(output.request_id)
            if ticket is None:
                continue
            last = ticket.latest.get((output.request_id, output.index))
            if last is None:
                self._ttft.observe(now - ticket.started)
            else:
                for _ in output.tokens:
                    self._inter_token.observe((now - last) / len(output.tokens))
            ticket.latest[output.request_id, output.index] = now
            ticket.outputs.put_nowait(output)

    def _run(self) -> None:
        try:
            while self._take_calls():
                if self.engine.has_work():
                    outputs = self.engine.step()
                    self._loop.call_soon_threadsafe(self._deliver, outputs)
        finally:  # also after an error of the engine, which the interpreter reports
            self._loop.call_soon_threadsafe(self._fail)

    def _take_calls(self) -> bool:
        """Make the calls that came in; when there is no work, wait for one. False: stop."""
        while True:
            try:
                call = self._calls.get(block=not self.engine.has_work())
            except queue.Empty:
                return True
            if call is None:
                return False
            call()

    def _fail(self) -> None:
        self.alive = False
        for future in list(self._asked):
            _settle(future, None, Stopped("the engine is not running"))
        for ticket in set(self._tickets.values()):
            ticket.close()


def _settle(future: "asyncio.Future[Any]", value: Any, error: Exception | None) -> None:
    if future.done():  # whoever asked is gone
        return
    if error is None:
        future.set_result(value)
    else:
        future.set_exception(error)


class StatsCollector(Collector):
    """The engine's statistics in Prometheus' terms; `latest` is set before each scrape."""

    latest: Stats

    def collect(self) -> Iterable[Metric]:
        s = self.latest
        for name, about, value in (
            ("requests_waiting", "Sequences waiting for memory", s.waiting),
            ("requests_running", "Sequences being computed", s.running),
            ("kv_blocks_used", "KV cache blocks in use", s.blocks_used),
            ("kv_blocks_total", "KV cache blocks", s.blocks_total),
            ("prefix_cache_hit_ratio", "Prompt tokens found in the prefix cache", s.cache_hit_rate),
            ("tokens_per_second", "Generated tokens per second, lately", s.tokens_per_second),
            ("draft_acceptance_ratio", "Guessed tokens that were accepted", s.acceptance),
            ("tokens_per_step", "Tokens per decoding step under speculation", s.tokens_per_step),
        ):
            if value is not None:
                yield GaugeMetricFamily(f"bitwright_{name}", about, value=value)
        for name, about, count in (
            ("preemptions", "Sequences put back for lack of memory", s.preemptions),
            ("prompt_tokens", "Tokens of prompts", s.prompt_tokens),
            ("generated_tokens", "Tokens generated", s.generated_tokens),
        ):
            yield CounterMetricFamily(f"bitwright_{name}", about, value=count)
