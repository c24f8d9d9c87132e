"""A fake service behind the real HTTP layer, and what tests of that layer need to talk to it."""

from __future__ import annotations

import asyncio
import json
from typing import Any, cast

import httpx
import numpy as np
from litestar import Litestar
from litestar.types import HTTPScope

from embedsvc.calls import CatalogEntry, EmbedCall, Embedded
from embedsvc.config import Config, ModelConfig, ServerConfig
from embedsvc.http.app import create_app
from embedsvc.keys import Keys
from embedsvc.metrics import Metrics
from embedsvc.service import Service, State
from embedsvc.tokenization import Token

DIM = 8
MODEL = "org/model"
URL = "/v1/embeddings"
MAX_BODY_BYTES = 64 * 1024


class HeardMetrics(Metrics):
    """Metrics that a test can wait for."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: asyncio.Queue[tuple[int, str]] = asyncio.Queue()

    def request(self, route: str, status: int, reason: str, seconds: float | None) -> None:
        """Count, and tell."""
        super().request(route, status, reason, seconds)
        self.heard.put_nowait((status, reason))


class FakeService:
    """Answers at once with row i filled with i + 1/3, or raises `error`, or waits for `gate`."""

    def __init__(self, *models: str) -> None:
        served = [ModelConfig(name=name) for name in models or (MODEL,)]
        self.config = Config(
            server=ServerConfig(max_body_bytes=MAX_BODY_BYTES, max_timeout_s=100.0), models=served
        )
        self.keys = Keys({})
        self.metrics = HeardMetrics()
        self.state: State = "ready"
        self.error: Exception | None = None
        self.gate: asyncio.Event | None = None
        self.entered = asyncio.Event()
        self.calls: list[EmbedCall] = []
        self.dim = DIM
        self.n_truncated = 0
        self.cancelled = asyncio.Event()
        self.stopped = asyncio.Event()
        self.drained_s: float | None = None

    @property
    def ready(self) -> bool:
        """Whether requests are served."""
        return self.state == "ready"

    @property
    def accepting(self) -> bool:
        """Whether calls are looked at."""
        return self.state in ("ready", "restarting")

    async def start(self) -> None:
        """Become ready."""
        self.state = "ready"

    async def stop(self, drain_timeout_s: float | None = None) -> None:
        """Become unready."""
        self.state = "stopping"
        self.drained_s = drain_timeout_s
        self.stopped.set()

    async def embed(self, call: EmbedCall) -> Embedded:
        """Answer as told."""
        self.calls.append(call)
        self.entered.set()
        if self.gate is not None:
            try:
                await self.gate.wait()
            except asyncio.CancelledError:
                self.cancelled.set()
                raise
        if self.error is not None:
            raise self.error
        rows = np.arange(len(call.inputs), dtype=np.float32)[:, None] + np.float32(1 / 3)
        vectors = np.ascontiguousarray(np.broadcast_to(rows, (len(rows), self.dim)))
        return Embedded(vectors, 7 * len(rows), self.n_truncated, "v1", 0.001, 0.002, 0.003)

    async def tokenize(
        self, model: str, texts: list[str], *, prompt_name: str | None, add_special_tokens: bool
    ) -> list[list[Token]]:
        """Return one token a text, when there is no gate or it is open."""
        self.entered.set()
        if self.gate is not None:
            await self.gate.wait()
        return [[Token(1, text, False, 0, len(text))] for text in texts]

    def catalog(self) -> list[CatalogEntry]:
        """Return the served names."""
        return [CatalogEntry(m.name, 1_700_000_000, m.name) for m in self.config.models]

    def info(self) -> dict[str, Any]:
        """Return something."""
        return {"state": self.state}


def app_of(service: FakeService | Service) -> Litestar:
    """Return an app in front of a service."""
    return create_app(cast("Service", service))


def client_of(service: FakeService | Service) -> httpx.AsyncClient:
    """Return a client that never enters the lifespan."""
    transport = httpx.ASGITransport(app_of(service), raise_app_exceptions=False)  # type: ignore[arg-type]  # Litestar's own ASGI types
    return httpx.AsyncClient(transport=transport, base_url="http://test")


def counted(service: FakeService) -> dict[tuple[str, str], float]:
    """Return the requests counted so far by status and reason."""
    return {
        (sample.labels["status"], sample.labels["reason"]): sample.value
        for metric in service.metrics.registry.collect()
        for sample in metric.samples
        if sample.name == "embedsvc_requests_total"
    }


def error_of(response: httpx.Response) -> dict[str, Any]:
    """Return the error of a response after checking the envelope."""
    assert response.headers["content-type"] == "application/json"
    envelope = response.json()
    assert list(envelope) == ["error"]
    error = envelope["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert isinstance(error["type"], str)
    assert isinstance(error["param"], str | None)
    assert isinstance(error["code"], str | None)
    return cast("dict[str, Any]", error)


def http_scope(*headers: tuple[str, str]) -> HTTPScope:
    """Return the scope of a POST to the embeddings route."""
    return cast(
        "HTTPScope",
        {
            "type": "http",
            "method": "POST",
            "path": URL,
            "headers": [(name.encode(), value.encode()) for name, value in headers],
        },
    )


async def drive(
    service: FakeService,
    scope: HTTPScope,
    messages: list[dict[str, Any]],
    left: asyncio.Event | None = None,
) -> list[Any]:
    """Run the app on messages, then on silence until the client leaves; return what it sent."""
    sent: list[Any] = []

    async def receive() -> Any:
        if messages:
            return messages.pop(0)
        await (left or asyncio.Event()).wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    await app_of(service)(scope, receive, send)
    return sent


def body_message(body: dict[str, Any], *, more: bool = False) -> dict[str, Any]:
    """Return an ASGI message that carries a body."""
    return {"type": "http.request", "body": json.dumps(body).encode(), "more_body": more}
