"""The price of everything but the model: requests/s over HTTP with weightless vectors.

A server with `HashModel` and a bare Litestar handler take turns in one run, each as a process of
its own, driven by `wrk`, or by this package's own connections where `wrk` is not installed.
"""

from __future__ import annotations

import asyncio
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter

import uvloop
from msgspec import Struct

from embedsvc.bench.connection import Connection, ReplyError, embeddings_body, post, read_reply
from embedsvc.bench.serving import Server, running, served
from embedsvc.config import DEFAULT_NAME
from embedsvc.errors import EmbedsvcError

DIM = 384
N_CONNECTIONS = 32
TEXT = "How do I reset the password of my account?"
WARMUP_S = 1.0


class PipelineResult(Struct, frozen=True):
    """Requests per second of both sides, and how they were driven.

    Attributes:
        client: `wrk` or `embedsvc`.
        embedsvc: requests per second of the service, one value a round.
        bare: requests per second of the bare handler, one value a round.
        ratio: median of the service divided by the median of the bare handler.
    """

    client: str
    embedsvc: list[float]
    bare: list[float]
    ratio: float


def run_pipeline(rounds: int, seconds: float) -> PipelineResult:
    """Measure both sides in turns.

    Args:
        rounds: turns of each side.
        seconds: length of one measurement.

    Raises:
        EmbedsvcError: a server did not start, or an answer was not 200 or not of the right shape.
    """
    sides: dict[str, list[float]] = {"embedsvc": [], "bare": []}
    for _ in range(rounds):
        with served("--backend", "hash", "--log-level", "warning") as server:
            sides["embedsvc"].append(requests_per_s(server, seconds))
        with running([sys.executable, "-m", "embedsvc.bench.bare", str(DIM)]) as server:
            sides["bare"].append(requests_per_s(server, seconds))
    return PipelineResult(
        client="wrk" if shutil.which("wrk") else "embedsvc",
        embedsvc=sides["embedsvc"],
        bare=sides["bare"],
        ratio=round(statistics.median(sides["embedsvc"]) / statistics.median(sides["bare"]), 3),
    )


def requests_per_s(server: Server, seconds: float) -> float:
    """Check the shape of a reply before and after; warm up and measure in between."""
    rate = _wrk_rate if shutil.which("wrk") else _own_rate
    uvloop.run(_check(server))
    rate(server, WARMUP_S)
    measured = rate(server, seconds)
    uvloop.run(_check(server))
    return round(measured, 1)


def _body() -> bytes:
    return embeddings_body(DEFAULT_NAME, [TEXT])


async def _check(server: Server) -> None:
    connection = Connection(*server.address)
    await _call(connection, post(*server.address, "/v1/embeddings", _body()))
    connection.close()


async def _call(connection: Connection, request: bytes) -> None:
    answer = await connection.send(request)
    if answer.status != 200:
        raise ReplyError(f"status {answer.status}: {answer.body!r:.200}")
    read_reply(answer.body, 1, DIM)


# --- wrk ----------------------------------------------------------------------------------------


def _wrk_rate(server: Server, seconds: float) -> float:
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "post.lua")
        script.write_text(
            'wrk.method = "POST"\n'
            'wrk.headers["content-type"] = "application/json"\n'
            f"wrk.body = [==[{_body().decode()}]==]\n"
        )
        url = f"http://{server.host}:{server.port}/v1/embeddings"
        command = ["wrk", "-t1", f"-c{N_CONNECTIONS}", f"-d{max(1, round(seconds))}s", "-s"]
        done = subprocess.run(
            [*command, str(script), url], capture_output=True, text=True, check=False
        )
    found = re.search(r"Requests/sec: *([\d.]+)", done.stdout)
    if found is None or "Non-2xx" in done.stdout or "Socket errors" in done.stdout:
        raise EmbedsvcError(f"wrk: {done.stdout}{done.stderr}")
    return float(found[1])


# --- own client ---------------------------------------------------------------------------------


def _own_rate(server: Server, seconds: float) -> float:
    return uvloop.run(_closed_loop(server, seconds))


async def _closed_loop(server: Server, seconds: float) -> float:
    request = post(*server.address, "/v1/embeddings", _body())
    began = perf_counter()
    n_answers = 0

    async def client() -> None:
        nonlocal n_answers
        connection = Connection(*server.address)
        while perf_counter() < began + seconds:
            await _call(connection, request)
            n_answers += 1
        connection.close()

    await asyncio.gather(*(client() for _ in range(N_CONNECTIONS)))
    return n_answers / (perf_counter() - began)
