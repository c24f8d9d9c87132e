"""What is learned of a server before it is measured: tokens of the texts, costs, saturation.

Everything a prediction is made of comes from here; the runs that are compared with it do not.
"""

from __future__ import annotations

import re
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import cycle, islice
from typing import Any

import msgspec
import numpy as np
import uvloop

from embedsvc.bench.connection import Connection, ReplyError, embeddings_body, post, read_reply
from embedsvc.bench.open_loop import calls_for, run_open
from embedsvc.bench.scrape import Samples, info, scrape
from embedsvc.bench.serving import Server
from embedsvc.config import BatchingConfig
from embedsvc.engine.buckets import Limits
from embedsvc.engine.correction import width_class
from embedsvc.engine.cost import CostModel, Observation, fit
from embedsvc.engine.policy import Policy
from embedsvc.errors import EmbedsvcError
from embedsvc.metrics import WIDTH_CLASS_NAMES, WIDTH_CLASSES
from embedsvc.tuning.predict import CLIENTS, Plan
from embedsvc.tuning.simulate import closed_loop

N_PROBES = 20
# Calls of clients in a closed loop that tell how many it takes for some seconds.
N_WARM_UP = 256
# Part of a saturated run in which all clients are there.
FULL = (0.25, 0.75)
TEXTS_PER_CALL = 256
ROWS = (1, 4, 16)
_INFERENCE = re.compile(rb"server-timing: .*inference;dur=([\d.]+)")


@dataclass(slots=True, frozen=True)
class Study:
    """What is known of a server.

    Attributes:
        max_length: of the model, in tokens.
        lengths: tokens of each text.
        cost: seconds that a batch keeps a slot of the loaded server, up to the next batch.
        overhead_s: seconds of a lone call that it is not on the device.
        saturation: measured texts per second of `CLIENTS` in a closed loop.
        predicted: the same, predicted.
    """

    max_length: int
    lengths: list[int]
    cost: CostModel
    overhead_s: float
    saturation: float
    predicted: float


def study(server: Server, texts: list[str], batching: BatchingConfig, seconds: float) -> Study:
    """Learn what predictions need from an idle server, which is warm afterwards.

    Args:
        server: serves one model.
        texts: one a call, in turns.
        batching: its settings.
        seconds: about how long it is saturated.

    Raises:
        EmbedsvcError: a call was not answered with vectors.
    """
    told = uvloop.run(info(server.address))
    plan = plan_of(told, batching)
    max_length = plan.limits.max_length
    lengths = uvloop.run(_lengths(server, texts, max_length))
    overhead_s = uvloop.run(_overhead_s(server, texts, told["dim"]))
    first = _saturated(server, texts, told["dim"], N_WARM_UP)
    n_calls = max(N_WARM_UP, round(first * seconds))
    pause_s, samples = _turnaround(server, texts, told["dim"], n_calls, n_calls / first, plan.slots)
    cost = corrected(CostModel(**told["cost"]), samples, max_length)
    cost = replace(cost, c0=cost.c0 + pause_s)
    measured = _saturated(server, texts, told["dim"], n_calls)
    again = islice(cycle(lengths), n_calls)
    policy = Policy(plan.edges, cost, plan.limits)
    predicted = n_calls / closed_loop(again, CLIENTS, policy, plan.slots, cost).end
    return Study(max_length, lengths, cost, overhead_s, measured, predicted)


def _turnaround(
    server: Server, texts: list[str], dim: int, n_calls: int, seconds: float, slots: int
) -> tuple[float, Samples]:
    """Saturate a server for about some seconds, from which it learns to correct its costs.

    Returns:
        The seconds that a slot is free between two batches, and the server's metrics.
    """
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(_saturated, server, texts, dim, n_calls)
        time.sleep(FULL[0] * seconds)
        before, began = uvloop.run(scrape(server.address)), time.perf_counter()
        time.sleep((FULL[1] - FULL[0]) * seconds)
        after, ended = uvloop.run(scrape(server.address)), time.perf_counter()
        run.result()
    busy_s, batches = (
        after.total(name) - before.total(name)
        for name in ("embedsvc_slot_busy_seconds_total", "embedsvc_batch_rows_count")
    )
    free_s = slots * (ended - began) - busy_s
    return max(0.0, free_s / batches) if batches else 0.0, uvloop.run(scrape(server.address))


def _saturated(server: Server, texts: list[str], dim: int, n_calls: int) -> float:
    """Return the texts per second of `CLIENTS` that each call again when they are answered."""
    calls = calls_for(*server.address, server.model, texts)
    at_once = np.zeros(n_calls)
    outcome = run_open(server.address, calls, at_once, dim=dim, n_connections=CLIENTS)
    if outcome.errors:
        raise EmbedsvcError(f"{CLIENTS} calls at once: {dict(outcome.errors)}")
    return outcome.texts_per_s


def plan_of(told: dict[str, Any], batching: BatchingConfig) -> Plan:
    """Return how a server batches, from what it says of itself and its configuration."""
    limits = Limits(
        max_length=told["max_length"],
        max_batch_tokens=told["max_batch_tokens"],
        max_batch_size=told["max_batch_size"],
        max_batch_delay_s=batching.max_batch_delay_ms / 1e3,
        max_age_s=batching.max_age_s,
    )
    return Plan(tuple(told["buckets"]), limits, told["slots"], told["threads_per_slot"])


def corrected(cost: CostModel, samples: Samples, max_length: int) -> CostModel:
    """Return a cost model times what the server's recent batches took longer than it says.

    The model is fitted before there is traffic. Clients, HTTP and tokenizing on the same cores,
    and rows copied in and out, are in the corrections only.
    """
    widths = [*(width for width in WIDTH_CLASSES if width < max_length), max_length]
    batches = []
    for width in widths:
        name = WIDTH_CLASS_NAMES[width_class(width)]
        factor = samples.total("embedsvc_cost_correction", width=name, quantile="0.5")
        batches += [Observation(rows, width, cost(rows, width) * factor) for rows in ROWS]
    return replace(fit(batches, floor=cost.floor > 0), cold=cost.cold)


async def _lengths(server: Server, texts: list[str], max_length: int) -> list[int]:
    """Return the tokens of each text as served."""
    connection = Connection(*server.address)
    lengths: list[int] = []
    for start in range(0, len(texts), TEXTS_PER_CALL):
        asked = {"model": server.model, "input": texts[start : start + TEXTS_PER_CALL]}
        request = post(*server.address, "/tokenize", msgspec.json.encode(asked))
        answer = await connection.send(request)
        if answer.status != 200:
            raise ReplyError(f"/tokenize: status {answer.status}: {answer.body!r:.200}")
        data = msgspec.json.decode(answer.body)["data"]
        lengths += [min(one["count"], max_length) for one in data]
    connection.close()
    return lengths


async def _overhead_s(server: Server, texts: list[str], dim: int) -> float:
    """Return the median seconds of lone calls that they are not on the device."""
    connection = Connection(*server.address)
    overheads = []
    for text in texts[:N_PROBES]:
        request = post(*server.address, "/v1/embeddings", embeddings_body(server.model, [text]))
        began = time.perf_counter()
        answer = await connection.send(request)
        seconds = time.perf_counter() - began
        inference = _INFERENCE.search(answer.head)
        if answer.status != 200 or inference is None:
            raise ReplyError(f"status {answer.status}: {answer.body!r:.200}")
        read_reply(answer.body, 1, dim)
        overheads.append(seconds - float(inference[1]) / 1e3)
    connection.close()
    return statistics.median(overheads)
