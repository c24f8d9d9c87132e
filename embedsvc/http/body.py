"""The request body, read up to a limit.

Knows of ASGI's `receive` and of nothing else. Runs on the event loop.
"""

from __future__ import annotations

from collections.abc import Mapping

from litestar.types import Receive

from embedsvc.errors import BodyTooLarge, ClientGone, UnsupportedEncoding

Headers = Mapping[bytes, bytes]


async def read_body(headers: Headers, receive: Receive, limit_bytes: int) -> bytes | bytearray:
    """Read the body of one request.

    Packed ones are refused: a small one may unpack to any size, and no client of this API packs.

    Raises:
        BodyTooLarge: it is larger than the limit.
        UnsupportedEncoding: it is packed.
        RequestTimeout: it takes too long to arrive.
        ClientGone: the client left before the end.
    """
    encoding = headers.get(b"content-encoding", b"").lower()
    if encoding not in (b"", b"identity"):
        raise UnsupportedEncoding(
            "This server reads bodies as they are; send yours without Content-Encoding."
        )
    declared = headers.get(b"content-length", b"")
    if declared.isdigit() and int(declared) > limit_bytes:
        raise _too_large(limit_bytes)
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


def _too_large(limit_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(
        f"The request body is larger than {limit_bytes} bytes; send fewer texts at a time."
    )
