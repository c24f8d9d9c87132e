"""Everything but the embeddings: models, tokens, health, metrics, and the answers to their errors.

Ordinary Litestar handlers; the service comes from the app that they belong to.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from time import monotonic
from typing import Any

from litestar import Request, Response, post, route
from litestar.datastructures import State
from litestar.di import NamedDependency
from litestar.enums import HttpMethod, MediaType
from litestar.exceptions import HTTPException
from litestar.params import FromPath, SkipValidation
from litestar.types import HTTPScope

from embedsvc.calls import CatalogEntry
from embedsvc.config import ServerConfig
from embedsvc.errors import (
    BodyTooLarge,
    InvalidRequest,
    MethodNotAllowed,
    ModelNotFound,
    Overloaded,
    RequestError,
    RouteNotFound,
    TooManyInputs,
    TooManyTokens,
)
from embedsvc.http.access import presented_key
from embedsvc.http.body import Room, read_body
from embedsvc.http.decoding import BodyDecoder
from embedsvc.http.protocol import (
    bug,
    client_of,
    default_model,
    not_ready,
    stated_timeout_s,
    until_disconnect,
    until_gone,
)
from embedsvc.http.replies import Header, RequestIds, error_reply, tokens_reply
from embedsvc.http.schemas import (
    LargeTokenizeRequest,
    TokenizeRequest,
    model_name,
    texts,
    texts_field,
)
from embedsvc.intake import CHARACTERS_PER_TOKEN, before, time_s
from embedsvc.metrics import CONTENT_TYPE
from embedsvc.service import Service

log = logging.getLogger(__name__)

AnyRequest = Request[Any, Any, State]
# Not validated: tests put a fake in its place.
ServiceOfApp = NamedDependency[SkipValidation[Service]]

# Load balancers ask for the head alone.
readable = partial(route, http_method=[HttpMethod.GET, HttpMethod.HEAD])

# So many requests are tokenized at once: each takes its turns on the tokenizer's threads and on the
# event loop beside embeddings.
TOKENIZE_AT_ONCE = 2
# Bodies up to this size are tokenized and written in a few milliseconds, whatever others do.
SHORT_BYTES = 4096
# When those who find no place may come back.
TOKENIZE_RETRY_S = 1.0
_TOKENIZE_DECODER = BodyDecoder(TokenizeRequest, LargeTokenizeRequest)
# Where an error leaves its reason in the state of a request's scope.
_REASON = "embedsvc.reason"
_ERROR_OF_STATUS: dict[int, type[RequestError]] = {
    404: RouteNotFound,
    405: MethodNotAllowed,
    413: BodyTooLarge,
}


@readable("/v1/models")
async def list_models(request: AnyRequest, service: ServiceOfApp) -> Response[dict[str, Any]]:
    """List the names clients may use as `model`."""
    _need_key(request, service)
    data = [_model_object(entry) for entry in service.catalog()]
    return _reply(request, {"object": "list", "data": data})


@readable("/v1/models/{model_id:path}")
async def retrieve_model(
    request: AnyRequest, model_id: FromPath[str], service: ServiceOfApp
) -> Response[dict[str, Any]]:
    """Describe one model; a slash in its name may come raw or as %2F.

    Raises:
        ModelNotFound: no model has this name.
    """
    _need_key(request, service)
    wanted = model_id.removeprefix("/")
    catalog = service.catalog()
    for entry in catalog:
        if entry.id == wanted:
            return _reply(request, _model_object(entry))
    served = ", ".join(entry.id for entry in catalog)
    raise ModelNotFound(
        f"The model '{wanted[:200]}' does not exist. Served: {served}.", param="model"
    )


@post("/tokenize", status_code=200)
async def tokenize(request: AnyRequest, service: ServiceOfApp) -> Response[bytes]:
    """Return the tokens of texts, as the model would see them.

    Raises:
        RequestError: the answer the client gets instead.
    """
    _need_key(request, service)
    if not service.accepting:
        raise not_ready(service)
    limits = service.config.server
    headers = dict(request.scope["headers"])
    stated_s = stated_timeout_s(headers, limits.max_timeout_s)
    deadline = monotonic() + time_s(limits, stated_s)
    client = client_of(request.scope)
    room: Room = request.app.state.room
    with room.share(limits.max_body_bytes) as share:
        body = await read_body(headers, request.receive, share)
        async with _place(request.app.state.tokenizing, len(body)):
            work = _tokens(body, service, deadline)
            if client is None:
                written = await until_disconnect(request.receive, work)
            else:
                written = await until_gone(client, work)
    return Response(written, media_type=MediaType.JSON, headers=_id_header(request))


@asynccontextmanager
async def _place(places: asyncio.Semaphore, n_bytes: int) -> AsyncIterator[None]:
    """Hold one of the few places of those who tokenize; short bodies need none."""
    if n_bytes <= SHORT_BYTES:
        yield
        return
    if places.locked():
        raise Overloaded(
            f"At most {TOKENIZE_AT_ONCE} long requests are tokenized at once; send this one again.",
            retry_after_s=TOKENIZE_RETRY_S,
        )
    async with places:
        yield


async def _tokens(body: bytes | bytearray, service: Service, deadline: float) -> bytes:
    """Return the reply to a body, whose texts are tokenized and written until the deadline."""
    limits = service.config.server
    asked = await _TOKENIZE_DECODER.decode(body, limits)
    model = model_name(asked.model, default_model(service))
    inputs = texts(asked)
    _check_size(inputs, texts_field(asked), limits)

    async def write() -> bytes:
        tokenized = await service.tokenize(
            model,
            inputs,
            prompt_name=asked.prompt_name,
            add_special_tokens=asked.add_special_tokens is not False,
        )
        written: list[bytes] = []
        for part in tokens_reply(model, tokenized):
            if written:
                await asyncio.sleep(0)
            written.append(part)
        return b"".join(written)

    return await before(deadline, write(), sum(map(len, inputs)) // CHARACTERS_PER_TOKEN)


def _check_size(inputs: list[str], field: str, limits: ServerConfig) -> None:
    if len(inputs) > limits.max_inputs:
        raise TooManyInputs(
            f"{field} has {len(inputs)} items; at most {limits.max_inputs} are allowed.",
            param=field,
        )
    characters = sum(map(len, inputs))
    if characters > limits.max_request_tokens:
        # A token has a character at least, so the answer cannot be larger than an embedding's.
        raise TooManyTokens(
            f"{field} has {characters} characters; at most {limits.max_request_tokens} are shown "
            "as tokens in one request.",
            param=field,
        )


@readable("/health/live")
async def live() -> dict[str, str]:
    """Say that the event loop runs."""
    return {"status": "live"}


@readable(["/health/ready", "/health"])
async def ready(service: ServiceOfApp, state: State) -> Response[dict[str, str]]:
    """Say whether requests are served: 200 or 503."""
    shown = "stopping" if state.draining else service.state
    is_ready = service.ready and not state.draining
    return Response({"state": shown}, status_code=200 if is_ready else 503)


@readable("/metrics")
async def metrics(state: State) -> Response[bytes]:
    """Return the metrics of all workers in Prometheus' text format, to whoever asks."""
    return Response(await state.all_metrics(), media_type=CONTENT_TYPE)


@readable("/info")
async def info(request: AnyRequest, service: ServiceOfApp, state: State) -> dict[str, Any]:
    """Describe the service and its models, and say which worker answers."""
    _need_key(request, service)
    return service.info() | {"worker": state.worker}


def _need_key(request: AnyRequest, service: Service) -> None:
    service.keys.of(presented_key(dict(request.scope["headers"])))


def answer_request_error(request: AnyRequest, error: RequestError) -> Response[bytes]:
    """Answer one of our errors."""
    return _error(request, error)


def answer_framework_error(request: AnyRequest, error: HTTPException) -> Response[bytes]:
    """Answer one of Litestar's errors: unknown path, wrong method, malformed request."""
    if error.status_code >= 500:
        return answer_bug(request, error)
    kind = _ERROR_OF_STATUS.get(error.status_code, InvalidRequest)
    where = f"{request.method} {request.scope['path'][:200]}"
    headers = [(k.lower().encode(), v.encode()) for k, v in (error.headers or {}).items()]
    return _error(request, kind(f"{error.detail}: {where}."), *headers)


def answer_bug(request: AnyRequest, error: Exception) -> Response[bytes]:
    """Answer what nobody foresaw, and log it."""
    log.error("unexpected error path=%.200r", request.scope["path"], exc_info=error)
    return _error(request, bug())


def reason_of(scope: HTTPScope) -> str:
    """Return why a request was answered as it was, as metrics name it."""
    reason: str = scope["state"].get(_REASON, "ok")
    return reason


def _error(request: AnyRequest, error: RequestError, *headers: Header) -> Response[bytes]:
    request.scope["state"][_REASON] = error.reason
    reply = error_reply(error, _request_id(request), *headers)
    return Response(
        reply.body,
        status_code=reply.status,
        headers={name.decode(): value.decode("latin-1") for name, value in reply.headers},
    )


def _reply(request: AnyRequest, content: dict[str, Any]) -> Response[dict[str, Any]]:
    return Response(content, headers=_id_header(request))


def _id_header(request: AnyRequest) -> dict[str, str]:
    name, value = _request_id(request)
    return {name.decode(): value.decode("ascii")}


def _request_id(request: AnyRequest) -> Header:
    request_ids: RequestIds = request.app.state.request_ids
    return request_ids.header(dict(request.scope["headers"]).get(b"x-request-id"))


def _model_object(entry: CatalogEntry) -> dict[str, Any]:
    return {
        "id": entry.id,
        "object": "model",
        "created": entry.created,
        "owned_by": "embedsvc",
        "root": entry.root,
    }
