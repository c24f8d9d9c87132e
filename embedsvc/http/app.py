"""The Litestar app of one service; two apps in one process share nothing.

Any ASGI server can run it; `embedsvc.http.server` is the one with our shutdown.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from litestar import Litestar, asgi
from litestar.di import Provide
from litestar.exceptions import HTTPException

from embedsvc.errors import RequestError
from embedsvc.http import routes
from embedsvc.http.protocol import EmbeddingsEndpoint
from embedsvc.http.replies import RequestIds
from embedsvc.service import Service

LOOP_LAG_INTERVAL_S = 0.5

Lifespan = Callable[[Litestar], AbstractAsyncContextManager[None]]


def create_app(service: Service, lifespan: Lifespan | None = None) -> Litestar:
    """Return the app that serves a service.

    Args:
        service: not started yet.
        lifespan: starts and stops the service around the app's life; by default the service is
            ready before the first request is accepted. Without any lifespan, every request for
            vectors is answered 503.
    """
    request_ids = RequestIds()
    endpoint = EmbeddingsEndpoint(service, request_ids)
    embeddings = asgi(["/v1/embeddings", "/embeddings"], copy_scope=False)(endpoint.handle)
    app = Litestar(
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
    app.state.draining = False
    app.state.request_ids = request_ids
    return app


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
