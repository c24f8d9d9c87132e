"""A served model's bucket edges follow the texts it gets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from embedsvc.calls import EmbedCall
from embedsvc.config import BatchingConfig
from embedsvc.engine.cost import CostModel
from embedsvc.service import Service
from embedsvc.traffic import follow_traffic
from embedsvc.tuning.refit import MIN_GAIN, Refit
from tests.test_service import NAME, make_config


@asynccontextmanager
async def serving(cache: Path, batching: BatchingConfig) -> AsyncIterator[Service]:
    service = Service(make_config(cache, batching=batching))
    await service.start()
    try:
        yield service
    finally:
        await service.stop()


async def test_edges_of_a_running_engine_follow_the_traffic(tmp_path: Path) -> None:
    """Texts keep their vectors while the edges move to where they are."""
    async with serving(tmp_path, BatchingConfig(buckets=[256], max_batch_tokens=512)) as service:
        await check_following(service)


async def check_following(service: Service) -> None:
    (deployment,) = service._deployments.values()
    former = list(deployment.engine.policy.buckets.edges)
    # Weightless batches cost next to nothing whatever their shape; these edges are for real ones.
    cost, limits = CostModel(3e-3, 1e-4, 5e-5, 4e-8), deployment.engine.policy.limits
    refit = Refit(deployment.lengths, former, cost, limits)
    priced = replace(deployment, refit=refit)

    follower = asyncio.create_task(follow_traffic(priced, interval_s=0))
    async with asyncio.timeout(10):
        while deployment.engine.policy.buckets.edges == former:
            refit.histogram.add([130, 180] * 300)
            await service.embed(EmbedCall(NAME, ["word " * 128, "word " * 178]))
    follower.cancel()

    edges = deployment.engine.policy.buckets.edges
    assert edges[-1] == 256
    assert 136 in edges
    assert refit.former == tuple(former)
    assert MIN_GAIN < gain(service) < 1


def gain(service: Service) -> float:
    """Return what the last switch saves, as operators see it."""
    (deployment,) = service._deployments.values()
    labels = {"model": NAME, "version": deployment.settings.name}
    found = service.metrics.registry.get_sample_value("embedsvc_edge_switch_gain_ratio", labels)
    assert found is not None
    return found


async def test_configured_edges_are_left_alone(tmp_path: Path) -> None:
    """A list in the configuration is the user's choice."""
    async with serving(tmp_path, BatchingConfig(buckets=[64, 256])) as service:
        (deployment,) = service._deployments.values()

        await asyncio.wait_for(follow_traffic(deployment, interval_s=0), timeout=5)

        assert deployment.refit is None
        assert gain(service) == 0
        assert deployment.engine.policy.buckets.edges == [64, 256]
