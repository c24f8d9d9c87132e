"""What is done to the processes of a server."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

import psutil

from loadtest.census import Census, census, http_workers, model_processes
from loadtest.chaos.checker import Injected
from loadtest.chaos.client import Run, User
from loadtest.chaos.plan import Planned, Visit

# A process that starts again is looked for as long as this.
FOUND_WITHIN_S, LOOK_S = 30.0, 0.01
# How long one that starts is held, and how long a broken file lies there.
HELD_S, BROKEN_S = 3.0, 1.0
# How often, and how far apart, it is looked for something to break.
LOOKS, AGAIN_S = 4, 2.0
# What goes away by itself is gone by then: workers that are renewed one by one, too.
SETTLE_S, SETTLE_LOOK_S = 120.0, 0.5
SETTLE_TEXTS = 64


@dataclass(slots=True)
class Target:
    """A server under test.

    Attributes:
        pid: of the process that was started.
        config: its file, which is written again.
        text: what the file says; `{turn}` changes each time.
        run: the load on it.
        rng: which process it is done to.
        journal: what was done to it.
        n_skipped: faults for which there was no process at that moment.
    """

    pid: int
    config: Path
    text: str
    run: Run
    rng: random.Random
    journal: list[Injected] = field(default_factory=list)
    n_skipped: int = 0
    _turns: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def models(self) -> list[psutil.Process]:
        """Return its processes that run a model, oldest first."""
        return model_processes(self.pid)

    def victim(self) -> psutil.Process:
        """Return one of its processes that run a model.

        Raises:
            IndexError: it has none at this moment.
        """
        return self.rng.choice(self.models())

    def write_config(self) -> None:
        """Write its file, a little different each time."""
        self.config.write_text(self.text.replace("{turn}", str(next(self._turns))))

    def note(self, fault: str, ports: frozenset[int] = frozenset()) -> None:
        """Note that a fault begins now."""
        self.journal.append(Injected(fault, perf_counter(), self.run.in_flight, ports))


Inject = Callable[[Target], Awaitable[None]]


async def inject(target: Target, planned: list[Planned], began: float) -> None:
    """Do what is planned, each at its time or, if the one before takes longer, right after it."""
    for fault in planned:
        await asyncio.sleep(max(0.0, began + fault.at - perf_counter()))
        for _ in range(LOOKS):
            try:
                await FAULTS[fault.fault](target)
                break
            except (psutil.NoSuchProcess, ProcessLookupError, IndexError):
                # Still down from the fault before.
                await asyncio.sleep(AGAIN_S)
        else:
            target.n_skipped += 1


async def kill_model(target: Target) -> None:
    """End the process of a model."""
    victim = target.victim()
    target.note("model killed")
    victim.kill()


async def stop_model(target: Target) -> None:
    """Stop the process of a model; its server must notice that it hangs."""
    victim = target.victim()
    target.note("model stopped")
    victim.suspend()


async def crash_model(target: Target) -> None:
    """Send a text that takes the process of the model down."""
    target.note("model poisoned")
    user = User(target.run, f"poison{len(target.journal)}")
    visit = Visit(picks=[0, 1, 2], poison={1: "crash"}, timeout_s=30.0)
    target.run.background.append(asyncio.create_task(user.once(visit)))


async def slow_start(target: Target) -> None:
    """End the process of a model and hold the next one while it starts."""
    known = {process.pid for process in target.models()}
    victim = target.victim()
    target.note("model killed, slow start")
    victim.kill()
    until = perf_counter() + FOUND_WITHIN_S
    while perf_counter() < until:
        for process in target.models():
            if process.pid not in known:
                with suppress(psutil.NoSuchProcess):
                    process.suspend()
                    await asyncio.sleep(HELD_S)
                    process.resume()
                return
        await asyncio.sleep(LOOK_S)


async def kill_worker(target: Target) -> None:
    """End a process that serves HTTP."""
    _kill_workers(target, "worker killed", [target.rng.choice(http_workers(target.pid))])


async def kill_workers(target: Target) -> None:
    """End all processes that serve HTTP, or are about to."""
    _kill_workers(target, "all workers killed", http_workers(target.pid))


def _kill_workers(target: Target, fault: str, victims: list[psutil.Process]) -> None:
    """End processes; note which connections are their own.

    Raises:
        IndexError: there are none at this moment.
    """
    ports: set[int] = set()
    n_stopped = 0
    for victim in victims:
        # One that is gone by itself meanwhile is none.
        with suppress(psutil.NoSuchProcess):
            victim.suspend()
            n_stopped += 1
            ports |= {c.raddr.port for c in victim.net_connections("tcp") if c.raddr}
    if not n_stopped:
        raise IndexError
    target.note(fault, frozenset(ports))
    for victim in victims:
        with suppress(psutil.NoSuchProcess):
            victim.kill()


async def reload_config(target: Target) -> None:
    """Let the server read its file again."""
    target.write_config()
    target.note("config reloaded")
    os.kill(target.pid, signal.SIGHUP)


async def break_config(target: Target) -> None:
    """Let the server read a broken file; then mend it."""
    target.config.write_text("[server\nport = nonsense")
    target.note("config broken")
    os.kill(target.pid, signal.SIGHUP)
    await asyncio.sleep(BROKEN_S)
    target.write_config()


FAULTS: dict[str, Inject] = {
    "reload": reload_config,
    "break": break_config,
    "kill": kill_model,
    "stop": stop_model,
    "poison": crash_model,
    "slow": slow_start,
    "worker": kill_worker,
    "workers": kill_workers,
}


def faults_for(target: Target) -> list[str]:
    """Return what can be done to a server, as its processes and its model tell."""
    names = ["reload", "break"]
    if target.models():
        names += ["kill", "stop", "slow"]
        names += ["poison"] if target.run.pool.exact else []
    return [*names, "worker", "workers"] if http_workers(target.pid) else names


async def left_behind(target: Target, before: Census) -> dict[str, str]:
    """Return what a server holds more of than before, once nothing of it goes away any more.

    Every process gets a little to do meanwhile: some things go with the next batch.
    """
    until = perf_counter() + SETTLE_S
    for number in itertools.count():
        await User(target.run, f"after{number}").once(Visit(picks=range(SETTLE_TEXTS)))
        await asyncio.sleep(SETTLE_LOOK_S)
        more = before.left_behind(census(target.pid))
        if not more or perf_counter() > until:
            break
    return more
