"""Fixtures of the tests that talk HTTP to a fake service."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest

from tests.http_fakes import FakeService, client_of
from tests.http_wire import Site, serving


@pytest.fixture
def service() -> FakeService:
    """Return a ready service of one model."""
    return FakeService()


@pytest.fixture
async def client(service: FakeService) -> AsyncIterator[httpx.AsyncClient]:
    """Yield a client of the service's app."""
    async with client_of(service) as client:
        yield client


@pytest.fixture
async def site(service: FakeService) -> AsyncIterator[Site]:
    """Yield a listening server of the service."""
    async with serving(service) as site:
        yield site
