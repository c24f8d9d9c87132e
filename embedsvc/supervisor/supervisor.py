"""The supervisor: N workers on one address, none of which is missed for long.

It opens the listening sockets once. Worker k accepts from socket k; while it cannot, another one
does, and while none can, the supervisor. Runs on an event loop of its own and imports no model.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from asyncio import FIRST_COMPLETED
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from msgspec.structs import replace

from embedsvc.config import Config, ServerConfig
from embedsvc.engine.recovery import HEALTHY_S, PATIENCE
from embedsvc.errors import ConfigError, StartError
from embedsvc.http.signals import END_SIGNALS, next_one_kills
from embedsvc.http.sockets import allow_many_connections, listen_together, url_of
from embedsvc.keys import Keys, read_keys
from embedsvc.metrics import Metrics
from embedsvc.supervisor.child import Child, in_words
from embedsvc.supervisor.messages import Drain, Retire
from embedsvc.supervisor.scrapes import Scrapes
from embedsvc.supervisor.sharing import Sharing
from embedsvc.supervisor.stand_in import StandIn

log = logging.getLogger(__name__)

# Fields of `[server]` that the sockets and the number of workers follow from.
FIXED = ("host", "port", "workers")
# How often all workers are asked for their numbers, and after how many seconds without an answer
# one is taken for hung: far beyond what the longest body or a full collection keeps it from.
ASK_S, SILENT_S = 5.0, 10.0
# How often a place's first worker is begun that somebody kills while it loads.
TRIES = 3
# What a worker may take to end beyond its drain times.
END_SLACK_S = 8.0

Reread = Callable[[], Config]
OnReady = Callable[[str, dict[str, Any]], None]


def supervise(
    config: Config,
    command: Sequence[str],
    reread: Reread,
    on_ready: OnReady,
    silent_s: float = SILENT_S,
) -> None:
    """Keep `server.workers` workers serving until SIGTERM or SIGINT; then let them finish.

    Args:
        config: checked.
        command: starts a worker; see `Child.spawn`.
        reread: reads the configuration again, at SIGHUP; on a worker thread.
        on_ready: called with the address and with what the first worker serves, when all are ready.
        silent_s: seconds without a word after which a worker is replaced.

    Raises:
        ConfigError: the file of the keys is wrong.
        StartError: the address cannot be listened on, or a worker cannot be started.
    """
    allow_many_connections()
    keys = read_keys(config.server.keys_file)
    with ExitStack() as stack:
        listeners = listen_together(config.server, config.server.workers)
        for listener in listeners:
            stack.enter_context(listener)
        supervisor = Supervisor(config, keys, listeners, command, reread, on_ready, silent_s)
        asyncio.run(supervisor.run())


class Supervisor:
    """The workers of one address."""

    def __init__(
        self,
        config: Config,
        keys: Keys,
        listeners: Sequence[socket.socket],
        command: Sequence[str],
        reread: Reread,
        on_ready: OnReady,
        silent_s: float,
    ) -> None:
        self._config, self._keys = config, keys
        self._listeners = listeners
        self._command = command
        self._reread = reread
        self._on_ready = on_ready
        self._silent_s = silent_s
        self._n = len(listeners)
        # Who has worker k's place; everyone whose process runs, successors and retired included.
        self._places: list[Child] = []
        self._children: set[Child] = set()
        # Held by whoever starts a process for place k.
        self._starting = [asyncio.Lock() for _ in listeners]
        self._hung_up = asyncio.Event()
        self._sharing = Sharing()
        self._metrics = Metrics()
        self._scrapes = Scrapes(self._metrics, self._children)
        self._stand_in = StandIn(config.server, keys, self._metrics, self._scrapes.alone)
        self._ending = False

    async def run(self) -> None:
        """Start, supervise, and end when told.

        Raises:
            StartError: a worker cannot be started.
        """
        loop = asyncio.get_running_loop()
        living = asyncio.create_task(self._live())
        for number in END_SIGNALS:
            loop.add_signal_handler(number, self._on_signal, number, living)
        loop.add_signal_handler(signal.SIGHUP, self._hung_up.set)
        await asyncio.wait([living])
        self._ending = True
        if living.cancelled():
            await self._drain()
            await self._sharing.models.close()
        else:
            for child in self._children:
                child.kill()
            await self._ended(self._children, self._config.server)
            await self._sharing.models.close()
            living.result()

    def _on_signal(self, number: int, living: asyncio.Task[None]) -> None:
        next_one_kills()
        log.info("%s: the workers finish what is in flight", signal.Signals(number).name)
        living.cancel()

    async def _live(self) -> None:
        info = await self._start()
        self._on_ready(url_of(self._listeners[0]), info)
        async with asyncio.TaskGroup() as group:
            for number in range(self._n):
                group.create_task(self._keep(number))
                group.create_task(self._watch(number))
            group.create_task(self._renew_when_told())

    async def _start(self) -> dict[str, Any]:
        """Start all workers: the first one measures what the others then find in the cache."""
        self._assign()
        self._places = [await self._spawn(number) for number in range(self._n)]
        info = await self._load(0)
        self._sharing.models.warmed_up()
        self._assign()
        await asyncio.gather(*(self._load(number) for number in range(1, self._n)))
        self._assign()
        return info

    async def _load(self, number: int) -> dict[str, Any]:
        """Have a place's first worker load; begin with another one where somebody kills it."""
        tries_left = TRIES
        while True:
            tries_left -= 1
            child = self._places[number]
            child.load(self._config, self._keys, self._n)
            try:
                return await child.loaded(self._silent_s)
            except StartError as error:
                if not (tries_left and await child.was_killed()):
                    raise
                log.error("worker %d is started again: %s", number, error)
            self._places[number] = await self._spawn(number)

    # --- who accepts -----------------------------------------------------------------------------

    def _assign(self) -> None:
        """Let ready workers accept, the first one for all others too; without any, this process."""
        if self._ending:
            return
        ready = [child for child in self._places if child.ready]
        self._stand_in.accept_from([] if ready else self._listeners)
        missing = set(range(self._n)) - {child.number for child in ready}
        for child in ready:
            others = missing if child is ready[0] else ()
            child.serve(sorted({*others, child.number}))

    # --- replacing -------------------------------------------------------------------------------

    async def _spawn(self, number: int) -> Child:
        child = await Child.spawn(number, self._command, self._listeners, self._scrapes.hear)
        self._children.add(child)
        self._sharing.serve(child.wishes)
        child.ended.add_done_callback(lambda _: self._forget(child))
        return child

    def _forget(self, child: Child) -> None:
        if not (child.relieved.done() or self._ending):
            self._metrics.worker_deaths.inc()
        self._children.discard(child)
        self._scrapes.forget(child)
        self._assign()

    async def _succeed(self, number: int, config: Config, keys: Keys) -> Child:
        """Start a worker for a place and give it the place once it is ready; return who had it.

        Raises:
            StartError: it cannot be started.
        """
        successor = await self._spawn(number)
        successor.load(config, keys, self._n)
        await successor.loaded(self._silent_s)
        self._sharing.models.warmed_up()
        log.info("worker ready number=%d pid=%d", number, successor.pid)
        before, self._places[number] = self._places[number], successor
        before.relieved.set_result(None)
        self._assign()
        return before

    async def _keep(self, number: int) -> None:
        """Replace whoever has a place when it dies."""
        pauses = PATIENCE.pauses()
        while True:
            child = self._places[number]
            # One that was relieved goes on for a while; its successor may die meanwhile.
            leaving: list[asyncio.Future[Any]] = [child.ended, child.relieved]
            await asyncio.wait(leaving, return_when=FIRST_COMPLETED)
            if child.relieved.done():
                continue
            why = f"died: {in_words(child.ended.result())}"
            if child.ready_s >= HEALTHY_S:
                pauses = PATIENCE.pauses()
            while not child.relieved.done():
                pause_s = next(pauses)
                log.error("worker %d %s; another one starts in %.1f s", number, why, pause_s)
                await asyncio.wait([child.relieved], timeout=pause_s)
                async with self._starting[number]:
                    if not child.relieved.done():
                        try:
                            await self._succeed(number, self._config, self._keys)
                        except StartError as error:
                            why = f"could not be started: {error}"

    async def _watch(self, number: int) -> None:
        """Kill whoever has a place and does nothing any more; what it counted is kept meanwhile."""
        while True:
            await asyncio.sleep(min(ASK_S, self._silent_s))
            child = self._places[number]
            if child.ready and not await child.answers(self._silent_s):
                log.error("worker %d answers nothing; killing it", number)
                child.kill()
                await asyncio.wait([child.ended])

    async def _renew_when_told(self) -> None:
        while True:
            await self._hung_up.wait()
            self._hung_up.clear()
            try:
                fresh = await asyncio.to_thread(self._reread)
                keys = await asyncio.to_thread(read_keys, fresh.server.keys_file)
            except ConfigError as error:
                log.error("configuration not taken over, the old one stays: %s", error)
                continue
            await self._renew(self._with_fixed(fresh), keys)

    def _with_fixed(self, fresh: Config) -> Config:
        kept = {name: getattr(self._config.server, name) for name in FIXED}
        changed = [name for name in FIXED if getattr(fresh.server, name) != kept[name]]
        if changed:
            names = " ".join(f"server.{name}" for name in changed)
            log.warning("these need a restart, the old values stay: %s", names)
        return replace(fresh, server=replace(fresh.server, **kept))

    async def _renew(self, fresh: Config, keys: Keys) -> None:
        """Replace the workers one by one; each one leaves only when its successor is ready."""
        log.info("workers are renewed one by one")
        for number in range(self._n):
            try:
                async with self._starting[number]:
                    old = await self._succeed(number, fresh, keys)
            except StartError as error:
                log.error("worker %d not renewed, the old one stays: %s", number, error)
                return
            self._config, self._keys = fresh, keys
            self._stand_in.take_over(fresh.server, keys)
            old.tell(Retire())
            await self._ended([old], fresh.server)
        log.info("all workers are renewed")

    # --- the end ---------------------------------------------------------------------------------

    async def _drain(self) -> None:
        """Let those who serve finish; nobody waits for the others."""
        await self._stand_in.drain()
        # Each worker closes its socket when it has accepted the last connection; this is a copy.
        for listener in self._listeners:
            listener.close()
        for child in self._children:
            if child.ready:
                child.tell(Drain())
            else:
                child.kill()
        await self._ended(self._children, self._config.server)

    async def _ended(self, children: Sequence[Child] | set[Child], server: ServerConfig) -> None:
        """Wait for processes to end; kill those that take longer than they may."""
        limit_s = server.drain_delay_s + server.drain_timeout_s + END_SLACK_S
        ending = {child.ended: child for child in children}
        if not ending:
            return
        _, late = await asyncio.wait(ending, timeout=limit_s)
        for ended in late:
            log.error("worker %d does not end; killing it", ending[ended].number)
            ending[ended].kill()
        if late:
            await asyncio.wait(late)
