"""What the processes of a server hold: descriptors, threads, shared memory, children."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import psutil

# Where files of shared memory lie, as the kernel names them.
SHARED = ("/memfd:", "/dev/shm/")
# Processes with the same value of this variable are of one server.
MARK = "EMBEDSVC_CENSUS"
# The module that runs in the process of a model ends like this; the command of an HTTP worker is
# this one.
MODEL_MODULE, HTTP_COMMAND = ".worker", "worker"


class Census(NamedTuple):
    """Held by all processes of a server together.

    Attributes:
        processes: itself and its children, those not yet waited for included.
        files: open descriptors.
        threads: of all processes.
        shared: blocks of memory that processes can share, each counted once.
    """

    processes: int
    files: int
    threads: int
    shared: int

    def left_behind(self, later: Census) -> dict[str, str]:
        """Return what there is more of later, as `3 -> 5`."""
        both = zip(self._fields, self, later, strict=True)
        return {name: f"{then} -> {now}" for name, then, now in both if now > then}


def family(pid: int) -> list[psutil.Process]:
    """Return a process, all its descendants, and those of them whose parents have died."""
    process = psutil.Process(pid)
    known = [process, *process.children(recursive=True)]
    mark = process.environ().get(MARK)
    return known + [one for one in _marked(mark) if one not in known] if mark else known


def _marked(mark: str) -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(MARK) == mark:
                yield process


def model_processes(pid: int) -> list[psutil.Process]:
    """Return the processes of a server that run a model, oldest first."""
    return [one for one, words in _commands(pid) if words[0].endswith(MODEL_MODULE)]


def http_workers(pid: int) -> list[psutil.Process]:
    """Return the processes of a server that serve HTTP for it, oldest first."""
    return [one for one, words in _commands(pid) if words[1:2] == [HTTP_COMMAND]]


def _commands(pid: int) -> list[tuple[psutil.Process, list[str]]]:
    """Return the Python processes of a server that run a module, its name, and its arguments."""
    found = []
    for process in family(pid):
        with suppress(psutil.Error):
            words = process.cmdline()
            if "-m" in words[:-1]:
                found.append((process.create_time(), process, words[words.index("-m") + 1 :]))
    return [(process, words) for _, process, words in sorted(found, key=lambda one: one[0])]


def census(pid: int) -> Census:
    """Count what a server holds now."""
    files, threads = 0, 0
    shared: set[int] = set()
    members = family(pid)
    for process in members:
        with suppress(psutil.Error, OSError):
            files += process.num_fds()
            threads += process.num_threads()
            shared |= set(_memory_files(process.pid))
    return Census(len(members), files, threads, len(shared))


def resident_mib(pid: int) -> float:
    """Return the resident memory of a process and its children, in MiB."""
    total = 0
    for process in family(pid):
        with suppress(psutil.Error):
            total += process.memory_info().rss
    return float(total) / 2**20


class Bystanders:
    """How much of the machine others took, so that a figure of time means something.

    Args:
        pid: of the server; this process and the server's are not others.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._began, self._others_s = perf_counter(), self._busy_s()

    def cores(self) -> float:
        """Return the cores that others kept busy on average since the start."""
        return (self._busy_s() - self._others_s) / (perf_counter() - self._began)

    def _busy_s(self) -> float:
        """Return the busy seconds of all cores less those of this process and the server's."""
        machine = psutil.cpu_times()
        own = psutil.Process().cpu_times()
        busy_s = (
            sum(machine) - machine.idle - getattr(machine, "iowait", 0.0) - own.user - own.system
        )
        for process in family(self._pid):
            with suppress(psutil.Error):
                times = process.cpu_times()
                # With those of children that have ended.
                busy_s -= times.user + times.system + times.children_user + times.children_system
        return busy_s


def _memory_files(pid: int) -> Iterator[int]:
    """Yield the inodes of the shared memory that a process has open or mapped."""
    process = Path(f"/proc/{pid}")
    for entry in (process / "fd").iterdir():
        with suppress(OSError):
            if str(entry.readlink()).startswith(SHARED):
                yield entry.stat().st_ino
    for line in (process / "maps").read_text().splitlines():
        # Address, mode, offset, device, inode, name.
        words = line.split(maxsplit=5)
        if len(words) == 6 and words[5].startswith(SHARED):
            yield int(words[4])
