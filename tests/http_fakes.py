"""A fake service behind the real HTTP layer, and what tests of that layer need to talk to it."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import threading
from typing import Any, cast

import httpx
import numpy as np
from litestar import Litestar
from litestar.types import HTTPScope

from embedsvc.calls import CatalogEntry, EmbedCall, Embedded
from embedsvc.config import Config, ModelConfig, ServerConfig
from embedsvc.errors import ModelError, NotReady, StartError
from embedsvc.http.app import create_app
from embedsvc.http.server import serve
from embedsvc.metrics import Metrics
from embedsvc.service import Service, State
from embedsvc.tokenization import Token

DIM = 8
MODEL = "org/model"
URL = "/v1/embeddings"
MAX_BODY_BYTES = 64 * 1024


class FakeService:
    """Answers at once with row i filled with i + 1/3, or raises `error`, or waits for `gate`."""

    def __init__(self, *models: str) -> None:
        served = [ModelConfig(name=name) for name in models or (MODEL,)]
        self.config = Config(
            server=ServerConfig(max_body_bytes=MAX_BODY_BYTES, max_timeout_s=100.0), models=served
        )
        self.metrics = Metrics()
        self.state: State = "ready"
        self.error: Exception | None = None
        self.gate: asyncio.Event | None = None
        self.entered = asyncio.Event()
        self.calls: list[EmbedCall] = []
        self.dim = DIM
        self.n_truncated = 0
        self.cancelled = asyncio.Event()

    @property
    def ready(self) -> bool:
        """Whether requests are served."""
        return self.state == "ready"

    async def start(self) -> None:
        """Become ready."""
        self.state = "ready"

    async def stop(self, drain_timeout_s: float | None = None) -> None:
        """Become unready."""
        self.state = "stopping"

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
        """Return one token a text."""
        return [[Token(1, text, False, 0, len(text))] for text in texts]

    def catalog(self) -> list[CatalogEntry]:
        """Return the served names."""
        return [CatalogEntry(m.name, 1_700_000_000, m.name) for m in self.config.models]

    def info(self) -> dict[str, Any]:
        """Return something."""
        return {"state": self.state}


def app_of(service: FakeService) -> Litestar:
    """Return an app in front of a fake service."""
    return create_app(cast("Service", service))


def client_of(service: FakeService) -> httpx.AsyncClient:
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


class HeldService(FakeService):
    """A service in a process of its own, whose calls wait for a line on stdin or for `stop`."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        server = ServerConfig(port=0, drain_timeout_s=0.05 if mode == "impatient" else 60.0)
        self.config = Config(server=server, models=self.config.models)
        self.state = "loading"
        self._mode = mode

    async def start(self) -> None:
        """Become ready, or fail, or never end, as told by the mode."""
        if self._mode == "broken":
            raise ModelError("models[0].source: no such model")
        if self._mode == "loading":
            say("loading")
            await asyncio.to_thread(threading.Event().wait)
        self.gate = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_reader(sys.stdin.fileno(), self.gate.set)
        await super().start()

    async def stop(self, drain_timeout_s: float | None = None) -> None:
        """Refuse everyone who waits."""
        await super().stop()
        if self.gate is not None and not self.gate.is_set():
            self.error = NotReady("stopping", retry_after_s=1)
            self.gate.set()

    async def embed(self, call: EmbedCall) -> Embedded:
        """Say that a call is held, and hold it."""
        say("held")
        return await super().embed(call)


def say(line: str) -> None:
    """Tell the parent process."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> None:
    """Serve a `HeldService` of the mode given as argument; the log goes to stdout."""
    logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(message)s")
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    try:
        serve(
            cast("Service", HeldService(sys.argv[1])),
            on_ready=lambda url: say(f"ready on {url}"),
        )
    except StartError as error:
        say(str(error))
        sys.exit(1)


if __name__ == "__main__":
    main()
