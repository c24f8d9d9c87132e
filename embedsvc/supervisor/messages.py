"""What supervisor and worker tell each other: msgpack structs, each after its length in four bytes.

Both ends of the socket pair live on event loops; only a worker's first message is read before its
loop runs.
"""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress
from io import RawIOBase
from typing import Any, Generic, TypeVar

import msgspec
from msgspec import Struct

from embedsvc.config import Config
from embedsvc.engine.sequence import Key
from embedsvc.totals import Family

_LENGTH_BYTES = 4


class Start(Struct, frozen=True, tag=True):
    """To a worker: load this. The first message.

    Attributes:
        config: checked.
        keys: by digest, as they were read with the configuration.
        number: of the worker.
        n_workers: of all.
    """

    config: Config
    keys: dict[bytes, Key]
    number: int
    n_workers: int


class Serve(Struct, frozen=True, tag=True):
    """To a worker: accept from these of the shared sockets and from no others."""

    sockets: list[int]


class Retire(Struct, frozen=True, tag=True):
    """To a worker: a successor has taken your place; end when your connections have."""


class Drain(Struct, frozen=True, tag=True):
    """To a worker: the whole server stops."""


class TellMetrics(Struct, frozen=True, tag=True):
    """To a worker: answer with `OwnMetrics`."""


class AllMetrics(Struct, frozen=True, tag=True):
    """To a worker: the answer to its oldest open `AskMetrics`."""

    text: bytes


class Loading(Struct, frozen=True, tag=True):
    """From a worker that loads, every second: its event loop runs."""


class Loaded(Struct, frozen=True, tag=True):
    """From a worker: every model is ready."""

    info: dict[str, Any]


class Failed(Struct, frozen=True, tag=True):
    """From a worker: it cannot be started, and why."""

    reason: str


class OwnMetrics(Struct, frozen=True, tag=True):
    """From a worker: its numbers; also unasked, when it ends."""

    families: list[Family]


class AskMetrics(Struct, frozen=True, tag=True):
    """From a worker: somebody wants the metrics of all."""


ToWorker = Start | Serve | Retire | Drain | TellMetrics | AllMetrics
FromWorker = Loading | Loaded | Failed | OwnMetrics | AskMetrics
T = TypeVar("T")

_encode = msgspec.msgpack.Encoder().encode
TO_WORKER: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)
FROM_WORKER: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)


class Line(Generic[T]):
    """One end of the socket pair; messages of one type come in.

    Args:
        streams: over it.
        decoder: of what comes in.
    """

    def __init__(
        self,
        streams: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        decoder: msgspec.msgpack.Decoder[T],
    ) -> None:
        self._reader, self._writer = streams
        self._decoder = decoder

    @classmethod
    async def open(cls, end: socket.socket, decoder: msgspec.msgpack.Decoder[T]) -> Line[T]:
        """Take a connected socket over."""
        return cls(await asyncio.open_connection(sock=end), decoder)

    def tell(self, message: ToWorker | FromWorker) -> None:
        """Send a message; who is gone does not get it."""
        self._writer.write(framed(message))

    async def hear(self) -> T | None:
        """Return the next message; None when the other end is closed."""
        try:
            size = int.from_bytes(await self._reader.readexactly(_LENGTH_BYTES))
            return self._decoder.decode(await self._reader.readexactly(size))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None

    async def flush(self) -> None:
        """Wait until all that was told is sent, or nobody is there."""
        with suppress(ConnectionError):
            await self._writer.drain()

    def close(self) -> None:
        """Close this end."""
        self._writer.close()


def framed(message: ToWorker | FromWorker) -> bytes:
    """Return a message as it travels."""
    encoded = _encode(message)
    return len(encoded).to_bytes(_LENGTH_BYTES) + encoded


def first_message(end: socket.socket) -> ToWorker | None:
    """Wait for a worker's first message, before its event loop runs; None when nobody is there."""
    with end.makefile("rb", buffering=0) as stream:
        size = int.from_bytes(_exactly(stream, _LENGTH_BYTES))
        encoded = _exactly(stream, size)
    return TO_WORKER.decode(encoded) if encoded else None


def _exactly(stream: RawIOBase, size: int) -> bytes:
    """Read so many bytes and none more; fewer where the other end is closed."""
    read = b""
    while len(read) < size and (part := stream.read(size - len(read))):
        read += part
    return read
