"""The Litestar app of one service; two apps in one process share nothing.

Any ASGI server can run it; `embedsvc.http.server` is the one with our shutdown.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from litestar import Litestar, asgi
from litestar.di import Provide
from litestar.exceptions import HTTPException
from litestar.types import HTTPScope, Message, Receive, Send

from embedsvc.errors import InternalError, RequestError
from embedsvc.http import routes
from embedsvc.http.body import Room
from embedsvc.http.journal import NO_ROUTE, PATHS, Journal
from embedsvc.http.protocol import EmbeddingsEndpoint
from embedsvc.http.replies import RequestIds
from embedsvc.service import Service

LOOP_LAG_INTERVAL_S = 0.5
# Probes and scrapes come for ever and would hide what users do; embeddings count themselves.
UNCOUNTED = frozenset(("/health", "/health/live", "/health/ready", "/metrics", *PATHS))

Lifespan = Callable[[Litestar], AbstractAsyncContextManager[None]]


class App(Litestar):
    """A Litestar app that counts its requests and lets those for vectors pass its router by.

    The way through Litestar's router and middleware costs 17 µs a request (measured: 60 against 43
    µs of CPU for all of HTTP, one core of a Xeon). Other spellings of the path take that way.
    """

    endpoint: EmbeddingsEndpoint
    journal: Journal

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer one request, or live one life."""
        if scope["type"] != "http":
            await super().__call__(scope, receive, send)
        elif scope["path"] in PATHS:
            await self.endpoint.handle(scope, receive, send)
        else:
            await self._counted(scope, receive, send)

    async def _counted(self, scope: HTTPScope, receive: Receive, send: Send) -> None:
        began, status = time.perf_counter(), InternalError.status

        async def send_on(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await super().__call__(scope, receive, send_on)
        finally:
            route = scope.get("path_template", NO_ROUTE)
            if route not in UNCOUNTED:
                reason = routes.reason_of(scope)
                self.journal.count(route, status, reason, time.perf_counter() - began)


def create_app(service: Service, lifespan: Lifespan | None = None) -> App:
    """Return the app that serves a service.

    Args:
        service: not started yet.
        lifespan: starts and stops the service around the app's life; by default the service is
            ready before the first request is accepted. Without any lifespan, every request for
            vectors is answered 503.
    """
    request_ids, room = RequestIds(), Room()
    journal = Journal(service.metrics, service.config.server.slow_request_s)
    endpoint = EmbeddingsEndpoint(service, request_ids, journal, room)
    embeddings = asgi(list(PATHS), copy_scope=False)(endpoint.handle)
    app = App(
        route_handlers=[
            embeddings,
            routes.list_models,
            routes.retrieve_model,
            routes.tokenize,
            routes.live,
            routes.ready,
            routes.metrics,
            routes.info,
        ],
        lifespan=[_loop_lag_sampled(service), lifespan or _running(service)],
        dependencies={"service": Provide(lambda: service, sync_to_thread=False)},
        exception_handlers={
            RequestError: routes.answer_request_error,
            HTTPException: routes.answer_framework_error,
            Exception: routes.answer_bug,
        },
        openapi_config=None,
        logging_config=None,
    )
    app.endpoint, app.journal = endpoint, journal
    app.state.draining, app.state.request_ids = False, request_ids
    app.state.room, app.state.tokenizing = room, asyncio.Semaphore(routes.TOKENIZE_AT_ONCE)
    app.state.worker = {"number": 0, "of": 1, "pid": os.getpid()}
    app.state.all_metrics = _metrics_of(service)
    return app


def _metrics_of(service: Service) -> Callable[[], Awaitable[bytes]]:
    async def render() -> bytes:
        return service.metrics.render()

    return render


def _running(service: Service) -> Lifespan:
    @asynccontextmanager
    async def run(_: Litestar) -> AsyncIterator[None]:
        try:
            await service.start()
            yield
        finally:
            await service.stop()

    return run


def _loop_lag_sampled(service: Service) -> Lifespan:
    @asynccontextmanager
    async def run(_: Litestar) -> AsyncIterator[None]:
        sampler = asyncio.create_task(_sample_loop_lag(service))
        try:
            yield
        finally:
            sampler.cancel()

    return run


async def _sample_loop_lag(service: Service) -> None:
    now = asyncio.get_running_loop().time
    while True:
        due = now() + LOOP_LAG_INTERVAL_S
        await asyncio.sleep(LOOP_LAG_INTERVAL_S)
        service.metrics.loop_lag(max(0.0, now() - due))
