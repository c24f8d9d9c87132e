"""What is kept of requests that are over: counts by route, a line for the slow and the failed."""

from __future__ import annotations

import logging
import re
from math import inf

import httpx
import pytest

from embedsvc.config import Config, ServerConfig
from embedsvc.errors import (
    DeadlineExceeded,
    InferenceFailed,
    InvalidRequest,
    NotReady,
    Overloaded,
    RequestError,
)
from tests.http_fakes import URL, FakeService, client_of

pytest_plugins = ["tests.http_fixtures"]


async def logged(
    service: FakeService, caplog: pytest.LogCaptureFixture, slow_request_s: float = inf
) -> str:
    """Send one request and return what was logged of it."""
    server = ServerConfig(slow_request_s=slow_request_s)
    service.config = Config(server=server, models=service.config.models)
    with caplog.at_level(logging.WARNING):
        async with client_of(service) as client:
            await client.post(URL, json={"input": ["secret"] * 2}, headers={"x-request-id": "id-1"})
    return caplog.messages[0] if caplog.messages else ""


# --- lines ---------------------------------------------------------------------------------------


async def test_a_slow_request_has_a_line_with_its_times_and_no_text(
    service: FakeService, caplog: pytest.LogCaptureFixture
) -> None:
    """One line says where the time went."""
    line = await logged(service, caplog, slow_request_s=0.0)

    assert re.fullmatch(
        r"request id=id-1 model='org/model' status=200 reason=ok n_inputs=2 tokens=14 "
        r"tokenize_s=0\.001 queue_s=0\.002 inference_s=0\.003 total_s=\d+\.\d{3}",
        line,
    )


async def test_quick_requests_have_no_line(
    service: FakeService, caplog: pytest.LogCaptureFixture
) -> None:
    """Rates are metrics."""
    assert await logged(service, caplog) == ""


@pytest.mark.parametrize("kind", [DeadlineExceeded, InferenceFailed, ZeroDivisionError])
async def test_a_failed_request_has_a_line_however_quick(
    service: FakeService, caplog: pytest.LogCaptureFixture, kind: type[Exception]
) -> None:
    """What is not known is left out; the text of a bug is in its traceback."""
    service.error = kind("secret")
    await logged(service, caplog)
    status = kind.status if issubclass(kind, RequestError) else 500
    lines = [line for line in caplog.messages if line.startswith("request ")]

    assert len(lines) == 1
    assert f" status={status} " in lines[0]
    assert "tokens=" not in lines[0]
    assert "secret" not in lines[0]


@pytest.mark.parametrize("kind", [Overloaded, NotReady, InvalidRequest])
async def test_what_is_refused_has_no_line(
    service: FakeService, caplog: pytest.LogCaptureFixture, kind: type[RequestError]
) -> None:
    """A server that is overloaded, or loads its model again, has no time for a line each."""
    service.error = kind("no")

    assert await logged(service, caplog) == ""


async def test_what_is_refused_while_nothing_is_ready_has_no_line(
    service: FakeService, caplog: pytest.LogCaptureFixture
) -> None:
    """There may be thousands a second while a model loads."""
    service.state = "loading"

    assert await logged(service, caplog) == ""


async def test_a_model_name_cannot_forge_lines(
    service: FakeService, caplog: pytest.LogCaptureFixture
) -> None:
    """It is the only word of the client's in them."""
    service.error = DeadlineExceeded("late")
    async with client_of(service) as client:
        await client.post(URL, json={"input": "a", "model": "a\nrequest id=x " + "ü" * 999})

    assert "\n" not in caplog.messages[0]
    assert len(caplog.messages[0]) < 2000


# --- counts --------------------------------------------------------------------------------------


async def test_requests_are_counted_by_route(
    service: FakeService, client: httpx.AsyncClient
) -> None:
    """A route has one name, whatever its spelling, parameters or errors."""
    await client.post("/embeddings", json={"input": "a"})
    await client.post("http://test//v1/embeddings/", json={"input": "a"})
    await client.post("/tokenize", json={"input": "a"})
    await client.post("/tokenize", json={"input": 3})
    await client.get("/v1/models")
    await client.get("/v1/models/org/model")
    await client.get("/v1/models/org/none")
    await client.get("/nowhere")
    counts = {
        tuple(sample.labels[name] for name in ("route", "status", "reason")): sample.value
        for metric in service.metrics.registry.collect()
        for sample in metric.samples
        if sample.name == "embedsvc_requests_total"
    }

    assert counts == {
        ("/v1/embeddings", "200", "ok"): 2,
        ("/tokenize", "200", "ok"): 1,
        ("/tokenize", "400", "invalid"): 1,
        ("/v1/models", "200", "ok"): 1,
        ("/v1/models/{model_id}", "200", "ok"): 1,
        ("/v1/models/{model_id}", "404", "model_not_found"): 1,
        ("none", "404", "not_found"): 1,
    }


@pytest.mark.parametrize("path", ["/health", "/health/live", "/health/ready", "/metrics"])
async def test_probes_and_scrapes_are_not_counted(
    client: httpx.AsyncClient, service: FakeService, path: str
) -> None:
    """They would hide what users do."""
    await client.get(path)

    assert service.metrics.heard.empty()
