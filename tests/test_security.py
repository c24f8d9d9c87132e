"""What SECURITY.md promises and no other test shows; and that the tests it names are there."""

from __future__ import annotations

import ast
import logging
import re
import sys
from collections.abc import Iterator
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import httpx
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from embedsvc.calls import CatalogEntry
from embedsvc.errors import ModelError
from embedsvc.http.app import create_app
from embedsvc.models.source import load_tokenizer, resolve
from tests.http_fakes import URL, FakeService, app_of, client_of
from tests.http_real import RealService, config_of
from tests.http_wire import Site, post
from tests.tiny_tokenizers import save_kind

pytest_plugins = ["tests.http_fixtures"]

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "SECURITY.md").read_text()
# Stands for whatever a client would not want to see elsewhere.
SECRET = "s3cr3t-of-the-client"


# --- the page ------------------------------------------------------------------------------------


def named_in(path: Path) -> set[str]:
    """Return the names of the test functions of a file."""
    tree = ast.parse(path.read_text())
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    return {function.name for function in functions if function.name.startswith("test_")}


def test_every_test_that_the_page_names_exists() -> None:
    """Each threat has one at least."""
    named = re.findall(r"`(test_\w+\.py)::(\w+)`", PAGE)
    lost = [(file, name) for file, name in named if name not in named_in(ROOT / "tests" / file)]
    threats = [part.partition("\n## ")[0] for part in PAGE.split("\n### ")[1:]]

    assert lost == []
    assert len(threats) >= 15
    assert [threat for threat in threats if "::test_" not in threat] == []
    assert PAGE.count("::test_") == len(named), "a test is named in another form"


# --- requests lead nowhere -----------------------------------------------------------------------

REACHING_OUT = {"socket.connect", "socket.getaddrinfo", "subprocess.Popen", "os.system", "os.exec"}
FILE = "/etc/passwd"


class Audit:
    """What this process reaches out to, while somebody listens."""

    def __init__(self) -> None:
        self.listening = False
        self.events: list[str] = []

    def hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Keep an event of the interpreter."""
        if self.listening and (event in REACHING_OUT or (event, *arguments[:1]) == ("open", FILE)):
            self.events.append(event)


@cache
def audit() -> Audit:
    """Return the process's only one: what is hooked in cannot be taken out again."""
    audit = Audit()
    sys.addaudithook(audit.hear)
    return audit


@pytest.mark.parametrize(
    "address", ["http://127.0.0.1:9/x", "https://example.org/a.png", f"file://{FILE}", FILE]
)
async def test_no_address_in_a_request_is_followed(tmp_path: Path, address: str) -> None:
    """As text or as model, in fields and headers, it is a string like any other."""
    service = RealService(config_of(tmp_path))
    await service.start()
    headers = {"referer": address, "x-forwarded-host": address, "host": "evil.example"}
    bodies: list[dict[str, Any]] = [
        {"input": address},
        {"input": [address, {"image_url": address}]},
        {"input": address, "model": address},
        {"input": address, "prompt_name": address},
        {"input": address, "url": address, "user": address},
    ]
    transport = httpx.ASGITransport(create_app(service))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        audit().listening = True
        replies = [await client.post(URL, json=body, headers=headers) for body in bodies]
        replies.append(await client.post("/tokenize", json={"input": address}, headers=headers))
        replies.append(await client.get(f"/v1/models/{address}", headers=headers))
        audit().listening = False
    await service.stop()

    assert audit().events == []
    assert [reply.status_code for reply in replies] == [200, 400, 404, 400, 200, 200, 404]
    assert all("location" not in reply.headers for reply in replies)
    assert all("evil.example" not in str(reply.headers) + reply.text for reply in replies)


# --- what others get to see ----------------------------------------------------------------------


async def test_metrics_hold_nothing_of_what_clients_write(
    client: httpx.AsyncClient, service: FakeService
) -> None:
    """Labels come from the configuration, so that there can be no more of them either."""
    headers = {"x-request-id": SECRET, "authorization": f"Bearer {SECRET}", "user-agent": SECRET}
    for body in (
        {"input": SECRET},
        {"input": "a", "model": SECRET},
        {"input": "a", "task": SECRET},
    ):
        await client.post(URL, json=body, headers=headers)
    await client.get(f"/{SECRET}", headers=headers)
    await client.get(f"/v1/models/{SECRET}", headers=headers)
    await client.request(SECRET.upper(), URL, headers=headers)

    assert SECRET not in (await client.get("/metrics")).text.lower()


@pytest.mark.parametrize("error", [None, RuntimeError("broken")])
async def test_the_log_holds_neither_texts_nor_headers(
    service: FakeService, caplog: pytest.LogCaptureFixture, error: Exception | None
) -> None:
    """At its most talkative, whatever becomes of the request."""
    caplog.set_level(logging.DEBUG)
    service.error = error
    secrets = {"authorization": f"Bearer {SECRET}", "api-key": SECRET, "cookie": SECRET}
    async with client_of(service) as client:
        replies = [
            await client.post(URL, json={"input": [SECRET]}, headers=secrets),
            await client.post(URL, content=f'{{"input":"{SECRET}'.encode(), headers=secrets),
            await client.post(URL, json={"input": [SECRET, 3]}, headers=secrets),
            await client.post("/tokenize", json={"input": 3, "zzz": SECRET}, headers=secrets),
            await client.get("/v1/models", headers=secrets),
        ]

    assert SECRET not in caplog.text
    assert all(SECRET not in str(reply.headers) + reply.text for reply in replies)


class BrokenCatalog(FakeService):
    """A service with a bug where a client names a model."""

    def catalog(self) -> list[CatalogEntry]:
        """Fail."""
        raise RuntimeError("broken")


async def test_a_path_cannot_forge_lines_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """It is told where something unforeseen happens."""
    async with client_of(BrokenCatalog()) as client:
        reply = await client.get("/v1/models/a%0A2026-01-01%20INFO%20b%1B[2J" + "c" * 999)

    assert reply.status_code == 500
    (message,) = [m for m in caplog.messages if m.startswith("unexpected")]
    assert message.isprintable()
    assert len(message) < 300


@pytest.mark.parametrize("sent", ["a b", "a\tb", "\xe9", ""])
async def test_request_ids_that_are_not_plain_are_not_repeated(site: Site, sent: str) -> None:
    """They would come back in headers, and stand in the log beside other words."""
    wire = await site.connect()
    wire.send(post(headers=f"X-Request-Id: {sent}\r\n"))
    reply = await wire.reply()

    assert reply.headers["x-request-id"].startswith("req_")


async def test_browsers_are_not_let_in_from_other_pages(client: httpx.AsyncClient) -> None:
    """A page may send, but reads nothing, and cannot send a key."""
    headers = {"origin": "https://evil.example", "access-control-request-method": "POST"}
    replies = [
        await client.post(URL, json={"input": "a"}, headers=headers),
        await client.options(URL, headers=headers),
        await client.options("/tokenize", headers=headers),
    ]

    for reply in replies:
        assert not [name for name in reply.headers if name.startswith("access-control-")]


def test_there_are_these_routes_and_no_others(service: FakeService) -> None:
    """Nothing changes a running server by HTTP: a new route belongs on the page."""
    paths = {route.path_format for route in app_of(service).routes}

    assert paths == {
        "/embeddings", "/health", "/health/live", "/health/ready", "/info", "/metrics", "/tokenize",
        "/v1/embeddings", "/v1/models", "/v1/models/{model_id}",
    }  # fmt: skip


# --- models --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["modules.json", "config.json", "tokenizer.json", "model.safetensors"]
)
def test_a_link_out_of_a_models_folder_shows_nothing_of_its_target(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Links are followed, as the Hub's own cache needs it; what they lead to must be a model's."""
    folder = save_kind(tmp_path / "model", "wordpiece")
    target = tmp_path / "elsewhere"
    target.write_text(f"{SECRET}\n{SECRET}\n")
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(target)

    with pytest.raises(ModelError) as refused:
        load_tokenizer(resolve(str(folder)))
    assert SECRET not in str(refused.value) + caplog.text


# --- dependencies --------------------------------------------------------------------------------


def required(name: str, extras: frozenset[str]) -> Iterator[tuple[str, frozenset[str]]]:
    """Yield the requirements of an installed distribution that hold here."""
    for line in metadata.requires(name) or ():
        requirement = Requirement(line)
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": e}) for e in (*extras, "")):
            yield canonicalize_name(requirement.name), frozenset(requirement.extras)


def test_every_dependency_is_pinned_and_the_pins_are_used() -> None:
    """Of dependencies too; what is tested is what is installed."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = {canonicalize_name(line.partition("==")[0]) for line in lines if "==" in line}
    found: set[tuple[str, frozenset[str]]] = set()
    waiting = {("embedsvc", frozenset({"dev"}))}
    while waiting:
        found |= waiting
        waiting = {one for each in waiting for one in required(*each)} - found

    # pip's own tools come with Python or are isolated from what they build.
    assert {name for name, _ in found} - {"embedsvc", "setuptools"} <= pins
    for user in ("Containerfile", "Makefile", "README.md"):
        assert "-c constraints.txt" in (ROOT / user).read_text()
