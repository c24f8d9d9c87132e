"""What a worker that loads says, and what becomes of one that says nothing."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from embedsvc.config import Config, ModelConfig, VersionConfig
from embedsvc.errors import StartError
from embedsvc.keys import Keys
from embedsvc.supervisor.child import LOADING_FACTOR, Child
from embedsvc.supervisor.messages import FROM_WORKER, Line, Loaded, Loading, Start, framed

pytestmark = pytest.mark.timeout(60)

# A worker may be silent for so long while it loads.
LIMIT_S = 2.0
TALKS = f"""
import socket, sys, time
supervisor = socket.socket(fileno=int(sys.argv[2]))
for _ in range(12):
    supervisor.sendall({framed(Loading())!r})
    time.sleep(0.25)
supervisor.sendall({framed(Loaded({"it": "serves"}))!r})
"""
HANGS = "import threading; threading.Event().wait()"


async def start(code: str) -> Child:
    """Start a worker that runs a program."""
    child = await Child.spawn(0, [sys.executable, "-c", code], [], lambda child, families: None)
    child.load(Config(), Keys({}), 1)
    return child


async def test_a_worker_that_says_nothing_while_it_loads_is_killed() -> None:
    """Whoever waits for it is told."""
    child = await start(HANGS)
    with pytest.raises(StartError, match="worker 0 hangs"):
        await child.loaded(LIMIT_S / LOADING_FACTOR)

    assert await child.ended == -signal.SIGKILL
    child.wishes.close()


async def test_a_worker_that_says_that_it_loads_is_waited_for() -> None:
    """However long it takes altogether."""
    child = await start(TALKS)

    assert await child.loaded(LIMIT_S / LOADING_FACTOR) == {"it": "serves"}
    await child.ended
    child.wishes.close()


async def test_a_worker_says_again_and_again_that_it_loads(tmp_path: Path) -> None:
    """Until it has loaded."""
    source = tmp_path / "source"
    os.mkfifo(source)
    version = VersionConfig(backend="hash", source=str(source))
    config = Config(models=[ModelConfig(name="m", versions=[version])])
    control, its_control = socket.socketpair()
    wishes, its_wishes = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with its_control, its_wishes, socket.create_server(("127.0.0.1", 0)) as listener:
        fds = [its_control.fileno(), its_wishes.fileno(), listener.fileno()]
        command = [sys.executable, "-m", "tests.supervised", "worker", "0", *map(str, fds)]
        process = subprocess.Popen(command, pass_fds=fds)  # noqa: ASYNC220  # returns at once
    with process, wishes:
        line = await Line.open(control, FROM_WORKER)
        line.tell(Start(config, {}, 0, 1))
        with await asyncio.to_thread(source.open, "w"):
            meanwhile = [await line.hear() for _ in range(2)]
        while isinstance(last := await line.hear(), Loading):
            pass
        line.close()
        process.kill()

    assert meanwhile == [Loading(), Loading()]
    assert isinstance(last, Loaded)
