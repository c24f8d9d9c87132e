"""The limit of a model on this machine: length-sorted batches, all slots busy, no HTTP, no queue.

Same model, backend, device slots and batch limits as a server with the same configuration would
use, so that served tokens/s divided by these is the price of serving.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from time import perf_counter

import numpy as np
from msgspec import Struct

from embedsvc.config import Config
from embedsvc.deployment import Deployment, deploy
from embedsvc.engine.buckets import Limits, padded_width
from embedsvc.engine.devices import Devices
from embedsvc.engine.engine import Engine
from embedsvc.metrics import Metrics
from embedsvc.models.buffers import BufferPool
from embedsvc.tokenization import Encoded

# Positions of the texts of a batch, and its padded width in tokens.
Rows = tuple[list[int], int]


class OfflineResult(Struct, frozen=True):
    """What a run did.

    Attributes:
        texts: texts embedded.
        tokens: their tokens, special tokens included, after truncation.
        seconds: from the first batch to the last; loading and tokenizing are not in it.
        texts_per_s: texts per second.
        tokens_per_s: tokens per second, padding not counted.
        padding: share of the computed tokens that were padding.
        batches: how many.
        tokenize_s: seconds the tokenizer took before, in one thread.
        model: public name.
        device: where it ran.
        dtype: precision of the matrix products.
        slots: batches at once.
        threads_per_slot: CPU threads of one batch.
        max_batch_tokens: padded tokens a batch may have.
    """

    texts: int
    tokens: int
    seconds: float
    texts_per_s: float
    tokens_per_s: float
    padding: float
    batches: int
    tokenize_s: float
    model: str
    device: str
    dtype: str
    slots: int
    threads_per_slot: int
    max_batch_tokens: int


def run_offline(config: Config, texts: list[str]) -> OfflineResult:
    """Load the first model of the configuration and embed all texts once.

    Raises:
        StartError: the model cannot be served.
    """
    devices = Devices(config)
    try:
        deployment = deploy(config.models[0], "models[0]", config, devices, Metrics())
        try:
            return _measure(deployment, texts)
        finally:
            deployment.engine.model.close()
    finally:
        devices.close()


def _measure(deployment: Deployment, texts: list[str]) -> OfflineResult:
    engine = deployment.engine
    began = perf_counter()
    encoded = deployment.tokenizer.encode(
        texts, truncate=deployment.settings.truncate, prompt=deployment.prompt(None)
    )
    tokenize_s = perf_counter() - began
    batches = sorted_batches([len(one.ids) for one in encoded], engine.policy.limits)
    seconds = _run(engine, encoded, batches)
    tokens = sum(len(one.ids) for one in encoded)
    computed = sum(len(rows) * width for rows, width in batches)
    return OfflineResult(
        texts=len(texts),
        tokens=tokens,
        seconds=round(seconds, 6),
        texts_per_s=round(len(texts) / seconds, 1),
        tokens_per_s=round(tokens / seconds, 1),
        padding=round(1 - tokens / computed, 4),
        batches=len(batches),
        tokenize_s=round(tokenize_s, 6),
        model=deployment.config.name,
        device=engine.model.device,
        dtype=engine.model.dtype,
        slots=engine.device.slots,
        threads_per_slot=engine.device.threads_per_slot,
        max_batch_tokens=engine.policy.limits.max_batch_tokens,
    )


def _run(engine: Engine, encoded: Sequence[Encoded], batches: list[Rows]) -> float:
    """Put every batch through the device threads; return the seconds it took."""
    limits = engine.policy.limits
    capacity = max(limits.max_batch_tokens, limits.max_length)
    allocate = partial(engine.model.allocate, capacity, limits.max_batch_size)
    pool = BufferPool(allocate, engine.device.slots)

    def run(rows: list[int], width: int) -> None:
        buffer = pool.take()
        buffer.fill(
            [encoded[row].ids for row in rows], [encoded[row].prompt_length for row in rows], width
        )
        engine.model.forward(buffer, len(rows), width)
        pool.put(buffer)

    began = perf_counter()
    runs: list[Future[None]] = [engine.device.submit(run, *batch) for batch in batches]
    for one in runs:
        one.result()
    return perf_counter() - began


def sorted_batches(lengths: Sequence[int], limits: Limits) -> list[Rows]:
    """Return batches as positions and padded width, the longest texts first.

    Longest first, so that the last batches are the shortest and all slots end together.
    """
    order = np.argsort(-np.asarray(lengths), kind="stable").tolist()
    batches = []
    start = 0
    while start < len(order):
        width = padded_width(lengths[order[start]], limits.max_length)
        stop = start + limits.rows(width)
        batches.append((order[start:stop], width))
        start = stop
    return batches
