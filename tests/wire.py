"""A server of whole requests whose answers a test decides, and the replies it may give."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import msgspec

DIM = 5
VECTOR = base64.b64encode(bytes(4 * DIM)).decode()
# Answers one request that was read whole; returns what is written back.
Answering = Callable[[bytes], Awaitable[bytes]]


def reply(n_texts: int, tokens: int = 7, vector: str = VECTOR) -> bytes:
    """Return a reply with `n_texts` vectors as JSON."""
    data = [{"embedding": vector, "index": index} for index in range(n_texts)]
    return msgspec.json.encode({"data": data, "usage": {"prompt_tokens": tokens}})


def http(body: bytes, status: str = "200 OK", extra: str = "") -> bytes:
    """Return a whole HTTP reply."""
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n{extra}\r\n".encode() + body


@asynccontextmanager
async def listening(answer: Answering) -> AsyncIterator[tuple[str, int]]:
    """Run a server of whole requests on a free port; yield its address."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.partition(b"content-length: ")[2].split(b"\r\n")[0])
            written = await answer(await reader.readexactly(length))
            for start in range(0, len(written), 50):
                writer.write(written[start : start + 50])
                await writer.drain()
            if not written or b"connection: close" in written:
                break

    handlers: list[asyncio.Task[None]] = []

    async def served(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        handlers.append(task)
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            await serve(reader, writer)
        writer.close()
        # The client may have left before its answer was written.
        with suppress(ConnectionError):
            await writer.wait_closed()

    server = await asyncio.start_server(served, "127.0.0.1", 0)
    async with server:
        yield "127.0.0.1", server.sockets[0].getsockname()[1]
        await asyncio.gather(*handlers)
