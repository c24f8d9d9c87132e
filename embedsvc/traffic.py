"""Following the traffic: every few seconds, see whether other bucket edges would pay.

One task of the event loop per model with automatic buckets; the search itself runs on a thread.
"""

from __future__ import annotations

import asyncio
import logging
from time import monotonic

from embedsvc.deployment import Deployment

log = logging.getLogger(__name__)

LOOK_INTERVAL_S = 10.0


def start_following(deployment: Deployment) -> asyncio.Task[None]:
    """Follow the traffic in a task of its own; should it fail, the edges stay as they are."""
    task = asyncio.create_task(follow_traffic(deployment))
    task.add_done_callback(_log_failure)
    return task


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("bucket edges are no longer followed", exc_info=error)


async def follow_traffic(deployment: Deployment, interval_s: float = LOOK_INTERVAL_S) -> None:
    """Switch bucket edges whenever held-out texts confirm that others are cheaper."""
    refit = deployment.refit
    if refit is None:
        return
    seen, since = refit.histogram.n_seen, monotonic()
    while True:
        await asyncio.sleep(interval_s)
        n_seen, now = refit.histogram.n_seen, monotonic()
        rate, seen, since = (n_seen - seen) / (now - since), n_seen, now
        switch = await asyncio.to_thread(refit.propose, rate)
        if switch is None:
            continue
        refit.accept(switch)
        deployment.engine.set_edges(switch.edges)
        deployment.metrics.edge_switches.inc()
        deployment.metrics.edge_switch_gain.set(switch.gain)
        log.info(
            "bucket edges switched model=%s predicted_gain=%.1f%% rate=%.0f/s edges=%s former=%s",
            deployment.config.name, 100 * switch.gain, rate,
            list(switch.edges), list(switch.former),
        )  # fmt: skip
