"""What a running server takes over from a configuration that was read again. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from embedsvc.config import Config
from embedsvc.configfile import check
from embedsvc.fields import fields

# Fields of `[server]` that are looked at anew by every request, connection or shutdown.
LIVE = frozenset({
    "body_timeout_s",
    "drain_delay_s",
    "drain_timeout_s",
    "header_timeout_s",
    "keys_file",
    "max_body_bytes",
    "max_inputs",
    "max_request_tokens",
    "max_timeout_s",
    "slow_request_s",
    "timeout_s",
    "write_timeout_s",
})  # fmt: skip


class Changes(NamedTuple):
    """What came of a new configuration.

    Attributes:
        config: to go on with: the running one with the new values of the applied fields.
        applied: paths of changed fields that it takes over.
        deferred: paths of changed fields that need a restart.
    """

    config: Config
    applied: list[str]
    deferred: list[str]


def changes(running: Config, fresh: Config) -> Changes:
    """Compare a configuration with the running one.

    Raises:
        ConfigError: what can be taken over does not go together with what needs a restart.
    """
    paths = list(differences("", running, fresh))
    live = {f"server.{name}" for name in LIVE}
    applied = [path for path in paths if path in live]
    names = [path.removeprefix("server.") for path in applied]
    taken = {name: getattr(fresh.server, name) for name in names}
    config = replace(running, server=replace(running.server, **taken))
    check(config)
    return Changes(config, applied, [path for path in paths if path not in live])


def differences(path: str, one: object, other: object) -> Iterator[str]:
    """Yield the paths of the fields in which two configurations differ."""
    if isinstance(one, Struct) and isinstance(other, Struct):
        for name in (field.name for field in fields(type(one))):
            inner = f"{path}.{name}".lstrip(".")
            yield from differences(inner, getattr(one, name), getattr(other, name))
    elif isinstance(one, list) and isinstance(other, list) and _tables(one + other):
        for i, (a, b) in enumerate(zip_longest(one, other)):
            yield from differences(f"{path}[{i}]", a, b)
    elif one != other:
        yield path


def _tables(items: list[object]) -> bool:
    return any(isinstance(item, Struct) for item in items)
