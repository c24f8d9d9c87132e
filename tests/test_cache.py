"""The cache directory: values come back whole or not at all, and nothing depends on it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from embedsvc.models.cache import Cache

KEY = {"kind": "slots", "cores": 2, "versions": {"torch": "2"}}


def test_values_come_back(tmp_path: Path) -> None:
    """A value is found under its key, in any order of the key's fields, also by another process."""
    assert Cache(tmp_path / "new" / "dir").put(KEY, {"slots": 2, "rates": [1.5, 2.0]})
    found = Cache(tmp_path / "new" / "dir").get(dict(reversed(KEY.items())))

    assert found == {"slots": 2, "rates": [1.5, 2.0]}


def test_other_keys_miss(tmp_path: Path) -> None:
    """A key that differs anywhere finds nothing."""
    cache = Cache(tmp_path)
    cache.put(KEY, {"slots": 2})

    assert cache.get({**KEY, "versions": {"torch": "3"}}) is None


def test_last_value_wins(tmp_path: Path) -> None:
    """A second value replaces the first and leaves no other file."""
    cache = Cache(tmp_path)
    cache.put(KEY, {"slots": 1})
    cache.put(KEY, {"slots": 2})

    assert cache.get(KEY) == {"slots": 2}
    assert list(tmp_path.iterdir()) == [cache.path(KEY)]


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b"\xff\xfe", b'{"value": 3}', b"null"])
def test_damaged_files_are_ignored(
    damage: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A damaged file is named in the log, counts as absent and can be written again."""
    cache = Cache(tmp_path)
    cache.path(KEY).write_bytes(damage)
    assert cache.get(KEY) is None
    assert str(cache.path(KEY)) in caplog.text

    assert cache.put(KEY, {"slots": 2})
    assert cache.get(KEY) == {"slots": 2}


def test_directory_that_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Without a usable directory every value is absent, with one warning."""
    (tmp_path / "file").touch()
    cache = Cache(tmp_path / "file" / "cache")

    assert not cache.put(KEY, {"slots": 2})
    assert not cache.put(KEY, {"slots": 2})
    assert cache.get(KEY) is None
    assert caplog.text.count("WARNING") == 1


def test_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tilde is the home directory."""
    monkeypatch.setenv("HOME", str(tmp_path))
    Cache("~/cache").put(KEY, {"slots": 2})

    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_writers_never_show_half_a_file(tmp_path: Path) -> None:
    """Readers beside many writers see whole values only."""
    cache = Cache(tmp_path)
    cache.put(KEY, {"n": 0, "text": "x"})

    def write_and_read(n: int) -> bool:
        cache.put(KEY, {"n": n, "text": "x" * n * 100})
        found = cache.get(KEY)
        return found is not None and (found["n"] == 0 or len(found["text"]) == found["n"] * 100)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(write_and_read, range(1, 200)))
