"""Cores from affinity and cgroup quotas, on made-up file trees; processor features; settings."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from embedsvc.models.host import native_bf16, processor, set_native_memory, usable_cores


def _cores(tmp_path: Path, membership: str, files: dict[str, str], allowed: int = 8) -> int:
    for name, text in files.items():
        path = tmp_path / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "membership").write_text(membership)
    return usable_cores(
        allowed=allowed, membership=tmp_path / "membership", cgroup_root=tmp_path / "cgroup"
    )


V1 = "12:memory:/docker/abc\n5:cpu,cpuacct:/docker/abc\n3:cpuset:/docker/abc\n"


@pytest.mark.parametrize(
    ("membership", "files", "expected"),
    [
        pytest.param("0::/\n", {"cpu.max": "200000 100000\n"}, 2, id="container"),
        pytest.param("0::/\n", {"cpu.max": "150000 100000\n"}, 2, id="rounded up"),
        pytest.param("0::/\n", {"cpu.max": "10000 100000\n"}, 1, id="at least one"),
        pytest.param("0::/\n", {"cpu.max": "max 100000\n"}, 8, id="no quota"),
        pytest.param("0::/\n", {"cpu.max": "6400000 100000\n"}, 8, id="more than allowed"),
        pytest.param(
            "0::/a/b\n",
            {"a/cpu.max": "300000 100000\n", "a/b/cpu.max": "max 100000\n"},
            3,
            id="parent",
        ),
        pytest.param("0::/not/seen\n", {"cpu.max": "400000 100000\n"}, 4, id="host path"),
        pytest.param("0::/../../sibling\n", {"cpu.max": "400000 100000\n"}, 4, id="outside"),
        pytest.param("0::/\n", {"cpu.max": "nonsense\n"}, 8, id="damaged"),
        pytest.param(
            V1,
            {
                "cpu,cpuacct/docker/abc/cpu.cfs_quota_us": "500000\n",
                "cpu,cpuacct/docker/abc/cpu.cfs_period_us": "100000\n",
            },
            5,
            id="version 1",
        ),
        pytest.param(
            V1,
            {"cpu/cpu.cfs_quota_us": "250000\n", "cpu/cpu.cfs_period_us": "100000\n"},
            3,
            id="version 1 in a container",
        ),
        pytest.param(
            V1,
            {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"},
            8,
            id="version 1 without quota",
        ),
        pytest.param("garbage\n\n0:\n", {}, 8, id="garbage"),
    ],
)
def test_quota(membership: str, files: dict[str, str], expected: int, tmp_path: Path) -> None:
    """The tightest quota on the way up cuts the cores of the affinity."""
    assert _cores(tmp_path, membership, files) == expected


def test_systems_without_cgroups(tmp_path: Path) -> None:
    """Where the files are missing, the affinity decides."""
    assert usable_cores(allowed=6, membership=tmp_path / "none", cgroup_root=tmp_path) == 6


def test_this_machine() -> None:
    """On the machine of the test the count lies between one and the affinity."""
    assert 1 <= usable_cores() <= (os.cpu_count() or 1)


@pytest.mark.parametrize(
    ("cpuinfo", "expected"),
    [
        ("processor\t: 0\nflags\t\t: fpu avx512f avx512_bf16 amx_tile\n", True),
        ("flags\t\t: fpu amx_bf16\n", True),
        ("flags\t\t: fpu avx2 avx512f avx512_vbmi2\n", False),
        ("Features\t: fp asimd svebf16 bf16 i8mm\n", True),
        ("Features\t: fp asimd\n", False),
        ("", False),
    ],
)
def test_native_bf16(cpuinfo: str, expected: bool, tmp_path: Path) -> None:
    """The processor's flags say whether it multiplies bfloat16."""
    path = tmp_path / "cpuinfo"
    path.write_text(cpuinfo)

    assert native_bf16(path) is expected


def test_the_processor_has_a_name_where_the_system_tells(tmp_path: Path) -> None:
    """Measurements of one processor are not taken for those of another."""
    path = tmp_path / "cpuinfo"
    path.write_text("processor\t: 0\nmodel name\t: AMD EPYC 9B14\nprocessor\t: 1\n")

    assert processor(path) == "AMD EPYC 9B14"
    assert processor(tmp_path / "absent") == ""


def test_native_bf16_without_cpuinfo(tmp_path: Path) -> None:
    """An unknown processor is taken to have none."""
    assert native_bf16(tmp_path / "none") is False


def test_native_caches_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both caches get their bound, unless the user has chosen one."""
    monkeypatch.setenv("LRU_CACHE_CAPACITY", "1000")
    monkeypatch.delenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", raising=False)
    set_native_memory()

    assert os.environ["LRU_CACHE_CAPACITY"] == "1000"
    assert os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == "256"
