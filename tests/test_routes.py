"""The routes beside the embeddings, and the life of the app."""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
import pytest

from embedsvc.config import Config, ServerConfig
from embedsvc.http.app import create_app
from embedsvc.http.replies import SLICE_TOKENS, tokens_reply
from embedsvc.http.routes import SHORT_BYTES, TOKENIZE_AT_ONCE
from embedsvc.service import State
from embedsvc.tokenization import Token
from tests.http_fakes import (
    MODEL,
    URL,
    FakeService,
    HeardMetrics,
    app_of,
    client_of,
    counted,
    error_of,
)
from tests.http_real import RealService, config_of
from tests.http_wire import Site

pytest_plugins = ["tests.http_fixtures"]


@pytest.mark.parametrize("path", ["/v1/models/org/model", "/v1/models/org%2Fmodel"])
async def test_models_are_listed_and_found_by_their_listed_id(
    client: httpx.AsyncClient, path: str
) -> None:
    """A slash in the id may come raw or escaped."""
    listed = (await client.get("/v1/models")).json()
    one = (await client.get(path)).json()

    assert listed["object"] == "list"
    assert listed["data"] == [one]
    assert one["id"] == MODEL
    assert one["object"] == "model"
    assert one["created"] == 1_700_000_000
    assert one["owned_by"] == "embedsvc"


@pytest.mark.parametrize("body", [{"input": "ab"}, {"inputs": ["ab"]}, {"input": ["ab"]}])
async def test_tokens_are_shown(client: httpx.AsyncClient, body: dict[str, Any]) -> None:
    """Text or texts, under either name."""
    response = await client.post("/tokenize", json=body)

    token = {"id": 1, "text": "ab", "special": False, "start": 0, "stop": 2}
    assert response.status_code == 200
    assert response.json() == {
        "model": MODEL,
        "data": [{"index": 0, "count": 1, "tokens": [token]}],
    }


@pytest.mark.parametrize("n", [0, 1, SLICE_TOKENS, 2 * SLICE_TOKENS + 1])
def test_many_tokens_are_written_as_few(n: int) -> None:
    """In slices, of which nothing is seen."""
    tokens = [Token(k, f'"{k}', False, k or None, k + 1) for k in range(n)]
    written = json.loads(b"".join(tokens_reply("a\nb", [tokens, tokens[:1]])))

    assert written == {
        "model": "a\nb",
        "data": [
            {"index": index, "count": len(part), "tokens": [asdict(token) for token in part]}
            for index, part in enumerate([tokens, tokens[:1]])
        ],
    }


async def test_few_are_tokenized_at_once(service: FakeService, client: httpx.AsyncClient) -> None:
    """The others are told when to come back; short ones need no place."""
    service.gate = asyncio.Event()
    long, short = {"input": "a" * SHORT_BYTES}, {"input": "a"}
    held = []
    for body in [long] * TOKENIZE_AT_ONCE + [short]:
        service.entered.clear()
        held.append(asyncio.create_task(client.post("/tokenize", json=body)))
        await service.entered.wait()
    refused = await client.post("/tokenize", json=long)
    service.gate.set()
    served = [*await asyncio.gather(*held), await client.post("/tokenize", json=long)]

    assert refused.status_code == 429
    assert error_of(refused)["message"].endswith("send this one again.")
    assert int(refused.headers["retry-after"]) >= 1
    assert counted(service)["429", "overloaded"] == 1
    assert [response.status_code for response in served] == [200] * (TOKENIZE_AT_ONCE + 2)


@pytest.mark.parametrize("body", [{}, {"input": [1]}, {"input": 3}, {"input": "a", "model": 3}])
async def test_bad_tokenize_requests_are_400(
    client: httpx.AsyncClient, body: dict[str, Any]
) -> None:
    """The same envelope as everywhere."""
    response = await client.post("/tokenize", json=body)

    assert response.status_code == 400
    error_of(response)


@pytest.mark.parametrize("inputs", [["a"] * 3, ["a" * 50, "b" * 51]])
@pytest.mark.parametrize("field", ["input", "inputs"])
async def test_more_texts_than_an_embedding_may_have_are_not_tokenized(
    service: FakeService, inputs: list[str], field: str
) -> None:
    """Too many of them, or too much in all: each token is a line of JSON."""
    server = ServerConfig(max_inputs=2, max_request_tokens=100)
    service.config = Config(server=server, models=service.config.models)
    async with client_of(service) as client:
        refused = await client.post("/tokenize", json={field: inputs})
        served = await client.post("/tokenize", json={field: ["a" * 50, "b" * 50]})

    assert refused.status_code == 400
    assert error_of(refused)["param"] == field
    assert served.status_code == 200


@pytest.mark.parametrize(
    ("state", "status"),
    [("ready", 200), ("loading", 503), ("restarting", 503), ("failed", 503), ("stopping", 503)],
)
async def test_readiness_follows_the_service_and_liveness_does_not(
    service: FakeService, client: httpx.AsyncClient, state: State, status: int
) -> None:
    """A probe restarts what is dead and spares what is loading."""
    service.state = state
    live = await client.get("/health/live")

    assert live.status_code == 200
    for path in ("/health/ready", "/health"):
        response = await client.get(path)
        assert response.status_code == status
        assert response.json() == {"state": state}


async def test_calls_are_looked_at_while_a_model_restarts(
    service: FakeService, client: httpx.AsyncClient
) -> None:
    """Whether they can wait for it is for the model to say; tokens need none."""
    service.state = "restarting"

    assert (await client.post(URL, json={"input": "a"})).status_code == 200
    assert (await client.post("/tokenize", json={"input": "a"})).status_code == 200


async def test_readiness_is_red_while_draining(service: FakeService) -> None:
    """Traffic goes elsewhere before the service itself stops."""
    app = app_of(service)
    app.state.draining = True
    transport = httpx.ASGITransport(app)  # type: ignore[arg-type]  # Litestar's own ASGI types
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        response = await client.get("/health/ready")
        served = await client.post(URL, json={"input": "a"})

    assert response.status_code == 503
    assert response.json() == {"state": "stopping"}
    assert served.status_code == 200


async def test_what_can_be_got_can_be_asked_for_by_its_head_alone(
    site: Site, service: FakeService
) -> None:
    """Load balancers do; they get the answer without its body, on a connection that is kept."""
    paths = {
        route.path_format.replace("{model_id}", MODEL)
        for route in app_of(service).routes
        if "GET" in (route.methods or ())
    }
    wire = await site.connect()
    for path in sorted(paths):
        wire.send(f"HEAD {path} HTTP/1.1\r\nHost: x\r\n\r\n")
        head = (await wire.reader.readuntil(b"\r\n\r\n")).decode()
        wire.send(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n")
        reply = await wire.reply()

        assert head.startswith(f"HTTP/1.1 {reply.status} ")
        assert f"content-type: {reply.headers['content-type']}" in head
        assert reply.status == 200
    assert {"/health/ready", "/v1/models", "/metrics", "/info"} <= paths


async def test_metrics_and_info_are_shown(client: httpx.AsyncClient) -> None:
    """Both come from the service as they are; the latter says which process answers."""
    await client.post(URL, json={"input": "a"})
    metrics = await client.get("/metrics")

    assert metrics.headers["content-type"].startswith("text/plain; version=0.0.4")
    counted = 'embedsvc_requests_total{reason="ok",route="/v1/embeddings",status="200"} 1.0'
    assert counted in metrics.text
    info = (await client.get("/info")).json()
    assert info == {"state": "ready", "worker": {"number": 0, "of": 1, "pid": os.getpid()}}


async def test_the_lifespan_starts_and_stops_the_service() -> None:
    """Inside it the service is ready, after it it is stopped."""
    service = FakeService()
    service.state = "loading"
    async with app_of(service).lifespan():
        inside = service.info()

    assert inside == {"state": "ready"}
    assert service.info() == {"state": "stopping"}


async def test_the_lag_of_the_event_loop_is_sampled(service: FakeService) -> None:
    """As long as the app lives, its metric is kept fresh."""
    sampled = asyncio.Event()

    class LagMetrics(HeardMetrics):
        def loop_lag(self, seconds: float) -> None:
            super().loop_lag(seconds)
            sampled.set()

    service.metrics = LagMetrics()
    async with app_of(service).lifespan():
        await sampled.wait()

    assert b"embedsvc_event_loop_lag_seconds" in service.metrics.render()


async def test_two_apps_share_nothing() -> None:
    """Each has its own service, state and ids."""
    first, second = FakeService("one"), FakeService("two")
    second.state = "loading"
    async with client_of(first) as one, client_of(second) as two:
        ok = await one.post(URL, json={"input": "a"})
        refused = await two.post(URL, json={"input": "a"})

    assert ok.status_code == 200
    assert refused.status_code == 503
    assert ok.headers["x-request-id"] != refused.headers["x-request-id"]
    assert counted(first) == {("200", "ok"): 1}
    assert counted(second) == {("503", "not_ready"): 1}


async def test_two_real_apps_live_and_end_apart(tmp_path: Path) -> None:
    """One that ends takes nothing from the other; one that never began answers at once."""
    first, second = RealService(config_of(tmp_path)), RealService(config_of(tmp_path))
    apps = create_app(first), create_app(second)
    clients = [
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")
        for app in apps
    ]

    async def statuses() -> list[int]:
        replies = [await client.post(URL, json={"input": "a"}) for client in clients]
        return [reply.status_code for reply in replies]

    async with apps[0].lifespan():
        one = await statuses()
        async with apps[1].lifespan():
            both = await statuses()
        one_again = await statuses()
    none = await statuses()

    assert [one, both, one_again, none] == [[200, 503], [200, 200], [200, 503], [503, 503]]
    assert (first.model.rows, second.model.rows) == (3, 1)
    for client in clients:
        await client.aclose()
