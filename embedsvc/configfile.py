"""From a TOML file and flags to a checked `Config`; every mistake names the field's path."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import asdict, replace

from embedsvc.config import (
    DEFAULT_NAME,
    DEFAULT_SHA256,
    DEFAULT_SOURCE,
    BatchingConfig,
    Config,
    ModelConfig,
    ServerConfig,
    VersionConfig,
)
from embedsvc.errors import ConfigError
from embedsvc.fields import explain, fields

# The longest inputs of published embedders; an edge above it is a typing mistake.
MAX_BUCKET_TOKENS = 32_768
_DEVICE = re.compile(r"cpu|cuda(:\d+)?")


class Overrides(Struct, frozen=True, kw_only=True):
    """Values of flags and environment variables; what is not given leaves the file's value.

    Attributes:
        model: a source, served instead of the file's models.
        host: for `server.host`.
        port: for `server.port`.
        workers: for `server.workers`.
        device: for every version.
        dtype: for every version.
        backend: for every version.
    """

    model: str | None = None
    host: str | None = None
    port: int | None = None
    workers: int | None = None
    device: str | None = None
    dtype: str | None = None
    backend: str | None = None


def load(path: Path | None = None, overrides: Overrides | None = None) -> Config:
    """Return the effective configuration: file, then overrides, then defaults.

    Every model of the result has exactly one entry in `versions` and no `source`.

    Raises:
        ConfigError: unreadable or wrong; the message starts with the field's path.
    """
    config = _decode({} if path is None else _read(path))
    config = _override(config, overrides or Overrides())
    # Flags come as plain values: decoding once more holds them to the same limits.
    config = _decode(msgspec.to_builtins(config))
    check(config)
    return config


def check(config: Config) -> None:
    """Check what single fields cannot tell.

    Raises:
        ConfigError: the message starts with the path of a field.
    """
    for problem in _problems(config):
        raise ConfigError(problem)


def _read(path: Path) -> dict[str, Any]:
    try:
        return msgspec.toml.decode(path.read_bytes(), type=dict[str, Any])
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None


def _decode(raw: dict[str, Any]) -> Config:
    try:
        return msgspec.convert(raw, Config)
    except msgspec.ValidationError as error:
        raise ConfigError(explain(error, raw, Config)) from None


def _override(config: Config, overrides: Overrides) -> Config:
    # An empty flag is the same as none, as it is for environment variables.
    given = {name: value for name, value in asdict(overrides).items() if value not in (None, "")}
    server = {name: given[name] for name in ("host", "port", "workers") if name in given}
    version: dict[str, Any] = {
        name: given[name] for name in ("device", "dtype", "backend") if name in given
    }
    models = config.models
    if "model" in given or not models:
        source = given.get("model", DEFAULT_SOURCE)
        models = [ModelConfig(name=model_name(source), source=source)]
    return replace(
        config,
        server=replace(config.server, **server),
        models=[_spelled_out(model, f"models[{i}]", version) for i, model in enumerate(models)],
    )


def _spelled_out(model: ModelConfig, path: str, changes: dict[str, Any]) -> ModelConfig:
    """Turn the shorthand `source` into a version, so that nothing else knows of it."""
    if bool(model.source) == bool(model.versions):
        given = "both" if model.source else "neither"
        raise ConfigError(f"{path}: must have either source or versions, got {given}")
    versions = model.versions or [VersionConfig(source=model.source)]
    return replace(model, source="", versions=[_pinned(replace(v, **changes)) for v in versions])


def _pinned(version: VersionConfig) -> VersionConfig:
    """Check the embedded default wherever it is served without a hash of its own."""
    if version.source == DEFAULT_SOURCE and not version.sha256:
        return replace(version, sha256=DEFAULT_SHA256)
    return version


def model_name(source: str) -> str:
    """Return the public name of a model that was given only by its source."""
    if source == DEFAULT_SOURCE:
        return DEFAULT_NAME
    if source.startswith("package:"):
        name = source.removeprefix("package:")
    elif source.startswith(("/", ".", "~")) or Path(source).is_dir():
        name = Path(source).expanduser().resolve().name
    else:
        name = source.partition("@")[0]
    return re.sub(r"[\s?#]+", "-", name)


# --- checks across fields -----------------------------------------------------------------------


def _problems(config: Config) -> Iterator[str]:
    yield from _not_finite("", config)
    server = config.server
    if server.timeout_s > server.max_timeout_s:
        limit = f"server.max_timeout_s ({server.max_timeout_s:g})"
        yield f"server.timeout_s: must be at most {limit}, got {server.timeout_s:g}"
    for i, device in enumerate(config.devices):
        if not _DEVICE.fullmatch(device.name):
            yield f"devices[{i}].name: must be cpu, cuda or cuda:N, got {device.name!r}"
    yield from _repeated((f"devices[{i}].name", d.name) for i, d in enumerate(config.devices))
    yield from _repeated(_public_names(config))
    for i, model in enumerate(config.models):
        if len(model.versions) > 1:
            yield f"models[{i}].versions: must be one version for now, got {len(model.versions)}"
        for j, version in enumerate(model.versions):
            path = f"models[{i}].versions[{j}]"
            if version.device != "auto" and not _DEVICE.fullmatch(version.device):
                yield f"{path}.device: must be auto, cpu, cuda or cuda:N, got {version.device!r}"
            yield from _bucket_problems(f"{path}.batching.buckets", version)
            yield from _queue_problems(f"{path}.batching", version.batching, server)


def _not_finite(path: str, value: object) -> Iterator[str]:
    if isinstance(value, Struct):
        for field in fields(type(value)):
            yield from _not_finite(f"{path}.{field.name}".lstrip("."), getattr(value, field.name))
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from _not_finite(f"{path}[{i}]", item)
    elif isinstance(value, float) and not math.isfinite(value):
        yield f"{path}: must be a finite number, got {value}"


def _public_names(config: Config) -> Iterator[tuple[str, str]]:
    for i, model in enumerate(config.models):
        yield f"models[{i}].name", model.name
        for j, alias in enumerate(model.aliases):
            yield f"models[{i}].aliases[{j}]", alias


def _repeated(named: Iterator[tuple[str, str]]) -> Iterator[str]:
    first: dict[str, str] = {}
    for path, name in named:
        if name in first:
            yield f"{path}: must be unique, got {name!r} as in {first[name]}"
        first.setdefault(name, path)


def _bucket_problems(path: str, version: VersionConfig) -> Iterator[str]:
    edges = version.batching.buckets
    if edges == "auto":
        return
    if not edges:
        yield f'{path}: must have an edge or be "auto", got []'
    elif any(low >= high for low, high in pairwise(edges)):
        yield f"{path}: must ascend, got {edges}"
    elif edges[-1] > MAX_BUCKET_TOKENS:
        yield f"{path}: must be at most {MAX_BUCKET_TOKENS} tokens, got {edges[-1]}"
    elif version.max_length != "auto" and edges[-1] > version.max_length:
        yield f"{path}: must be at most max_length ({version.max_length}), got {edges[-1]}"


def _queue_problems(path: str, batching: BatchingConfig, server: ServerConfig) -> Iterator[str]:
    """A request within the limits of the server must fit into an idle queue."""
    if batching.max_queue_sequences < server.max_inputs:
        limit = f"server.max_inputs ({server.max_inputs})"
        got = batching.max_queue_sequences
        yield f"{path}.max_queue_sequences: must be at least {limit}, got {got}"
    if batching.max_queue_tokens < server.max_request_tokens:
        limit = f"server.max_request_tokens ({server.max_request_tokens})"
        got = batching.max_queue_tokens
        yield f"{path}.max_queue_tokens: must be at least {limit}, got {got}"
