"""The request body, read up to a limit of its own and one of all bodies together.

Knows of ASGI's `receive` and of nothing else. Runs on the event loop.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from embedsvc.errors import BodyTooLarge, ClientGone, Overloaded, UnsupportedEncoding

if TYPE_CHECKING:
    from litestar.types import Receive

# Smaller bodies are read whatever others hold.
SMALL_BYTES = 64 * 1024
# So many of the largest bodies are read or worked on at once; as texts they take up to four times
# the memory.
LARGEST_AT_ONCE = 4
# When those who find no room may come back.
ROOM_RETRY_S = 2.0

Headers = Mapping[bytes, bytes]


class Room:
    """Memory for the bodies of all requests in progress."""

    def __init__(self) -> None:
        self._held_bytes = 0

    def share(self, largest_bytes: int) -> Share:
        """Return the share of a request, to be entered for as long as the request lasts.

        Args:
            largest_bytes: most bytes of one body.
        """
        return Share(self, largest_bytes)

    def take(self, n_bytes: int, limit_bytes: int) -> None:
        """Take more of it.

        Raises:
            Overloaded: it is more than there is.
        """
        if self._held_bytes + n_bytes > limit_bytes:
            raise Overloaded(
                "The bodies of other requests fill the memory for large ones; send this one again.",
                retry_after_s=ROOM_RETRY_S,
            )
        self._held_bytes += n_bytes

    def give_back(self, n_bytes: int) -> None:
        """Let others have it."""
        self._held_bytes -= n_bytes


class Share:
    """What one request holds of a room; nothing for a small body.

    Attributes:
        largest_bytes: most that its body may have.
    """

    __slots__ = ("_held_bytes", "_room", "largest_bytes")

    def __init__(self, room: Room, largest_bytes: int) -> None:
        self.largest_bytes = largest_bytes
        self._held_bytes = 0
        self._room = room

    def __enter__(self) -> Share:
        """Hold nothing yet."""
        return self

    def __exit__(self, *_: object) -> None:
        """Give everything back."""
        self._room.give_back(self._held_bytes)

    def hold(self, n_bytes: int) -> None:
        """Take room for a body of so many bytes.

        Raises:
            BodyTooLarge: it is larger than a body may be.
            Overloaded: there is no room.
        """
        if n_bytes > self.largest_bytes:
            raise BodyTooLarge(
                f"The request body is larger than {self.largest_bytes} bytes; send fewer texts at "
                "a time."
            )
        if n_bytes > SMALL_BYTES:
            self._room.take(n_bytes - self._held_bytes, LARGEST_AT_ONCE * self.largest_bytes)
            self._held_bytes = n_bytes


async def read_body(headers: Headers, receive: Receive, share: Share) -> bytes | bytearray:
    """Read the body of one request.

    Packed ones are refused: a small one may unpack to any size, and no client of this API packs.

    Raises:
        BodyTooLarge: it is larger than a body may be.
        Overloaded: other bodies leave no room for it.
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
    if declared.isdigit() and int(declared) > share.largest_bytes:
        share.hold(int(declared))
    # Not copied where it comes in one piece.
    body: bytes | bytearray
    body, more = await _part(receive)
    share.hold(len(body))
    if more:
        body = bytearray(body)
        while more:
            part, more = await _part(receive)
            body += part
            share.hold(len(body))
    return body


async def _part(receive: Receive) -> tuple[bytes, bool]:
    """Return the next part, and whether more follow."""
    message = await receive()
    if message["type"] != "http.request":
        raise ClientGone("The client left before the end of its request.")
    return message.get("body", b""), message.get("more_body", False)
