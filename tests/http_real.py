"""A real service with weightless vectors, and gates that hold it on a request's way."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from embedsvc.config import Config, DeviceConfig, ModelConfig, ServerConfig, VersionConfig
from embedsvc.deployment import Deployment
from embedsvc.models.buffers import HostBuffer
from embedsvc.models.hashing import HashModel
from embedsvc.service import Service
from tests.http_fakes import HeardMetrics

WAIT_S = 10.0
NAME = "m"


def config_of(cache_dir: Path, **server: Any) -> Config:
    """Return one weightless model on a device that runs one batch at a time."""
    return Config(
        server=ServerConfig(port=0, cache_dir=str(cache_dir), **server),
        devices=[DeviceConfig(name="cpu", slots=1, threads_per_slot=1)],
        models=[ModelConfig(name=NAME, versions=[VersionConfig(backend="hash")])],
    )


class Gate:
    """Threads that come to it say so and wait, while it is shut."""

    def __init__(self) -> None:
        self._shut = False
        self._entered: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._permits = threading.Semaphore(0)

    def shut(self) -> None:
        """Hold who comes from now on."""
        self._shut = True

    def open(self) -> None:
        """Let everyone go on, now and later."""
        self._shut = False
        self._permits.release(1000)

    def wait(self) -> None:
        """Stand before the gate; any thread."""
        if self._shut:
            self._entered.put(None)
            assert self._permits.acquire(timeout=WAIT_S)

    async def reached(self) -> None:
        """Wait until someone stands before it."""
        await asyncio.to_thread(self._entered.get, timeout=WAIT_S)

    def before(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that waits here before it does what another one does."""

        def gated(*args: Any, **kwargs: Any) -> Any:
            self.wait()
            return call(*args, **kwargs)

        return gated


class HeldModel(HashModel):
    """A model that counts the rows it computes, behind a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = Gate()
        self.rows = 0

    def forward(self, buffer: HostBuffer, rows: int, length: int) -> None:
        """Wait at the gate, count, compute."""
        self.gate.wait()
        self.rows += rows
        super().forward(buffer, rows, length)


class RealService(Service):
    """A service whose model is a `HeldModel` and whose metrics can be waited for."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.heard = HeardMetrics()
        self.metrics = self.heard
        self.metrics.ready_from(lambda: self.ready)
        self.model = HeldModel()

    async def start(self) -> None:
        """Become ready; then change the model."""
        await super().start()
        self.deployment.engine.model = self.model

    @property
    def deployment(self) -> Deployment:
        """The only one."""
        return self._deployments[NAME]

    @property
    def idle(self) -> bool:
        """Whether all counters are back at zero."""
        queued = self.info()["models"][0]["queue"]
        engine = self.deployment.engine
        return not any(queued.values()) and engine.device.busy == 0
