"""The machine under the process: cores we may use, processor features, native memory settings.

Reads Linux's own files; every path can be given, so that tests need no container. Where a file is
missing (other systems) the plain answer of the standard library stands. Imports nothing heavy.
"""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path

# oneDNN and PyTorch keep a compiled kernel per shape, 1,024 by default, about 0.7 MB each. Under
# texts of every length that is memory that grows for hours. 256 hold every shape that `precision`
# lets through (measured, MiniLM, two threads, 4,000 batches of random lengths: 711 MiB after 1,000,
# 759 at the end; with 64 kept, which thrash, 666 and 697, and a third more time).
_NATIVE_CACHES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "256", "LRU_CACHE_CAPACITY": "256"}

# mallopt(3). By default glibc hands large blocks back to the kernel at every free, and the next
# batch faults them in again: 360,000 faults against 9,000 in 8 s of MiniLM batches. Measured on one
# core, 64 x 16 tokens in bfloat16: 62 ms before, 52 ms after. No glibc refuses 32 MiB.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_TRIM_THRESHOLD_BYTES = 256 << 20
_MMAP_THRESHOLD_BYTES = 32 << 20


def set_native_memory() -> None:
    """Bound the native caches and keep freed blocks; call before torch is imported anywhere.

    Variables the user has set are left alone. Calling it again changes nothing.
    """
    for name, value in _NATIVE_CACHES.items():
        os.environ.setdefault(name, value)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or "MALLOC_MMAP_THRESHOLD_" in os.environ:
        return
    mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES)
    mallopt(_M_TRIM_THRESHOLD, _TRIM_THRESHOLD_BYTES)


def usable_cores(
    *,
    allowed: int | None = None,
    membership: Path = Path("/proc/self/cgroup"),
    cgroup_root: Path = Path("/sys/fs/cgroup"),
) -> int:
    """Return the cores this process may use: its affinity, cut by the cgroup's CPU quota.

    A quota of 2.5 cores counts as 3, and any quota as at least 1.

    Args:
        allowed: cores of the affinity mask; read from the system when not given.
        membership: the file that names this process's cgroups.
        cgroup_root: where the cgroup file systems are mounted, version 1 or 2.
    """
    cores = float(allowed if allowed is not None else _affinity())
    for quota in _quotas(membership, cgroup_root):
        cores = min(cores, quota)
    return max(1, math.ceil(cores))


def native_bf16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Say whether the processor multiplies bfloat16 itself; emulated it is slower than float32."""
    for line in _lines(cpuinfo):
        name, _, flags = line.partition(":")
        # x86 lists `flags`, ARM lists `Features`.
        if name.strip() in ("flags", "Features"):
            return not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(flags.split())
    return False


def processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the processor's name; empty where the system does not tell."""
    named = (line.partition(":") for line in _lines(cpuinfo))
    return next((value.strip() for name, _, value in named if name.strip() == "model name"), "")


def _affinity() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _quotas(membership: Path, root: Path) -> Iterator[float]:
    """Yield every CPU quota, in cores, that binds this process: its own cgroup's and all above."""
    for line in _lines(membership):
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            yield from _up(root, path, _quota_v2)
        elif "cpu" in controllers.split(","):
            for mount in (root / controllers, root / "cpu"):
                yield from _up(mount, path, _quota_v1)


def _up(mount: Path, path: str, read: Callable[[Path], float | None]) -> Iterator[float]:
    # Inside a container the path may be the host's and not exist here; the mount itself is then
    # the container's own group, and it is always visited last.
    folder = mount / path.strip("/")
    while True:
        quota = read(folder)
        if quota is not None:
            yield quota
        if folder == mount or mount not in folder.parents:
            return
        folder = folder.parent


def _quota_v2(folder: Path) -> float | None:
    """Return the cores of `cpu.max` ("200000 100000", or "max 100000" for no limit)."""
    words = " ".join(_lines(folder / "cpu.max")).split()
    return _ratio(words[0], words[1]) if len(words) == 2 else None


def _quota_v1(folder: Path) -> float | None:
    """Return the cores of `cpu.cfs_quota_us`, which is -1 for no limit."""
    quota = "".join(_lines(folder / "cpu.cfs_quota_us")).strip()
    period = "".join(_lines(folder / "cpu.cfs_period_us")).strip()
    return _ratio(quota, period)


def _ratio(quota: str, period: str) -> float | None:
    if not (quota.isdigit() and period.isdigit() and int(period) > 0):
        return None
    return int(quota) / int(period)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
