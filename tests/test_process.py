"""Isolated models: real processes, really killed; vectors, ends and what is left of them."""

from __future__ import annotations

import gc
import logging
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np
import psutil
import pytest

from embedsvc.errors import DeviceOutOfMemory, ModelDied, ModelError, ModelFailed
from embedsvc.models.process import ProcessModel
from tests.isolated import (
    LONG_S,
    SHORT_S,
    PoisonedModel,
    embed,
    expected,
    poisoned,
    processes,
    spec_of,
)
from tests.poisoned_worker import (
    CORRUPT,
    DIM,
    EXIT,
    FITS,
    FREEZE,
    HELD,
    HOLD,
    KILL,
    LEAVE,
    LOSE_DEVICE,
    NOISE,
    RAISE,
    SEGFAULT,
    SLOW,
)

ROWS = [[5, 6, 7], [8], [9] * 20]
GONE_S = 10.0


@dataclass
class Rig:
    """A loaded model and what it told of its deaths."""

    model: ProcessModel
    folder: Path
    deaths: queue.SimpleQueue[str]
    limit_s: float = LONG_S

    def watch(self) -> None:
        """Hear of deaths; batches may take `limit_s`."""
        self.model.watch(lambda rows, length: self.limit_s, self.deaths.put)

    @property
    def process(self) -> psutil.Process:
        """The only one."""
        (process,) = processes()
        return process


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    """A loaded model; its process is gone afterwards."""
    rig = Rig(poisoned(tmp_path), tmp_path, queue.SimpleQueue())
    rig.model.load()
    rig.watch()
    yield rig

    rig.model.close()
    assert processes() == []


def test_vectors_are_those_of_the_model_in_process(rig: Rig) -> None:
    """Law: the way through the other process changes no bit."""
    np.testing.assert_array_equal(embed(rig.model, ROWS), expected(ROWS))
    assert (rig.model.dim, rig.model.device, rig.model.dtype) == (DIM, "cpu", "hash")


def test_batches_at_once_do_not_meet(rig: Rig) -> None:
    """Many threads with buffers of their own, some of them used again, get their own vectors."""

    def run(first: int) -> bool:
        rows = [[first, n] for n in range(1, FITS)]
        return bool((embed(rig.model, rows) == expected(rows)).all())

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(run, range(1, 200)))


@pytest.mark.parametrize(
    ("poison", "reason"),
    [(KILL, "died"), (EXIT, "died"), (SEGFAULT, "died"), (LOSE_DEVICE, "device")],
)
def test_a_process_that_ends_in_a_batch_is_told_once(rig: Rig, poison: int, reason: str) -> None:
    """Whoever waits for it learns of its end, after the watcher; the next one works."""
    with pytest.raises(ModelDied) as died:
        embed(rig.model, [[5], [poison]])

    assert died.value.in_flight
    assert rig.deaths.get_nowait() == reason
    assert processes() == []
    with pytest.raises(ModelDied) as down:
        embed(rig.model, ROWS)
    assert not down.value.in_flight
    rig.model.load()
    np.testing.assert_array_equal(embed(rig.model, ROWS), expected(ROWS))
    assert rig.deaths.empty()


@pytest.mark.parametrize(
    ("poison", "words"),
    [(KILL, "SIGKILL"), (EXIT, "status 3"), (SEGFAULT, "SIGSEGV"), (LOSE_DEVICE, "its device")],
)
def test_the_log_says_how_it_ended(
    rig: Rig, caplog: pytest.LogCaptureFixture, poison: int, words: str
) -> None:
    """One line names the signal or the status."""
    with pytest.raises(ModelDied, match=words):
        embed(rig.model, [[poison]])

    (line,) = [r.getMessage() for r in caplog.records if "is gone" in r.getMessage()]
    assert words in line


def test_what_a_process_has_started_ends_with_it(rig: Rig) -> None:
    """A process of its own that holds its sockets and its log does not hold its successor up."""
    with pytest.raises(ModelDied):
        embed(rig.model, [[LEAVE]])

    assert rig.deaths.get_nowait() == "died"
    rig.model.load()
    np.testing.assert_array_equal(embed(rig.model, ROWS), expected(ROWS))
    assert len(processes()) == 1


def test_a_process_killed_in_a_batch_fails_that_batch(rig: Rig) -> None:
    """kill -9 from outside is like any other end."""
    os.mkfifo(rig.folder / HELD)
    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(embed, rig.model, [[HOLD]])
        assert (rig.folder / HELD).read_text() == "held"
        rig.process.kill()

        with pytest.raises(ModelDied):
            held.result(timeout=GONE_S)

    rig.model.load()
    np.testing.assert_array_equal(embed(rig.model, ROWS), expected(ROWS))


def test_the_end_of_an_idle_process_is_noticed(rig: Rig) -> None:
    """Nobody needs to run a batch to learn that there is no process."""
    rig.process.kill()

    assert rig.deaths.get(timeout=GONE_S) == "died"


def test_a_death_before_anybody_watched_is_told_at_once(tmp_path: Path) -> None:
    """What happens between loading and watching is not lost."""
    rig = Rig(poisoned(tmp_path), tmp_path, queue.SimpleQueue())
    rig.model.load()
    with pytest.raises(ModelDied):
        embed(rig.model, [[KILL]])

    rig.watch()

    assert rig.deaths.get_nowait() == "died"
    rig.model.close()


@pytest.mark.parametrize("outside", [True, False])
def test_a_process_that_does_not_answer_is_killed(rig: Rig, outside: bool) -> None:
    """Stopped, whether between batches or in one, is hung once the limit has passed."""
    rig.limit_s = SHORT_S
    if outside:
        rig.process.suspend()

    with pytest.raises(ModelDied, match=f"within {SHORT_S} s"):
        embed(rig.model, [[5 if outside else FREEZE]])

    assert rig.deaths.get_nowait() == "hung"
    assert processes() == []


def test_failures_leave_the_process_alone(rig: Rig) -> None:
    """Out of memory and exceptions are the batch's; the process goes on."""
    pid = rig.process.pid

    with pytest.raises(DeviceOutOfMemory):
        embed(rig.model, [[5]] * (FITS + 1))
    with pytest.raises(ModelFailed):
        embed(rig.model, [[5], [RAISE]])

    np.testing.assert_array_equal(embed(rig.model, ROWS), expected(ROWS))
    assert rig.process.pid == pid


def test_its_lines_are_logged(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    """What it prints is in the server's log, harmless, by model; so are tracebacks."""
    caplog.set_level(logging.INFO)
    with pytest.raises(ModelFailed):
        embed(rig.model, [[NOISE], [RAISE]])
    rig.model.close()

    lines = [(r.levelno, r.getMessage()) for r in caplog.records]
    assert (logging.WARNING, "model=poisoned noise ?[31m") in lines
    assert (logging.ERROR, "model=poisoned RuntimeError: broken on purpose") in lines


def test_it_hears_no_terminal_and_goes_first_where_memory_ends(rig: Rig) -> None:
    """Signals that stop servers do not reach or move it; the kernel prefers it to the server."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        rig.process.send_signal(number)

    np.testing.assert_array_equal(embed(rig.model, ROWS), expected(ROWS))
    pid = rig.process.pid
    assert os.getpgid(pid) == pid
    own, its = (int(Path(f"/proc/{p}/oom_score_adj").read_text()) for p in ("self", pid))
    assert its > own or own == 1000


def test_it_gets_no_descriptor_of_the_server(rig: Rig, tmp_path: Path) -> None:
    """Only its pipes and sockets; not even what the server left inheritable."""
    with (tmp_path / "secret").open("w") as file:
        os.set_inheritable(file.fileno(), True)
        rig.model.load()
        paths = [Path(f"/proc/{rig.process.pid}/fd/{fd}") for fd in range(64)]

        assert not any(path.resolve().name == "secret" for path in paths if path.exists())


def test_loading_waits_for_a_slow_process(tmp_path: Path) -> None:
    """Ready is ready, however long it takes within the limit."""
    os.mkfifo(tmp_path / SLOW)
    model = poisoned(tmp_path)
    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(model.load)
        # Opening for writing waits for the process to read.
        with (tmp_path / SLOW).open("w"):
            assert not loading.done()

        loading.result(timeout=GONE_S)
    model.close()


def test_a_process_that_is_not_ready_in_time_is_killed(tmp_path: Path) -> None:
    """The message says how long was waited."""
    os.mkfifo(tmp_path / SLOW)
    model = PoisonedModel(spec_of(tmp_path), first_limit_s=SHORT_S)

    with pytest.raises(ModelError, match=f"not ready within {SHORT_S} s"):
        model.load()

    assert processes() == []
    model.close()


def test_closing_ends_a_load(tmp_path: Path) -> None:
    """A server that stops does not wait for a model."""
    os.mkfifo(tmp_path / SLOW)
    model = poisoned(tmp_path)
    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(model.load)
        with (tmp_path / SLOW).open("w"):
            model.close()

        with pytest.raises(ModelError):
            loading.result(timeout=GONE_S)

    assert processes() == []


def test_a_model_that_cannot_be_loaded_says_why_and_can_be_tried_again(rig: Rig) -> None:
    """The process's own message; where the cause is gone, the next load works."""
    rig.process.kill()
    assert rig.deaths.get(timeout=GONE_S) == "died"
    (rig.folder / CORRUPT).touch()
    with pytest.raises(ModelError, match="the weights are corrupt"):
        rig.model.load()
    (rig.folder / CORRUPT).unlink()

    rig.model.load()

    np.testing.assert_array_equal(embed(rig.model, ROWS), expected(ROWS))


def test_weights_that_changed_on_disk_are_not_loaded(tmp_path: Path) -> None:
    """Two kinds of vectors from one server would be worse than none; touching is not changing."""
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"one")
    spec = spec_of(tmp_path)
    digest = "7692c3ad3540bb803c020b3aee66cd8887123234ea0c6e7143c0add73ff431ed"  # SHA-256 of "one"
    folder = replace(spec.folder, weights=(weights,), weights_id=digest)
    model = PoisonedModel(msgspec.structs.replace(spec, folder=folder))
    model.load()
    os.utime(weights, (1, 1))
    model.load()
    weights.write_bytes(b"two")

    with pytest.raises(ModelError, match="have changed since they were verified"):
        model.load()

    model.close()


def test_a_model_whose_process_cannot_start_says_so(tmp_path: Path) -> None:
    """A worker that ends at once is a load that failed, with its last words in the log."""

    class HomelessModel(ProcessModel):
        worker = "tests.no_such_module"

    model = HomelessModel(spec_of(tmp_path))

    with pytest.raises(ModelError, match=r"ended before it was ready \(it exited with status 1\)"):
        model.load()

    model.close()


def all_stopped(pid: int) -> bool:
    """Say whether every thread of a process is stopped."""
    stats = (path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/stat"))
    return all(stat.rpartition(")")[2].split()[0] == "T" for stat in stats)


@pytest.mark.parametrize("stopped", [False, True])
def test_it_dies_with_its_server(tmp_path: Path, stopped: bool) -> None:
    """Even one that is in a batch, or stopped, when the server is killed."""
    os.mkfifo(tmp_path / HELD)
    code = (
        "import sys; from pathlib import Path; from tests.isolated import *; "
        "from tests.poisoned_worker import HOLD; model = poisoned(Path(sys.argv[1])); "
        "model.load(); embed(model, [[HOLD]])"
    )
    server = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)])
    assert (tmp_path / HELD).read_text() == "held"
    (process,) = psutil.Process(server.pid).children()
    if stopped:
        process.suspend()
        # The kernel wakes what its parent leaves behind stopped, but not what is about to stop.
        while not all_stopped(process.pid):
            os.sched_yield()

    server.kill()
    server.wait()

    # It is nobody's child here, so there is nothing to wait for but its entry.
    psutil.wait_procs([process], timeout=GONE_S)
    assert not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


@pytest.mark.timeout(120)
@pytest.mark.parametrize("deaths", [4, pytest.param(20, marks=pytest.mark.slow)])
def test_deaths_leave_nothing_behind(rig: Rig, deaths: int) -> None:
    """Descriptors, threads and shared memory are as many as before."""

    def kept() -> tuple[int, int, int]:
        gc.collect()
        shared = sum("embedsvc-buffer" in m.path for m in psutil.Process().memory_maps(False))
        return len(list(Path("/proc/self/fd").iterdir())), threading.active_count(), shared

    def crash() -> None:
        with pytest.raises(ModelDied):
            embed(rig.model, [[5], [KILL]])
        rig.model.load()
        np.testing.assert_array_equal(embed(rig.model, ROWS), expected(ROWS))

    crash()
    before = kept()
    for _ in range(deaths):
        crash()

    assert kept() == before
    assert len(processes()) == 1


def test_buffers_that_are_gone_are_forgotten_by_the_process(rig: Rig) -> None:
    """Its mappings do not grow with the buffers it has seen."""

    def mapped() -> int:
        return sum("embedsvc-buffer" in m.path for m in rig.process.memory_maps(False))

    for n in range(1, 40):
        embed(rig.model, [[n]])
    gc.collect()
    # Told with the next batch.
    embed(rig.model, [[40]])

    assert mapped() <= 3
