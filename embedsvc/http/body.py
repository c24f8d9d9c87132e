"""The request body: read up to a limit, and unpacked.

Knows of ASGI's `receive` and of nothing else. Runs on the event loop.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Mapping

from litestar.types import Receive

from embedsvc.errors import BodyTooLarge, ClientGone, InvalidRequest, UnsupportedEncoding

# Unpacked between two turns of the event loop; about 5 ms.
GUNZIP_STEP_BYTES = 1024 * 1024
# zlib's window bits for a gzip wrapper.
_GZIP = 31

Headers = Mapping[bytes, bytes]


async def read_body(headers: Headers, receive: Receive, limit_bytes: int) -> bytes | bytearray:
    """Read and unpack the body of one request.

    Raises:
        BodyTooLarge: packed or unpacked it is larger than the limit.
        UnsupportedEncoding: it is packed in another way than gzip.
        InvalidRequest: it is not the gzip it is said to be.
        RequestTimeout: it takes too long to arrive.
        ClientGone: the client left before the end.
    """
    encoding = headers.get(b"content-encoding", b"").lower()
    if encoding not in (b"", b"identity", b"gzip", b"x-gzip"):
        raise UnsupportedEncoding("This server reads bodies encoded with gzip, or unencoded.")
    declared = headers.get(b"content-length", b"")
    if declared.isdigit() and int(declared) > limit_bytes:
        raise _too_large(limit_bytes)
    body = await _read_all(receive, limit_bytes)
    if encoding in (b"gzip", b"x-gzip"):
        return await _gunzip(body, limit_bytes)
    return body


async def _read_all(receive: Receive, limit_bytes: int) -> bytes | bytearray:
    # Not copied where it comes in one piece.
    body: bytes | bytearray
    body, more = await _part(receive)
    if more:
        body = bytearray(body)
        while more and len(body) <= limit_bytes:
            part, more = await _part(receive)
            body += part
    if len(body) > limit_bytes:
        raise _too_large(limit_bytes)
    return body


async def _part(receive: Receive) -> tuple[bytes, bool]:
    """Return the next part, and whether more follow."""
    message = await receive()
    if message["type"] != "http.request":
        raise ClientGone("The client left before the end of its request.")
    return message.get("body", b""), message.get("more_body", False)


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
