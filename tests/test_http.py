"""The HTTP layer in front of a fake service: what comes out, how it fails, who leaves."""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
import logging
from collections.abc import AsyncIterator
from typing import Any

import httpx
import numpy as np
import pytest

from embedsvc.errors import (
    BodyTooLarge,
    ClientGone,
    DeadlineExceeded,
    InferenceFailed,
    InputTooLong,
    InternalError,
    InvalidRequest,
    MethodNotAllowed,
    ModelNotFound,
    NotReady,
    Overloaded,
    RequestError,
    RouteNotFound,
    TooManyInputs,
    TooManyTokens,
    UnsupportedEncoding,
)
from embedsvc.http.exchange import Client
from embedsvc.http.protocol import until_gone
from embedsvc.http.replies import SLICE_VALUES
from tests.http_fakes import (
    DIM,
    MAX_BODY_BYTES,
    URL,
    FakeService,
    app_of,
    body_message,
    client_of,
    counted,
    drive,
    error_of,
    http_scope,
)

pytest_plugins = ["tests.http_fixtures"]


# --- replies -------------------------------------------------------------------------------------


async def test_float_and_base64_carry_the_same_float32(client: httpx.AsyncClient) -> None:
    """Both read back as exactly the vector that was computed."""
    floats = await client.post(URL, json={"input": ["a", "b"]})
    encoded = await client.post(URL, json={"input": ["a", "b"], "encoding_format": "base64"})

    expected = np.full(DIM, np.float32(1) + np.float32(1 / 3), np.float32)
    raw = base64.b64decode(encoded.json()["data"][1]["embedding"], validate=True)
    assert len(raw) == 4 * DIM
    assert np.array_equal(np.frombuffer(raw, "<f4"), expected)
    assert np.array_equal(np.float32(floats.json()["data"][1]["embedding"]), expected)


async def test_the_reply_has_openais_shape(client: httpx.AsyncClient) -> None:
    """Object, data, model as requested, and both counts of usage."""
    response = await client.post(URL, json={"model": "any-name", "input": ["a", "b"]})

    reply = response.json()
    assert set(reply) == {"object", "data", "model", "usage"}
    assert reply["object"] == "list"
    assert [d["object"] for d in reply["data"]] == ["embedding", "embedding"]
    assert reply["model"] == "any-name"
    assert reply["usage"] == {"prompt_tokens": 14, "total_tokens": 14}
    assert int(response.headers["content-length"]) == len(response.content)


async def test_a_large_reply_leaves_turns_to_others(service: FakeService) -> None:
    """Rows are written in order, slice by slice, with a turn of the event loop between slices."""
    n_slices = 20
    service.dim = SLICE_VALUES // 4

    async def turns_during(n_inputs: int) -> tuple[int, list[Any]]:
        request = asyncio.create_task(
            drive(service, http_scope(), [body_message({"input": ["a"] * n_inputs})])
        )
        turns = 0
        while not request.done():
            turns += 1
            await asyncio.sleep(0)
        return turns, await request

    few, _ = await turns_during(4)
    many, sent = await turns_during(4 * n_slices)

    data = json.loads(b"".join(message["body"] for message in sent[1:]))["data"]
    assert many >= few + n_slices - 1
    assert [d["index"] for d in data] == list(range(4 * n_slices))
    assert [int(d["embedding"][0]) for d in data] == list(range(4 * n_slices))


async def test_headers_tell_id_times_and_version(
    client: httpx.AsyncClient, service: FakeService
) -> None:
    """Each reply says where its time went and who computed it."""
    service.n_truncated = 2
    headers = (await client.post(URL, json={"input": ["a"]})).headers

    assert headers["server-timing"] == "tokenize;dur=1.00, queue;dur=2.00, inference;dur=3.00"
    assert headers["x-embedsvc-version"] == "v1"
    assert headers["x-embedsvc-truncated"] == "2"
    assert headers["openai-processing-ms"].isdigit()
    assert headers["x-request-id"].startswith("req_")


async def test_nothing_is_said_of_truncation_where_nothing_was_cut(
    client: httpx.AsyncClient,
) -> None:
    """The header appears only where a text lost an end."""
    headers = (await client.post(URL, json={"input": ["a"]})).headers

    assert "x-embedsvc-truncated" not in headers


@pytest.mark.parametrize("path", [URL, "/nowhere", "/v1/models"])
async def test_sane_request_ids_are_echoed(client: httpx.AsyncClient, path: str) -> None:
    """The client's id comes back on replies and errors; others are replaced by a fresh one."""
    own = await client.get(path, headers={"x-request-id": "abc-123"})
    long = await client.get(path, headers={"x-request-id": "x" * 129})
    none = await client.get(path)

    assert own.headers["x-request-id"] == "abc-123"
    assert long.headers["x-request-id"].startswith("req_")
    assert none.headers["x-request-id"] != long.headers["x-request-id"]


@pytest.mark.parametrize("path", ["/embeddings", "/v1/embeddings/", "//v1//embeddings"])
async def test_other_spellings_of_the_path_answer_without_redirect(
    client: httpx.AsyncClient, path: str
) -> None:
    """A redirect would lose the body."""
    response = await client.post(f"http://test{path}", json={"input": "a"})

    assert response.status_code == 200


# --- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind",
    [
        InvalidRequest, InputTooLong, TooManyTokens, TooManyInputs, ModelNotFound, RouteNotFound,
        MethodNotAllowed, BodyTooLarge, UnsupportedEncoding, Overloaded, InferenceFailed,
        InternalError, NotReady, DeadlineExceeded,
    ],
)  # fmt: skip
async def test_every_error_is_answered_by_its_class(
    client: httpx.AsyncClient, service: FakeService, kind: type[RequestError]
) -> None:
    """Status, type, code and retry advice come from the class, the rest from the instance."""
    service.error = kind("what went wrong", param="input", retry_after_s=2.5)
    response = await client.post(URL, json={"input": "a"})

    assert response.status_code == kind.status
    assert error_of(response) == {
        "message": "what went wrong",
        "type": kind.type,
        "param": "input",
        "code": kind.code,
    }
    assert response.headers.get("x-should-retry") == (
        None if kind.should_retry is None else str(kind.should_retry).lower()
    )
    assert counted(service) == {(str(kind.status), kind.reason): 1}


@pytest.mark.parametrize(
    ("wait_s", "seconds", "milliseconds"),
    [(0.0, "1", "1"), (0.2, "1", "200"), (2.5, "3", "2500"), (1000.0, "60", "60000")],
)
async def test_waits_are_whole_seconds_that_every_client_honours(
    client: httpx.AsyncClient, service: FakeService, wait_s: float, seconds: str, milliseconds: str
) -> None:
    """Clients ignore or obey blindly what is beyond a minute."""
    service.error = Overloaded("full", retry_after_s=wait_s)
    headers = (await client.post(URL, json={"input": "a"})).headers

    assert headers["retry-after"] == seconds
    assert headers["retry-after-ms"] == milliseconds


async def test_an_unforeseen_error_is_logged_and_answered(
    client: httpx.AsyncClient, service: FakeService, caplog: pytest.LogCaptureFixture
) -> None:
    """A bug is 500 in the envelope; its text stays in the log."""
    service.error = ZeroDivisionError("secret")
    with caplog.at_level(logging.ERROR):
        response = await client.post(URL, json={"input": "a"})

    assert response.status_code == 500
    assert "secret" not in error_of(response)["message"]
    assert "ZeroDivisionError: secret" in caplog.text
    assert counted(service) == {("500", "internal"): 1}


@pytest.mark.parametrize("path", ["/nowhere", "/v1/v1/embeddings", "/", "/v1/models/org/none"])
async def test_unknown_paths_and_models_are_404(client: httpx.AsyncClient, path: str) -> None:
    """Litestar's own errors come in the envelope, too."""
    response = await client.get(path)

    assert response.status_code == 404
    assert error_of(response)["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [("GET", URL, "POST"), ("DELETE", "/v1/models", "GET"), ("GET", "/tokenize", "POST")],
)
async def test_wrong_methods_are_405_and_name_the_right_one(
    client: httpx.AsyncClient, method: str, path: str, allowed: str
) -> None:
    """The Allow header is what HTTP demands of a 405."""
    response = await client.request(method, path)

    error_of(response)
    assert response.status_code == 405
    assert allowed in response.headers["allow"]


@pytest.mark.parametrize("path", [URL, "/tokenize"])
async def test_a_service_that_is_not_ready_answers_at_once(path: str) -> None:
    """Without lifespan or while loading, a client is told when to come back, and never hangs."""
    service = FakeService()
    service.state = "loading"
    async with client_of(service) as client:
        response = await client.post(path, json={"input": "a"})

    assert response.status_code == 503
    assert error_of(response)["code"] == "not_ready"
    assert int(response.headers["retry-after"]) >= 1


# --- bodies --------------------------------------------------------------------------------------


async def chunks(*parts: bytes) -> AsyncIterator[bytes]:
    """Yield parts of a body without a declared length."""
    for part in parts:
        yield part


async def test_a_body_in_many_chunks_is_read_whole(
    client: httpx.AsyncClient, service: FakeService
) -> None:
    """One byte a chunk or one large chunk makes no difference."""
    body = json.dumps({"input": "chunked"}).encode()
    response = await client.post(URL, content=chunks(*(bytes([b]) for b in body)))

    assert response.status_code == 200
    assert service.calls[0].inputs == ["chunked"]


@pytest.mark.parametrize("declared", [True, False])
async def test_a_large_body_is_413(client: httpx.AsyncClient, declared: bool) -> None:
    """Whether its length is declared or not, it is read no further than needed."""
    body = json.dumps({"input": "x" * MAX_BODY_BYTES}).encode()
    response = await client.post(URL, content=body if declared else chunks(body[:9], body[9:]))

    assert response.status_code == 413
    assert str(MAX_BODY_BYTES) in error_of(response)["message"]


async def test_a_client_that_waits_for_a_word_is_answered_without_its_body() -> None:
    """After Expect: 100-continue the refusal comes before the upload."""
    scope = http_scope(("content-length", str(MAX_BODY_BYTES + 1)), ("expect", "100-continue"))
    sent = await drive(FakeService(), scope, [])

    assert sent[0]["status"] == 413


@pytest.mark.parametrize("path", [URL, "/tokenize"])
@pytest.mark.parametrize("encoding", ["gzip", "x-gzip", "br", "zstd", "deflate", "gzip, identity"])
async def test_packed_bodies_are_415(
    client: httpx.AsyncClient, service: FakeService, path: str, encoding: str
) -> None:
    """Unread, so that nothing can unpack to any size; the client learns what to send instead."""
    bomb = gzip.compress(b'{"input":"a"}')
    response = await client.post(path, content=bomb, headers={"content-encoding": encoding})

    assert response.status_code == 415
    assert "without Content-Encoding" in error_of(response)["message"]
    assert service.calls == []


async def test_a_body_that_is_said_to_be_as_it_is_is_read(client: httpx.AsyncClient) -> None:
    """That is what `identity` says."""
    headers = {"content-encoding": "identity"}

    assert (await client.post(URL, json={"input": "a"}, headers=headers)).status_code == 200


# --- clients that leave --------------------------------------------------------------------------


async def test_the_call_is_cancelled_when_the_client_leaves(service: FakeService) -> None:
    """Work for a closed connection ends at once, is counted, and answers nobody."""
    service.gate, left = asyncio.Event(), asyncio.Event()
    request = asyncio.create_task(
        drive(service, http_scope(), [body_message({"input": "a"})], left)
    )
    await service.entered.wait()
    left.set()

    assert await request == []
    assert service.cancelled.is_set()
    assert counted(service) == {("499", ClientGone.reason): 1}


async def test_a_client_that_leaves_during_its_upload_is_no_error(service: FakeService) -> None:
    """Half a body is neither 400 nor 500."""
    left = asyncio.Event()
    left.set()
    sent = await drive(service, http_scope(), [body_message({}, more=True)], left)

    assert sent == []
    assert service.calls == []
    assert counted(service) == {("499", ClientGone.reason): 1}


async def test_a_client_that_leaves_during_the_reply_is_no_error(service: FakeService) -> None:
    """Servers say so by an error from `send`."""

    async def receive() -> Any:
        if not service.calls:
            return body_message({"input": "a"})
        return await asyncio.get_running_loop().create_future()

    async def send(message: Any) -> None:
        raise ConnectionResetError

    await app_of(service)(http_scope(), receive, send)

    assert counted(service) == {("200", "ok"): 1}


async def test_cancelling_the_handler_is_not_mistaken_for_a_client_that_left(
    service: FakeService,
) -> None:
    """A server that cancels its tasks at shutdown gets its cancellation back."""
    service.gate = asyncio.Event()
    request = asyncio.create_task(drive(service, http_scope(), [body_message({"input": "a"})]))
    await service.entered.wait()
    request.cancel()

    with pytest.raises(asyncio.CancelledError):
        await request
    assert service.cancelled.is_set()


async def test_nothing_is_begun_for_a_client_that_is_gone_already() -> None:
    """It may leave while its body is unpacked."""
    client, begun = Client(), False

    async def work() -> None:
        nonlocal begun
        begun = True

    client.leave()
    with pytest.raises(ClientGone):
        await until_gone(client, work())

    assert not begun
