"""What a running server says of itself: its metrics, and `/info`. Event loop only."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from embedsvc.bench.connection import Connection, get

Address = tuple[str, int]

# What an idle server shows as zero.
GAUGES = (
    "embedsvc_queue_sequences",
    "embedsvc_queue_tokens",
    "embedsvc_queue_seconds",
    "embedsvc_slots_busy",
)
POLL_S = 0.02


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

    def buckets(self, name: str, **labels: str) -> dict[float, float]:
        """Return the cumulative counts of a histogram with these labels by upper bound."""
        counts: dict[float, float] = {}
        for sample in self._samples:
            if sample.name == f"{name}_bucket" and labels.items() <= sample.labels.items():
                bound = float(sample.labels["le"])
                counts[bound] = counts.get(bound, 0.0) + sample.value
        return counts

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
