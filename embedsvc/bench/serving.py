"""A server as a child process on a free port, for as long as a measurement needs it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO

from embedsvc.errors import EmbedsvcError

STOP_S = 40.0
_READY = re.compile(r"ready on http://([^\s:]+):(\d+)")


class ServerError(EmbedsvcError):
    """The server ended before it was ready."""


@dataclass(frozen=True, slots=True)
class Server:
    """A server that answers.

    Attributes:
        host: where it listens.
        port: where it listens.
        process: its process.
        ready_s: seconds from start to ready.
        banner: what it printed so far.
    """

    host: str
    port: int
    process: subprocess.Popen[str]
    ready_s: float
    banner: str

    @property
    def pid(self) -> int:
        """Id of its process."""
        return self.process.pid

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        return self.host, self.port

    @property
    def model(self) -> str:
        """Name of the served model, from the line to try in the banner of `embedsvc serve`."""
        body = self.banner.rpartition("-d '")[2].partition("'")[0]
        name: str = json.loads(body)["model"]
        return name


@contextmanager
def served(*arguments: str, log: IO[str] | None = None) -> Iterator[Server]:
    """Run `embedsvc serve` with these arguments on a free port; stop it at the end.

    Args:
        arguments: flags of `serve`; a port among them is taken.
        log: where its stderr goes instead of ours.

    Raises:
        ServerError: it ended before it was ready; its own message is on stderr.
    """
    command = [sys.executable, "-m", "embedsvc.cli", "serve", "--port", "0", *arguments]
    with running(command, log=log) as server:
        yield server


@contextmanager
def running(
    command: list[str], environment: dict[str, str] | None = None, log: IO[str] | None = None
) -> Iterator[Server]:
    """Run a command that prints `ready on http://HOST:PORT` and an empty line; stop it at the end.

    Args:
        command: run without a shell.
        environment: variables besides those of this process.
        log: where its stderr goes instead of ours.

    Raises:
        ServerError: it ended before it printed that.
    """
    started = time.perf_counter()
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
        env=os.environ | (environment or {}),
    ) as process:
        try:
            assert process.stdout is not None
            banner = _read_banner(process.stdout)
            found = _READY.search(banner)
            if found is None:
                raise ServerError(f"{' '.join(command)}: ended with status {process.wait()}")
            ready_s = time.perf_counter() - started
            yield Server(found[1], int(found[2]), process, ready_s, banner)
        finally:
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()


def _read_banner(stdout: IO[str]) -> str:
    """Read up to the last line of the banner, or to the end."""
    lines: list[str] = []
    for line in stdout:
        lines.append(line)
        if line.isspace():
            break
    return "".join(lines)
