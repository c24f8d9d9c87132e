"""The server under test as measurements see it: its name, its metrics, its figures against bars."""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import sys
import time
from typing import Any, NoReturn

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from embedsvc.bench.connection import Connection, get
from embedsvc.bench.serving import Server

Address = tuple[str, int]

DIM = 384
# What an idle server shows as zero.
GAUGES = (
    "embedsvc_queue_sequences",
    "embedsvc_queue_tokens",
    "embedsvc_queue_seconds",
    "embedsvc_slots_busy",
)
POLL_S = 0.02


def arguments(parser: argparse.ArgumentParser) -> tuple[argparse.Namespace, list[str]]:
    """Return the script's own arguments, and the others, which are flags of `embedsvc serve`."""
    parser.epilog = "Other flags are those of `embedsvc serve`, as --backend hash."
    return parser.parse_known_args()


def model_of(server: Server) -> str:
    """Return the served model's name from what the server printed."""
    body = server.banner.rpartition("-d '")[2].partition("'")[0]
    name: str = json.loads(body)["model"]
    return name


def raise_open_files() -> None:
    """Let this process open as many files as it may."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


# --- metrics -------------------------------------------------------------------------------------


class Samples:
    """One scrape of `/metrics`."""

    def __init__(self, text: str) -> None:
        families = text_string_to_metric_families(text)
        self._samples = [sample for family in families for sample in family.samples]

    def total(self, name: str, **labels: str) -> float:
        """Return the sum of a metric over all samples with these labels."""
        return sum(
            sample.value
            for sample in self._samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    @property
    def busy(self) -> dict[str, float]:
        """The queue's gauges that are not zero."""
        values = {name: self.total(name) for name in GAUGES}
        return {name: value for name, value in values.items() if value > 0}


async def scrape(address: Address) -> Samples:
    """Read `/metrics`."""
    return Samples((await _fetch(address, "/metrics")).decode())


async def info(address: Address) -> dict[str, Any]:
    """Read what `/info` says of the first model."""
    model: dict[str, Any] = msgspec.json.decode(await _fetch(address, "/info"))["models"][0]
    return model


async def seconds_to_idle(address: Address, limit_s: float) -> tuple[float, dict[str, float]]:
    """Wait until the queue's gauges are zero.

    Returns:
        Seconds that took, and what was not zero after `limit_s`.
    """
    began = time.perf_counter()
    while True:
        busy = (await scrape(address)).busy
        seconds = time.perf_counter() - began
        if not busy or seconds > limit_s:
            return seconds, busy
        await asyncio.sleep(POLL_S)


async def _fetch(address: Address, path: str) -> bytes:
    connection = Connection(*address)
    answer = await connection.send(get(*address, path))
    connection.close()
    if answer.status != 200:
        raise OSError(f"{path}: status {answer.status}")
    return answer.body


# --- bars ----------------------------------------------------------------------------------------


class Bars:
    """Prints measured figures beside what they must be; the exit status says whether all are."""

    def __init__(self) -> None:
        self._met = True

    def at_most(self, what: str, value: float, limit: float, unit: str = "") -> None:
        """Print a figure that must not be above its limit."""
        self._show(value <= limit, f"{what}: {value:.4g}{unit} (bar: at most {limit:g}{unit})")

    def at_least(self, what: str, value: float, limit: float, unit: str = "") -> None:
        """Print a figure that must not be below its limit."""
        self._show(value >= limit, f"{what}: {value:.4g}{unit} (bar: at least {limit:g}{unit})")

    def empty(self, what: str, things: object) -> None:
        """Print a collection that must be empty."""
        self._show(not things, f"{what}: {things or 'none'} (bar: none)")

    def exit(self) -> NoReturn:
        """End the process: status 0 where every bar is met, 1 where one is not."""
        sys.exit(not self._met)

    def _show(self, met: bool, line: str) -> None:
        self._met &= met
        print(f"{'ok  ' if met else 'MISS'} {line}", flush=True)
