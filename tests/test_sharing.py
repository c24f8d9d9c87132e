"""Model processes that several workers use: one for all, its end, and what each of them learns."""

from __future__ import annotations

import asyncio
import os
import queue
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from embedsvc.calls import EmbedCall
from embedsvc.config import Config, DeviceConfig, ModelConfig, ServerConfig, VersionConfig
from embedsvc.errors import ModelDied, ModelError
from embedsvc.models.owner import Owner
from embedsvc.models.process import ProcessModel
from embedsvc.service import Service
from embedsvc.supervisor.sharing import Sharing
from tests.isolated import LONG_S, SHORT_S, PoisonedModel, embed, expected, processes, spec_of
from tests.poisoned_worker import CORRUPT, FREEZE, KILL, SLOW

ROWS = [[1, 2, 3], [4]]


class Worker:
    """What a worker holds: its socket to the supervisor, and a model."""

    def __init__(self, sharing: Sharing, cache_dir: Path) -> None:
        owner, self._line = owner_of(sharing)
        self.model: ProcessModel = PoisonedModel(
            spec_of(cache_dir), first_limit_s=LONG_S, least_reload_limit_s=0.0, owner=owner
        )
        self.deaths: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.limit_s = LONG_S
        self.model.watch(lambda rows, length: self.limit_s, self.deaths.put)

    async def load(self) -> None:
        """Load, as an engine does, on a thread."""
        await asyncio.to_thread(self.model.load)

    async def embed(self, rows: list[list[int]] = ROWS) -> bool:
        """Run a batch; say whether the vectors are right."""
        vectors = await asyncio.to_thread(embed, self.model, rows)
        return bool(np.array_equal(vectors, expected(rows)))

    async def death(self) -> str:
        """Wait until the engine would be told of a death."""
        return await asyncio.to_thread(self.deaths.get, timeout=LONG_S)

    async def leave(self) -> None:
        """Stop, as an engine does, or be closed by the kernel."""
        await asyncio.to_thread(self.model.close)
        self._line.close()


def owner_of(sharing: Sharing) -> tuple[Owner, socket.socket]:
    """Return what one more worker asks, and its end of the socket."""
    theirs, line = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sharing.serve(theirs)
    return Owner(line), line


class Server:
    """A supervisor's sharing, and workers in this process."""

    def __init__(self, cache_dir: Path) -> None:
        self.sharing = Sharing()
        self.cache_dir = cache_dir
        self.workers: list[Worker] = []

    async def join(self) -> Worker:
        """Return one more worker that has loaded the model."""
        worker = Worker(self.sharing, self.cache_dir)
        self.workers.append(worker)
        await worker.load()
        return worker


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Server]:
    """Yield a server; at the end nothing is left of it."""
    server = Server(tmp_path)
    yield server
    for worker in server.workers:
        await worker.leave()
    await server.sharing.models.close()

    assert processes() == []


async def all_gone() -> None:
    """Wait until no model's process runs."""
    async with asyncio.timeout(LONG_S):
        while processes():  # noqa: ASYNC110  # the system tells nobody
            await asyncio.sleep(0.01)


async def test_workers_use_one_process(server: Server) -> None:
    """At the same time, with buffers of their own."""
    one, other = await server.join(), await server.join()

    assert len(processes()) == 1
    assert all(await asyncio.gather(one.embed(), other.embed([[7], [8, 9]])))


async def test_workers_that_ask_at_once_get_one_process(server: Server) -> None:
    """The second one waits for what the first one has asked for."""
    workers = await asyncio.gather(server.join(), server.join())

    assert len(processes()) == 1
    assert [await worker.embed() for worker in workers] == [True, True]


async def test_a_process_lives_as_long_as_somebody_needs_it(server: Server) -> None:
    """The first one may leave."""
    one, other = await server.join(), await server.join()
    await one.leave()
    still = await other.embed()
    await other.leave()

    assert still
    await all_gone()


async def test_a_process_that_was_used_before_is_warm(server: Server) -> None:
    """So that nobody runs batches for nothing while others serve."""
    first = await server.join()
    server.sharing.models.warmed_up()
    second = await server.join()

    assert not first.model.warm
    assert second.model.warm


async def test_who_attaches_knows_what_loading_takes(server: Server) -> None:
    """A worker that found the model loaded gives the next load as long as whoever waited for it."""
    first, second = await server.join(), await server.join()
    told_s = second.model.load_s
    await first.leave()
    processes()[0].kill()
    await second.death()
    await second.load()

    assert told_s == first.model.load_s > 0.0
    assert await second.embed()


async def test_all_learn_of_a_death_and_go_on_with_one_successor(server: Server) -> None:
    """Whoever comes first has it started."""
    workers = [await server.join(), await server.join()]
    processes()[0].kill()
    reasons = [await worker.death() for worker in workers]
    for worker in workers:
        with pytest.raises(ModelDied):
            await worker.embed()
    await asyncio.gather(*(worker.load() for worker in workers))

    assert reasons == ["died", "died"]
    assert len(processes()) == 1
    assert [await worker.embed() for worker in workers] == [True, True]


async def test_a_batch_that_ends_the_process_is_known_to_its_worker(server: Server) -> None:
    """As with a process of its own; the others only learn that it died."""
    one, other = await server.join(), await server.join()
    with pytest.raises(ModelDied, match="SIGKILL") as died:
        await one.embed([[KILL]])

    assert (died.value.in_flight, died.value.killed) == (True, True)
    assert [await one.death(), await other.death()] == ["died", "died"]


async def test_a_process_that_hangs_for_one_is_ended_for_all(server: Server) -> None:
    """Even where it is stopped."""
    one, other = await server.join(), await server.join()
    one.limit_s = SHORT_S
    with pytest.raises(ModelDied, match="no answer"):
        await one.embed([[FREEZE]])

    assert [await one.death(), await other.death()] == ["hung", "died"]
    await all_gone()


async def test_a_model_that_cannot_be_loaded_fails_for_all_who_asked(server: Server) -> None:
    """With its own words; later it may be loaded."""
    (server.cache_dir / CORRUPT).touch()
    failed = await asyncio.gather(server.join(), server.join(), return_exceptions=True)
    (server.cache_dir / CORRUPT).unlink()
    again = await server.join()

    assert [str(error) for error in failed] == ["the weights are corrupt"] * 2
    assert all(isinstance(error, ModelError) and not error.killed for error in failed)
    assert await again.embed()


async def test_who_waits_learns_that_the_process_was_killed(server: Server) -> None:
    """A start begins anew then."""
    os.mkfifo(server.cache_dir / SLOW)
    joining = asyncio.create_task(server.join())
    with await asyncio.to_thread((server.cache_dir / SLOW).open, "w"):
        processes()[0].kill()
        with pytest.raises(ModelError, match="SIGKILL") as failed:
            await joining

    assert failed.value.killed


async def test_ends_leave_nothing_open(server: Server) -> None:
    """Neither files nor threads."""
    files = psutil.Process().num_fds()
    threads = psutil.Process().num_threads()
    for _ in range(3):
        worker = await server.join()
        await worker.embed()
        processes()[0].kill()
        await worker.death()
        await worker.load()
        await worker.leave()
        await all_gone()
    server.workers.clear()
    await server.sharing.models.close()
    await asyncio.sleep(0)

    assert psutil.Process().num_fds() <= files
    assert psutil.Process().num_threads() <= threads + 6  # those of `asyncio.to_thread`


# --- services ------------------------------------------------------------------------------------


async def test_services_share_model_and_slots(server: Server) -> None:
    """The second one finds all measurements made, and the slots of the device are counted once."""
    version = VersionConfig(backend="hash", isolate=True, max_length=32)
    config = Config(
        server=ServerConfig(cache_dir=str(server.cache_dir)),
        devices=[DeviceConfig(name="cpu", slots=1, threads_per_slot=1)],
        models=[ModelConfig(name="m", versions=[version])],
    )
    lines, services = [], []
    for _ in range(2):
        owner, line = owner_of(server.sharing)
        lines.append(line)
        services.append(Service(config, owner))
        await services[-1].start()
        server.sharing.models.warmed_up()
    n_processes = len(processes())
    calls = [EmbedCall("m", [f"text {k}"]) for k in range(20)]
    one, other = await asyncio.gather(
        *(asyncio.gather(*(service.embed(call) for call in calls)) for service in services)
    )
    for service, line in zip(services, lines, strict=True):
        await service.stop()
        line.close()
    await all_gone()

    assert n_processes == 1
    for mine, yours in zip(one, other, strict=True):
        np.testing.assert_array_equal(mine.vectors, yours.vectors)
