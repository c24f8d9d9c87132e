"""The request body: read up to a limit, unpacked, or thrown away.

Knows of ASGI's `receive` and of nothing else. Runs on the event loop.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Mapping

from litestar.types import Receive

from embedsvc.errors import BodyTooLarge, ClientGone, InvalidRequest, UnsupportedEncoding

# What is still read, and for how long, of a body that nobody wants: a connection closed over unread
# bytes is reset by the kernel, and the client loses the answer that says why.
DRAIN_BYTES = 256 * 1024 * 1024
DRAIN_S = 10.0
# Unpacked between two turns of the event loop; about 5 ms.
GUNZIP_STEP_BYTES = 1024 * 1024
# zlib's window bits for a gzip wrapper.
_GZIP = 31

Headers = Mapping[bytes, bytes]


class Body:
    """The body of one request.

    Attributes:
        complete: nothing is left to read.
    """

    __slots__ = ("_headers", "_receive", "complete")

    def __init__(self, headers: Headers, receive: Receive) -> None:
        self._headers = headers
        self._receive = receive
        self.complete = False

    async def read(self, limit_bytes: int) -> bytes | bytearray:
        """Read and unpack the body.

        Raises:
            BodyTooLarge: packed or unpacked it is larger than the limit.
            UnsupportedEncoding: it is packed in another way than gzip.
            InvalidRequest: it is not the gzip it is said to be.
            ClientGone: the client left before the end.
        """
        encoding = self._headers.get(b"content-encoding", b"").lower()
        if encoding not in (b"", b"identity", b"gzip", b"x-gzip"):
            raise UnsupportedEncoding("This server reads bodies encoded with gzip, or unencoded.")
        declared = self._headers.get(b"content-length", b"")
        if declared.isdigit() and int(declared) > limit_bytes:
            raise _too_large(limit_bytes)
        body = await self._read_all(limit_bytes)
        if encoding in (b"gzip", b"x-gzip"):
            return await _gunzip(body, limit_bytes)
        return body

    async def drain(self) -> bool:
        """Throw away what is left, within bounds; say whether the connection can be used again."""
        if self.complete:
            return True
        if b"expect" in self._headers:
            # The client waits for a word before it sends; the final answer is that word.
            return False
        left = DRAIN_BYTES
        try:
            async with asyncio.timeout(DRAIN_S):
                while not self.complete and left > 0:
                    left -= len(await self._chunk())
        except TimeoutError:
            return False
        return self.complete

    async def _read_all(self, limit_bytes: int) -> bytes | bytearray:
        first = await self._chunk()
        if self.complete and len(first) <= limit_bytes:
            return first
        body = bytearray(first)
        while not self.complete and len(body) <= limit_bytes:
            body += await self._chunk()
        if len(body) > limit_bytes:
            raise _too_large(limit_bytes)
        return body

    async def _chunk(self) -> bytes:
        message = await self._receive()
        if message["type"] != "http.request":
            self.complete = True
            raise ClientGone("The client left before the end of its request.")
        self.complete = not message.get("more_body", False)
        return message.get("body", b"")


async def _gunzip(body: bytes | bytearray, limit_bytes: int) -> bytearray:
    """Unpack step by step, so that neither memory nor the event loop is held by a small bomb."""
    unpacker = zlib.decompressobj(_GZIP)
    unpacked = bytearray()
    packed: bytes | bytearray = body
    while not unpacker.eof:
        try:
            step = unpacker.decompress(packed, GUNZIP_STEP_BYTES)
        except zlib.error as error:
            raise InvalidRequest("The request body is not valid gzip.") from error
        packed = unpacker.unconsumed_tail
        unpacked += step
        if len(unpacked) > limit_bytes:
            raise _too_large(limit_bytes)
        if not step and not packed and not unpacker.eof:
            raise InvalidRequest("The gzip of the request body ends too early.")
        if packed:
            await asyncio.sleep(0)
    if unpacker.unused_data:
        raise InvalidRequest("The request body goes on after the end of its gzip.")
    return unpacked


def _too_large(limit_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(
        f"The request body is larger than {limit_bytes} bytes; send fewer texts at a time."
    )
