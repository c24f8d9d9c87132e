"""API keys: a file of their SHA-256, and whom a presented key counts for.

Keys are never stored, shown or logged. A presented key is hashed and its digest looked up in a
dict: that the lookup takes longer where first bytes agree helps nobody, since who tries keys cannot
choose their digests. Unsalted SHA-256 is enough because keys are long and random, unlike passwords.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from embedsvc.config import Name, Section
from embedsvc.engine.sequence import NO_KEY, Key
from embedsvc.errors import ConfigError, InvalidKey, MissingKey
from embedsvc.fields import explain


class KeyConfig(Section, frozen=True):
    """`[[keys]]`: an API key, of which only the SHA-256 is known."""

    name: Annotated[Name, Meta(description="Whose it is: shown in the log, unlike the key.")]
    sha256: Annotated[
        str,
        Meta(
            pattern="^[0-9a-fA-F]{64}$",
            description='SHA-256 of the key: `printf %s "$KEY" | sha256sum`. Take a long random '
            "key, as `openssl rand -hex 24` makes.",
        ),
    ]
    weight: Annotated[
        float,
        Meta(
            gt=0,
            le=100,
            description="Its share of the device beside the other keys that send at the time.",
        ),
    ] = 1.0


class KeysFile(Section, frozen=True):
    """The file that `server.keys_file` names."""

    keys: Annotated[list[KeyConfig], Meta(description="Those who are let in.")]


class Keys:
    """The keys that are let in.

    Args:
        by_digest: by the SHA-256 of each; where there are none, everyone is let in.
    """

    def __init__(self, by_digest: Mapping[bytes, Key]) -> None:
        self.by_digest = by_digest

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self.by_digest)

    def of(self, presented: bytes | None) -> Key:
        """Return whom a request counts for that came with this key.

        Raises:
            MissingKey: it came without.
            InvalidKey: it is none of the keys.
        """
        if not self.by_digest:
            return NO_KEY
        if not presented:
            raise MissingKey(
                "You didn't provide an API key. Send it as 'Authorization: Bearer KEY'."
            )
        key = self.by_digest.get(hashlib.sha256(presented).digest())
        if key is None:
            raise InvalidKey("Incorrect API key provided. Ask for one where this server is run.")
        return key


def read_keys(path: str) -> Keys:
    """Return the keys of a file; an empty path means none.

    Raises:
        ConfigError: unreadable or wrong; the message has the path of the field.
    """
    if not path:
        return Keys({})
    try:
        keys = _decode(Path(path).expanduser().read_bytes())
    except OSError as error:
        raise ConfigError(f"server.keys_file: {path} cannot be read: {error.strerror}") from None
    except ConfigError as error:
        raise ConfigError(f"server.keys_file: {path}: {error}") from None
    return Keys({bytes.fromhex(key.sha256): Key(key.name, key.weight) for key in keys})


def _decode(data: bytes) -> list[KeyConfig]:
    try:
        raw = msgspec.toml.decode(data, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ConfigError(f"not valid TOML: {error}") from None
    try:
        keys = msgspec.convert(raw, KeysFile).keys
    except msgspec.ValidationError as error:
        raise ConfigError(_without_keys(explain(error, raw, KeysFile))) from None
    for problem in _problems(keys):
        raise ConfigError(problem)
    return keys


def _without_keys(problem: str) -> str:
    """Leave out the value where it may be a key that was written in the place of its SHA-256."""
    return problem.partition(", got ")[0] if ".sha256: " in problem else problem


def _problems(keys: list[KeyConfig]) -> Iterator[str]:
    if not keys:
        yield "keys: must have a key, got []; without keys_file everyone is let in"
    names: dict[str, int] = {}
    digests: dict[bytes, int] = {}
    for i, key in enumerate(keys):
        first = names.setdefault(key.name, i)
        if first < i:
            yield f"keys[{i}].name: must be unique, got {key.name!r} as in keys[{first}].name"
        first = digests.setdefault(bytes.fromhex(key.sha256), i)
        if first < i:
            yield f"keys[{i}].sha256: must be unique, is the same as keys[{first}].sha256"
