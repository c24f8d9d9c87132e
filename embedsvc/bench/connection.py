"""A keep-alive HTTP/1.1 connection that costs a load client next to nothing.

Client and server share the machine in most measurements, so every microsecond here is taken from
the server: requests are built beforehand, replies are cut out of the stream by their length and
decoded straight into structs. Knows nothing of rates, clients or statistics. Event loop only.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from typing import NamedTuple, cast

import msgspec
from msgspec import Struct

from embedsvc.errors import EmbedsvcError

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_CLOSE = re.compile(rb"\r\nconnection: *close", re.IGNORECASE)


class Answer(NamedTuple):
    """One HTTP reply."""

    status: int
    head: bytes
    body: bytes


class ReplyError(EmbedsvcError):
    """The server's answer is not what it should be."""


class Connection(asyncio.Protocol):
    """One connection, one request at a time; connects anew when the server has closed it."""

    def __init__(self, host: str, port: int) -> None:
        self._address = (host, port)
        self._transport: asyncio.Transport | None = None
        self._received = b""
        self._answered: asyncio.Future[Answer] | None = None

    @property
    def connected(self) -> bool:
        """Whether a request can be written, as far as is known here."""
        return self._transport is not None and not self._transport.is_closing()

    async def connect(self) -> None:
        """Connect, unless connected.

        Raises:
            OSError: the server cannot be reached.
        """
        if not self.connected:
            self._received = b""
            loop = asyncio.get_running_loop()
            await loop.create_connection(lambda: self, *self._address)

    def start(self, request: bytes) -> asyncio.Future[Answer]:
        """Write one request to the open connection; return its answer to come.

        The future fails as `send` does. Cancel it only together with `close`.
        """
        assert self._transport is not None
        self._answered = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return self._answered

    async def send(self, request: bytes) -> Answer:
        """Send one request and return its answer.

        Raises:
            OSError: no connection, or it was lost before the answer was complete.
            ReplyError: the answer has no content-length.
        """
        await self.connect()
        return await self.start(request)

    def close(self) -> None:
        """Close the connection."""
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport (called by the loop)."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Finish the answer once its last byte is there (called by the loop)."""
        self._received = received = self._received + data if self._received else data
        end = received.find(b"\r\n\r\n")
        if end < 0:
            return
        head = received[: end + 2]
        length = _LENGTH.search(head)
        if length is None:
            self._fail(ReplyError(f"no content-length in {head!r:.200}"))
            return
        if len(received) < end + 4 + int(length[1]):
            return
        self._received = b""
        if _CLOSE.search(head):
            self.close()
        if self._answered is not None and not self._answered.done():
            self._answered.set_result(Answer(int(head[9:12]), head, received[end + 4 :]))

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail the request in flight, if any (called by the loop)."""
        self._transport = None
        self._fail(exc or ConnectionResetError("the server closed the connection"))

    def _fail(self, error: Exception) -> None:
        if self._answered is not None and not self._answered.done():
            self._answered.set_exception(error)


def post(
    host: str, port: int, path: str, body: bytes, headers: Mapping[str, str] | None = None
) -> bytes:
    """Return the bytes of a JSON POST request."""
    all_headers = {
        "host": f"{host}:{port}",
        "content-type": "application/json",
        "content-length": str(len(body)),
        **(headers or {}),
    }
    return _head("POST", path, all_headers) + body


def get(host: str, port: int, path: str) -> bytes:
    """Return the bytes of a GET request."""
    return _head("GET", path, {"host": f"{host}:{port}"})


def _head(method: str, path: str, headers: Mapping[str, str]) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode()


def embeddings_body(model: str, texts: list[str], encoding_format: str = "base64") -> bytes:
    """Return the JSON body of an embeddings request."""
    given = {"model": model, "input": texts, "encoding_format": encoding_format}
    return msgspec.json.encode(given)


class Embedding(Struct):
    """One vector of a reply: floats, or little-endian float32 in base64."""

    embedding: list[float] | str
    index: int


class Usage(Struct):
    """Token counts of a reply."""

    prompt_tokens: int


class Reply(Struct):
    """The reply of `POST /v1/embeddings`, as far as it is checked."""

    data: list[Embedding]
    usage: Usage


_reply = msgspec.json.Decoder(Reply)


def read_reply(body: bytes, n_texts: int, dim: int) -> Reply:
    """Decode a reply and check that it has one vector of `dim` components per text, in order.

    Raises:
        ReplyError: it has not.
    """
    try:
        reply = _reply.decode(body)
    except msgspec.DecodeError as error:
        raise ReplyError(f"not an embeddings reply: {error}") from None
    if len(reply.data) != n_texts:
        raise ReplyError(f"{len(reply.data)} vectors for {n_texts} texts")
    for index, item in enumerate(reply.data):
        components = item.embedding
        # 4 bytes a component, 4 characters for every 3 bytes begun.
        expected = dim if isinstance(components, list) else (dim * 4 + 2) // 3 * 4
        if item.index != index or len(components) != expected:
            raise ReplyError(f"vector {index}: index {item.index}, size {len(components)}")
    return reply
