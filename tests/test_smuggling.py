"""Requests that two servers could read differently are refused, and nothing in them is served.

A proxy that ends a request elsewhere than the server behind it lets one client's bytes pass for the
next client's request. So what is ambiguous ends the connection.
"""

from __future__ import annotations

import pytest

from embedsvc.errors import InvalidRequest, RequestError
from embedsvc.http.parser import Head, RequestParser
from tests.http_fakes import URL, FakeService, counted
from tests.http_wire import Site, chunked, post

pytest_plugins = ["tests.http_fixtures"]

LINE = f"POST {URL} HTTP/1.1\r\n"
HEAD = f"{LINE}Host: x\r\n"
CHUNKED = "Transfer-Encoding: chunked\r\n"
JSON = '{"input":"a"}'
LENGTH = f"Content-Length: {len(JSON)}\r\n"
HIDDEN = post("hidden")

AMBIGUOUS_HEADS = {
    "a length and chunks": f"{HEAD}{LENGTH}{CHUNKED}\r\n0\r\n\r\n",
    "chunks and a length": f"{HEAD}{CHUNKED}{LENGTH}\r\n0\r\n\r\n",
    "two lengths": f"{HEAD}Content-Length: 1\r\n{LENGTH}\r\n{JSON}",
    "the same length twice": f"{HEAD}{LENGTH}{LENGTH}\r\n{JSON}",
    "a list of lengths": f"{HEAD}Content-Length: 13, 13\r\n\r\n{JSON}",
    "a length with a sign": f"{HEAD}Content-Length: +13\r\n\r\n{JSON}",
    "a hexadecimal length": f"{HEAD}Content-Length: 0xd\r\n\r\n{JSON}",
    "no length": f"{HEAD}Content-Length:\r\n\r\n{JSON}",
    "an endless length": f"{HEAD}Content-Length: {10**30}\r\n\r\n{JSON}",
    "gzip in chunks": f"{HEAD}Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "gzip in chunks, apart": f"{HEAD}Transfer-Encoding: gzip\r\n{CHUNKED}\r\n0\r\n\r\n",
    "chunks in gzip": f"{HEAD}Transfer-Encoding: chunked, gzip\r\n\r\n0\r\n\r\n",
    "chunks twice": f"{HEAD}{CHUNKED}{CHUNKED}\r\n0\r\n\r\n",
    "nothing and chunks": f"{HEAD}Transfer-Encoding: , chunked\r\n\r\n0\r\n\r\n",
    "chunks with a parameter": f"{HEAD}Transfer-Encoding: chunked;q=1\r\n\r\n0\r\n\r\n",
    "another coding": f"{HEAD}Transfer-Encoding: identity\r\n{LENGTH}\r\n{JSON}",
    "a misspelt coding": f"{HEAD}Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    "a hidden coding": f"{HEAD}Transfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n",
    "a space before the colon": f"{HEAD}Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
    "a folded header": f"{HEAD}Transfer-Encoding:\r\n chunked\r\n\r\n0\r\n\r\n",
    "a folded value": f"{HEAD}X-A: a\r\n b\r\n{LENGTH}\r\n{JSON}",
    "a space before the first header": f"{LINE} Host: x\r\n{LENGTH}\r\n{JSON}",
    "lines that end with LF": f"{HEAD}{LENGTH}\r\n{JSON}".replace("\r\n", "\n"),
    "one line that ends with LF": f"{HEAD}X-A: a\n{LENGTH}\r\n{JSON}",
    "one line that ends with CR": f"{HEAD}X-A: a\r{LENGTH}\r\n{JSON}",
    "NUL in a value": f"{HEAD}X-A: a\0b\r\n{LENGTH}\r\n{JSON}",
    "NUL in a name": f"{HEAD}X\0A: a\r\n{LENGTH}\r\n{JSON}",
    "a header without a name": f"{HEAD}: a\r\n{LENGTH}\r\n{JSON}",
    "a line without a colon": f"{HEAD}X-A\r\n{LENGTH}\r\n{JSON}",
}
AMBIGUOUS_CHUNKS = {
    "a size with a sign": "-3\r\nabc\r\n0\r\n\r\n",
    "a size with a prefix": "0x3\r\nabc\r\n0\r\n\r\n",
    "a size and a space": "3 \r\nabc\r\n0\r\n\r\n",
    "an endless size": "fffffffffffffffff\r\nabc\r\n0\r\n\r\n",
    "a size that ends with LF": "3\nabc\r\n0\r\n\r\n",
    "a size that ends with CR": "3\rabc\r\n0\r\n\r\n",
    "data that ends with LF": "3\r\nabc\n0\r\n\r\n",
    "data longer than its size": "2\r\nabc\r\n0\r\n\r\n",
    "an extension that ends with LF": "3;a\nabc\r\n0\r\n\r\n",
    "a line in a quoted extension": '3;a="\r\n"\r\nabc\r\n0\r\n\r\n',
    "a length behind the data": "0\r\nContent-Length: 5\r\n\r\n",
}
AMBIGUOUS = AMBIGUOUS_HEADS | {
    name: f"{HEAD}{CHUNKED}\r\n{chunks}" for name, chunks in AMBIGUOUS_CHUNKS.items()
}
PLAIN = {
    "a length": post(),
    "chunks": chunked(JSON, 4),
    "capital letters": chunked(JSON, 4).replace(CHUNKED, "TRANSFER-ENCODING:\tCHUNKED\r\n"),
    "an extension": f'{HEAD}{CHUNKED}\r\nd;a="b"\r\n{JSON}\r\n0\r\n\r\n',
    "lines before": "\r\n" + post(),
}


@pytest.mark.parametrize("request_text", AMBIGUOUS.values(), ids=AMBIGUOUS.keys())
async def test_what_is_ambiguous_ends_the_connection(
    site: Site, service: FakeService, request_text: str
) -> None:
    """It gets one 400, and what follows on the connection is not even read."""
    wire = await site.connect()
    wire.send(request_text, HIDDEN)
    reply = await wire.reply()

    assert reply.status == 400
    assert reply.headers["connection"] == "close"
    assert reply.json["error"]["type"] == InvalidRequest.type
    assert await wire.closed()
    assert service.calls == []
    assert counted(service) == {("400", InvalidRequest.reason): 1}


@pytest.mark.parametrize("request_text", PLAIN.values(), ids=PLAIN.keys())
async def test_what_is_plain_is_served(site: Site, request_text: str) -> None:
    """The rules are as strict as clients are."""
    wire = await site.connect()
    wire.send(request_text, post("next"))

    assert [(await wire.reply()).status for _ in range(2)] == [200, 200]


async def test_chunks_of_an_old_client_end_the_connection(site: Site, service: FakeService) -> None:
    """HTTP/1.0 knows no chunks, so that a proxy may have seen the end elsewhere."""
    wire = await site.connect()
    old = chunked(JSON, 4, "Connection: keep-alive\r\n").replace("HTTP/1.1", "HTTP/1.0")
    wire.send(old, HIDDEN)

    assert (await wire.reply()).headers["connection"] == "close"
    assert await wire.closed()
    assert len(service.calls) == 1


async def test_a_broken_body_costs_nobody_the_answer_before_it(site: Site) -> None:
    """Requests are answered in order, the broken one too."""
    wire = await site.connect()
    wire.send(post(), f"{HEAD}{CHUNKED}\r\n2\r\nabc\r\n")

    assert [(await wire.reply()).status for _ in range(2)] == [200, 400]
    assert await wire.closed()


class Heard:
    """What a parser tells, bodies joined."""

    def __init__(self) -> None:
        self.heads: list[Head] = []
        self.bodies: list[bytes] = []
        self.n_ended = 0

    def begin_request(self, head: Head) -> None:
        """Keep a head."""
        self.heads.append(head)
        self.bodies.append(b"")

    def add_body(self, part: bytes) -> None:
        """Join a body."""
        self.bodies[-1] += part

    def end_request(self) -> None:
        """Count."""
        self.n_ended += 1


def parsed(data: bytes, size: int) -> tuple[list[Head], list[bytes], int, str]:
    """Parse data in pieces of some bytes; return what was told, and the error if any."""
    heard, failure = Heard(), ""
    parser = RequestParser(heard)
    try:
        for start in range(0, len(data), size):
            parser.feed(data[start : start + size])
    except RequestError as error:
        failure = error.message
    return heard.heads, heard.bodies, heard.n_ended, failure


@pytest.mark.parametrize("request_text", [*AMBIGUOUS.values(), *PLAIN.values()])
def test_the_end_of_a_request_does_not_depend_on_how_it_arrives(request_text: str) -> None:
    """Cut into pieces of any size, a stream holds the same requests."""
    data = (request_text + HIDDEN).encode()
    whole = parsed(data, len(data))

    for size in (1, 2, 3, 7, 50):
        assert parsed(data, size) == whole
