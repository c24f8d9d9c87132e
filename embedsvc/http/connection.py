"""One HTTP/1.1 connection: uvicorn's, corrected where clients of this API are hurt.

Knows nothing of the app. Runs on the event loop.
"""

from __future__ import annotations

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from embedsvc.errors import InvalidRequest
from embedsvc.http.replies import error_reply

# What turns an ordinary request into an offer of another protocol.
_OFFER = frozenset((b"upgrade", b"http2-settings"))


class Connection(HttpToolsProtocol):
    """Ignores offers of other protocols, and answers malformed HTTP with the error envelope.

    Java's HttpClient offers HTTP/2 with every first request. The parser takes the offer for the end
    of HTTP and skips the body; since a server may ignore an offer (RFC 9110, 7.8), the request is
    parsed again without it.
    """

    def on_headers_complete(self) -> None:
        """Start the request, unless it will be parsed again."""
        if not self.parser.should_upgrade():
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        """End the body of a request that was started."""
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def data_received(self, data: bytes) -> None:
        """Parse what arrived."""
        self._unset_keepalive_if_required()
        try:
            while data:
                data = self._feed(data)
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")

    def _feed(self, data: bytes) -> bytes:
        """Parse data; return what is to be parsed after an offer was removed."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            method = self.parser.get_method()
            if method == b"CONNECT":
                raise httptools.HttpParserError("CONNECT") from offer
            version = self.parser.get_http_version().encode()
            self.parser = httptools.HttpRequestParser(self)
            # As uvicorn's own: a client may send on after it said `Connection: close`.
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
            head = self._head_without_offer(b"%s %s HTTP/%s" % (method, self.url, version))
            return head + data[offer.args[0] :]
        return b""

    def _head_without_offer(self, request_line: bytes) -> bytes:
        lines = [request_line]
        for name, value in self.headers:
            if name == b"connection":
                tokens = [token.strip() for token in value.split(b",")]
                value = b", ".join(token for token in tokens if token.lower() not in _OFFER)
            if name not in _OFFER:
                lines.append(b"%s: %s" % (name, value))
        return b"\r\n".join([*lines, b"", b""])

    def send_400_response(self, msg: str) -> None:
        """Answer what is not HTTP and close; requests read before it are answered first."""
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete and not cycle.more_body:
            cycle.keep_alive = False
            return
        reply = error_reply(InvalidRequest(msg), (b"connection", b"close"))
        head = b"".join(b"%s: %s\r\n" % header for header in reply.headers)
        self.transport.write(b"HTTP/1.1 400 Bad Request\r\n" + head + b"\r\n" + reply.body)
        self.transport.close()
