"""Requests out of bytes: httptools, within size limits, and deaf to offers of other protocols.

Knows nothing of responses or sockets. Runs on the event loop.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol
from urllib.parse import unquote

import httptools

from embedsvc.errors import HeadersTooLarge, InvalidRequest, RequestError
from embedsvc.http.replies import Header

# A request's line and headers together; also what may lie between two parts of a body.
MAX_HEAD_BYTES = 64 * 1024
# What turns an ordinary request into an offer of another protocol.
_OFFER = frozenset((b"upgrade", b"http2-settings"))
_NO_CODING = (
    "This server reads bodies with a Content-Length or with `Transfer-Encoding: chunked`, and in "
    "no other transfer encoding."
)
_NO_HTTP = "This is not an HTTP request that could be read."


@dataclass(slots=True)
class Head:
    """What comes before the body of a request.

    Attributes:
        method: as sent, e.g. `POST`.
        target: as sent, e.g. `/v1/models/a%2Fb?c=d`.
        version: `1.1` or `1.0`.
        headers: in order, names in lower case.
        keep_alive: the client may send another request after this one.
        expects_continue: it waits for a word before it sends the body.
    """

    method: str
    target: bytes
    version: str
    headers: list[Header]
    keep_alive: bool
    expects_continue: bool


class Requests(Protocol):
    """Is told what was parsed."""

    def begin_request(self, head: Head) -> None:
        """Take the head of a request."""

    def add_body(self, part: bytes) -> None:
        """Take a part of its body."""

    def end_request(self) -> None:
        """Take note that it is complete."""


class RequestParser:
    """Parses what one connection receives.

    Java's HttpClient offers HTTP/2 with every first request; httptools takes the offer for the end
    of HTTP and skips the body. Since a server may ignore an offer (RFC 9110, 7.8), such a request
    is parsed again without it.

    Attributes:
        in_head: a head has begun and not ended.
    """

    def __init__(self, requests: Requests) -> None:
        self.in_head = False
        self._requests = requests
        self._parser = self._fresh_parser()
        self._target = b""
        self._headers: list[Header] = []
        # Bytes since there was something to tell.
        self._silent_bytes = 0

    def feed(self, data: bytes) -> None:
        """Parse what arrived; of no use any more after an error.

        Raises:
            InvalidRequest: it is not HTTP.
            HeadersTooLarge: a head is larger than `MAX_HEAD_BYTES`.
        """
        self._silent_bytes += len(data)
        try:
            while data:
                data = self._feed(data)
        except httptools.HttpParserCallbackError as error:
            # What a callback raised: one of our errors, or a bug.
            raise error.__context__ or error from None
        except httptools.HttpParserError as error:
            raise InvalidRequest(_NO_HTTP) from error
        if self._silent_bytes > MAX_HEAD_BYTES:
            raise _too_large()

    # --- called by httptools ---------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """Begin a head."""
        self.in_head = True
        self._target = b""
        self._headers = []

    def on_url(self, target: bytes) -> None:
        """Add to the target."""
        self._target += target

    def on_header(self, name: bytes, value: bytes) -> None:
        """Add a header; what follows a body in chunks is none."""
        if self.in_head:
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """Tell of a request, unless it will be parsed again."""
        self.in_head = False
        if self._silent_bytes > MAX_HEAD_BYTES and self._head_bytes() > MAX_HEAD_BYTES:
            raise _too_large()
        self._silent_bytes = 0
        parser = self._parser
        if parser.should_upgrade():
            return
        # The parser takes a list that ends with chunked for chunked, whatever comes before it.
        codings = [value.lower() for name, value in self._headers if name == b"transfer-encoding"]
        if codings and codings != [b"chunked"]:
            raise InvalidRequest(_NO_CODING)
        version = parser.get_http_version()
        head = Head(
            method=parser.get_method().decode("ascii"),
            target=self._target,
            version=version,
            headers=self._headers,
            keep_alive=version != "1.0" and parser.should_keep_alive(),
            expects_continue=(b"expect", b"100-continue") in self._headers,
        )
        self._requests.begin_request(head)

    def on_body(self, part: bytes) -> None:
        """Hand a part of the body on."""
        self._silent_bytes = 0
        self._requests.add_body(part)

    def on_message_complete(self) -> None:
        """Tell that a request is complete, unless it will be parsed again."""
        self._silent_bytes = 0
        if not self._parser.should_upgrade():
            self._requests.end_request()

    # --- details ---------------------------------------------------------------------------------

    def _fresh_parser(self) -> httptools.HttpRequestParser:
        parser = httptools.HttpRequestParser(self)
        # A client may send on after it said `Connection: close`; that is ignored, not refused.
        parser.set_dangerous_leniencies(lenient_data_after_close=True)
        return parser

    def _feed(self, data: bytes) -> bytes:
        """Parse data; return what is to be parsed after an offer was removed."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            method = self._parser.get_method()
            if method == b"CONNECT":
                raise InvalidRequest("This server is no proxy.") from offer
            version = self._parser.get_http_version().encode()
            self._parser = self._fresh_parser()
            head = self._head_without_offer(b"%s %s HTTP/%s" % (method, self._target, version))
            return head + data[offer.args[0] :]
        return b""

    def _head_without_offer(self, request_line: bytes) -> bytes:
        lines = [request_line]
        for name, value in self._headers:
            if name == b"connection":
                tokens = [token.strip() for token in value.split(b",")]
                value = b", ".join(token for token in tokens if token.lower() not in _OFFER)
            if name not in _OFFER:
                lines.append(b"%s: %s" % (name, value))
        return b"\r\n".join([*lines, b"", b""])

    def _head_bytes(self) -> int:
        return len(self._target) + sum(len(name) + len(value) + 4 for name, value in self._headers)


@lru_cache(maxsize=64)
def split_target(target: bytes) -> tuple[str, bytes, bytes]:
    """Return path, raw path and query of a request's target.

    Raises:
        InvalidRequest: it is neither a path nor a URL.
    """
    try:
        url = httptools.parse_url(target)
        raw_path = url.path or b"/"
        return unquote(raw_path.decode("ascii")), raw_path, url.query or b""
    except (httptools.HttpParserInvalidURLError, UnicodeDecodeError) as error:
        raise InvalidRequest(_NO_HTTP) from error


def _too_large() -> RequestError:
    return HeadersTooLarge(
        f"The request's headers are larger than {MAX_HEAD_BYTES} bytes; send fewer of them."
    )
