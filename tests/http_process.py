"""Servers in processes of their own, in modes that tests of their ends and limits need."""

from __future__ import annotations

import asyncio
import gc
import logging
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import cast

from embedsvc.calls import EmbedCall, Embedded
from embedsvc.config import Config, ServerConfig
from embedsvc.errors import ModelError, NotReady, StartError
from embedsvc.http.server import serve
from embedsvc.service import Service
from tests.http_fakes import FakeService
from tests.http_real import RealService, config_of


class Process:
    """A server in a process of its own, seen from its parent."""

    def __init__(self, mode: str, port: int = 0) -> None:
        self.child = subprocess.Popen(
            [sys.executable, "-m", "tests.http_process", mode, str(port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def line(self, start: str) -> str:
        """Return the next line that begins like this."""
        assert self.child.stdout is not None
        for line in self.child.stdout:
            if line.startswith(start):
                return line.strip()
        raise AssertionError(f"the process ended without saying {start!r}")

    def address(self) -> tuple[str, int]:
        """Wait until it is ready; return its address."""
        host, port = self.line("ready on http://").removeprefix("ready on http://").split(":")
        return host, int(port)

    def release(self) -> None:
        """Let the calls go on."""
        assert self.child.stdin is not None
        self.child.stdin.write("\n")
        self.child.stdin.flush()


SHORT_S = 0.05
SETTINGS: dict[str, dict[str, float]] = {
    "impatient": {"drain_timeout_s": SHORT_S},
    "stuck": {"drain_timeout_s": SHORT_S},
    "patient": {"drain_delay_s": 60.0},
    "hasty": {
        "header_timeout_s": SHORT_S,
        "body_timeout_s": SHORT_S,
        "write_timeout_s": SHORT_S,
    },
}


class HeldService(FakeService):
    """A service in a process of its own, whose calls wait for a line on stdin or for `stop`."""

    def __init__(self, mode: str, server: ServerConfig) -> None:
        super().__init__()
        self.config = Config(server=server, models=self.config.models)
        self.state = "loading"
        self._mode = mode
        self.dim = 200_000 if mode == "hasty" else self.dim

    async def start(self) -> None:
        """Become ready, or fail, or never end, as told by the mode."""
        if self._mode == "broken":
            raise ModelError("models[0].source: no such model")
        if self._mode == "loading":
            say("loading")
            await asyncio.to_thread(threading.Event().wait)
        if self._mode not in ("free", "hasty"):
            self.gate = asyncio.Event()
            loop = asyncio.get_running_loop()
            loop.add_reader(sys.stdin.fileno(), self.gate.set)
        await super().start()

    async def stop(self, drain_timeout_s: float | None = None) -> None:
        """Refuse everyone who waits."""
        await super().stop()
        if self.gate is not None and not self.gate.is_set():
            self.error = NotReady("stopping", retry_after_s=1)
            self.gate.set()

    async def embed(self, call: EmbedCall) -> Embedded:
        """Say that a call is held, and hold it."""
        if self.gate is not None:
            say("held")
        return await super().embed(call)


class StuckService(RealService):
    """A real service in a process of its own, whose model never ends its first batch."""

    async def start(self) -> None:
        """Become ready, and say when the first batch is there."""
        await super().start()
        self.model.gate.shut()
        self._saying = asyncio.create_task(self._say_held())

    async def _say_held(self) -> None:
        await self.model.gate.reached()
        say("held")


def say(line: str) -> None:
    """Tell the parent process."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def say_ready(url: str) -> None:
    """Tell where, and how many objects garbage collections leave out."""
    say(f"spared {gc.get_freeze_count()}")
    say(f"ready on {url}")


def service_of(mode: str, port: int) -> Service:
    """Return the service of a mode, on a port or on a free one."""
    server = ServerConfig(port=port, **SETTINGS.get(mode, {}))  # type: ignore[arg-type]  # seconds
    if mode == "stuck":
        return StuckService(config_of(Path(tempfile.mkdtemp()), **SETTINGS["stuck"]))
    return cast("Service", HeldService(mode, server))


def main() -> None:
    """Serve in the mode given as argument; the log goes to stdout."""
    logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(message)s")
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    mode, port = sys.argv[1:]
    try:
        serve(service_of(mode, int(port)), on_ready=say_ready)
    except StartError as error:
        say(str(error))
        sys.exit(1)


if __name__ == "__main__":
    main()
