"""A small store of JSON values in one directory: measurements, self-checks, golden vectors.

Nothing depends on it: where the directory cannot be read or written every `get` misses. A value is
whole or absent, also when two processes write the same key. Safe on any thread.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)


class Cache:
    """Values by key, one file each.

    Args:
        directory: where the files lie; `~` is the home directory. Created when first written.
    """

    def __init__(self, directory: Path | str) -> None:
        self.directory = Path(directory).expanduser()
        self._warned = False

    def get(self, key: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the value stored under `key`, or None. A damaged file counts as absent."""
        path = self.path(key)
        try:
            stored = json.loads(path.read_bytes())
        except FileNotFoundError:
            return None
        except OSError as error:
            self._warn_once("read", error)
            return None
        except ValueError:  # not JSON, or not UTF-8
            stored = None
        if isinstance(stored, dict) and isinstance(stored.get("value"), dict):
            return dict(stored["value"])
        log.warning("ignoring a damaged cache file path=%s", path)
        return None

    def put(self, key: Mapping[str, Any], value: Mapping[str, Any]) -> bool:
        """Store `value` under `key`; return whether it could be written.

        Args:
            key: JSON types only. Name its purpose in a field, e.g. `"kind": "slots"`.
            value: JSON types only.
        """
        text = json.dumps({"key": dict(key), "value": dict(value)}, indent=1)
        path = self.path(key)
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            _replace(path, text)
        except OSError as error:
            self._warn_once("write", error)
            return False
        return True

    def path(self, key: Mapping[str, Any]) -> Path:
        """Return the file of `key`."""
        canonical = json.dumps(dict(key), sort_keys=True, separators=(",", ":"))
        digest = hashlib.sha256(canonical.encode()).hexdigest()
        return self.directory / f"{digest[:32]}.json"

    def _warn_once(self, action: str, error: OSError) -> None:
        level = logging.DEBUG if self._warned else logging.WARNING
        self._warned = True
        log.log(
            level, "cannot %s the cache, going on without it dir=%s error=%s",
            action, self.directory, error.strerror,
        )  # fmt: skip


def _replace(path: Path, text: str) -> None:
    """Write `path` in one step: readers see the old file or the new one."""
    fd, name = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".tmp")
    try:
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            file.write(text)
        Path(name).replace(path)
    except OSError:
        Path(name).unlink(missing_ok=True)
        raise
