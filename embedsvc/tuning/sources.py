"""Reads what `tune` is given: a server's metrics, files of lengths, texts or measured points.

Every mistake is a `ConfigError` that names the flag, the place and what to do. Blocks.
"""

from __future__ import annotations

import http.client
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import msgspec
from msgspec import Struct

from embedsvc.errors import ConfigError
from embedsvc.tuning.histogram import Counts
from embedsvc.tuning.lengths import check_enough, from_metrics, from_numbers
from embedsvc.tuning.predict import Series

FETCH_TIMEOUT_S = 10.0
# Larger than the metrics of hundreds of models.
MOST_BYTES = 64 << 20


@dataclass(slots=True, frozen=True)
class Source:
    """Where the lengths come from; exactly one is given.

    Attributes:
        from_metrics: address of a server or of its `/metrics`.
        lengths: file of numbers.
        texts: file of texts, JSONL or one a line.
    """

    from_metrics: str | None = None
    lengths: Path | None = None
    texts: Path | None = None

    @property
    def origin(self) -> str:
        """The flag and what it was given, for errors.

        Raises:
            ConfigError: none is given, or several are.
        """
        named = {
            "--from-metrics": self.from_metrics,
            "--lengths": self.lengths,
            "--texts": self.texts,
        }
        given = [f"{flag}: {value}" for flag, value in named.items() if value]
        if len(given) != 1:
            raise ConfigError(f"give one of {', '.join(named)}, got {len(given)} of them")
        return given[0]


class _Row(Struct):
    text: str


def read(source: Source, model: str) -> Counts | list[str]:
    """Return `(longest + 1,)` texts by length, or the texts, which are still to be tokenized.

    Args:
        source: where they are.
        model: public name, for metrics.

    Raises:
        ConfigError: nothing usable is there.
    """
    origin = source.origin
    try:
        if source.texts:
            return _texts(_content(source.texts))
        if source.from_metrics:
            counts = from_metrics(_fetched(source.from_metrics), model)
        else:
            assert source.lengths is not None
            counts = from_numbers(_content(source.lengths).splitlines())
        check_enough(counts)
    except ConfigError as error:
        raise ConfigError(f"{origin} {error}") from None
    return counts


def read_points(path: Path) -> list[Series]:
    """Return what `bench sweep` measured.

    Raises:
        ConfigError: unreadable, or something else.
    """
    try:
        return msgspec.json.decode(_content(path), type=list[Series])
    except ConfigError as error:
        raise ConfigError(f"--points: {path} {error}") from None
    except msgspec.MsgspecError as error:
        raise ConfigError(
            f"--points: {path} must be what `embedsvc bench sweep` wrote: {error}"
        ) from None


def _texts(content: str) -> list[str]:
    """Return texts of JSONL rows `{"text": …}`, or else one a line."""
    if not content.lstrip().startswith("{"):
        return [line for line in content.splitlines() if line.strip()]
    try:
        rows = msgspec.json.Decoder(_Row).decode_lines(content)
    except msgspec.MsgspecError as error:
        raise ConfigError(f'must have rows of {{"text": …}}: {error}') from None
    return [row.text for row in rows]


def _content(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError("is not text in UTF-8") from None


def _fetched(address: str) -> str:
    """Return the text at an address; without a path, of `/metrics` there."""
    url = address if "://" in address else f"http://{address}"
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ConfigError("is no address, such as http://127.0.0.1:8000/metrics")
    if parts.path in ("", "/"):
        url = parts._replace(path="/metrics").geturl()
    try:
        with urllib.request.urlopen(url, timeout=FETCH_TIMEOUT_S) as reply:
            content: bytes = reply.read(MOST_BYTES)
    except urllib.error.HTTPError as error:
        error.close()
        raise ConfigError(f"answers {error.code} {error.reason}; is it embedsvc?") from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise ConfigError(f"does not answer: {reason}; is the server running?") from None
    return content.decode(errors="replace")
