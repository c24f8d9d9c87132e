"""What a connection writes: in one piece or in few, and not for ever."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from embedsvc.http.outbox import LARGE_BYTES, Outbox

SHORT_S = 0.01


class FakeTransport:
    """Remembers what is written, and has as much left to send as a test says."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.unsent_bytes = 0
        self.closed = False
        self.aborted = asyncio.Event()

    def write(self, data: bytes) -> None:
        """Remember."""
        self.written.append(data)

    def close(self) -> None:
        """Close when all is sent."""
        self.closed = True

    def abort(self) -> None:
        """Close now."""
        self.aborted.set()

    def is_closing(self) -> bool:
        """Say whether it was closed."""
        return self.closed

    def can_write_eof(self) -> bool:
        """Say no, as TLS does."""
        return False

    def get_write_buffer_size(self) -> int:
        """Return what is left to send."""
        return self.unsent_bytes


def outbox_on(transport: FakeTransport) -> Outbox:
    """Return an outbox with little patience."""
    loop = asyncio.get_running_loop()
    return Outbox(cast("asyncio.Transport", transport), loop, SHORT_S)


async def test_small_parts_leave_together_and_large_ones_alone() -> None:
    """Large ones are not copied."""
    transport, large = FakeTransport(), bytes(LARGE_BYTES)
    outbox_on(transport).write(b"a", b"b", large, b"c", b"", b"d")

    assert transport.written == [b"ab", large, b"cd"]
    assert transport.written[1] is large


async def test_nothing_is_written_to_a_closed_connection() -> None:
    """Its client is gone, which is no error."""
    transport = FakeTransport()
    outbox = outbox_on(transport)
    outbox.close()
    outbox.write(b"a")

    assert transport.written == []


@pytest.mark.parametrize("last", ["close", "end_writing", "block"])
async def test_what_is_not_read_is_cut_off(last: str) -> None:
    """Closed, half-closed or open, the rest waits no longer than a response may."""
    transport = FakeTransport()
    transport.unsent_bytes = 1
    getattr(outbox_on(transport), last)()

    await transport.aborted.wait()


async def test_what_is_read_in_time_is_not_cut_off() -> None:
    """The time ends with the response, or when all of it is read."""
    first, second, third = FakeTransport(), FakeTransport(), FakeTransport()
    read_late, read_early, left = outbox_on(first), outbox_on(second), outbox_on(third)
    for outbox in (read_late, read_early, left):
        outbox.block()
    read_late.end_response()
    read_late.unblock(between_responses=True)
    read_early.unblock(between_responses=False)
    read_early.end_response()
    left.drop()
    witness = FakeTransport()
    outbox_on(witness).block()
    await witness.aborted.wait()

    assert not any(t.aborted.is_set() for t in (first, second, third))


async def test_a_slow_reader_has_one_time_for_all_of_a_response() -> None:
    """Reading a little now and then does not begin it anew."""
    transport = FakeTransport()
    outbox = outbox_on(transport)
    while not transport.aborted.is_set():
        outbox.block()
        outbox.unblock(between_responses=False)
        await asyncio.sleep(0)

    assert not outbox.blocked


async def test_who_waits_to_write_goes_on_when_the_client_has_read_or_left() -> None:
    """Else its task would hang for ever."""
    for end in ("unblock", "drop"):
        outbox = outbox_on(FakeTransport())
        outbox.block()
        waiting = asyncio.create_task(outbox.unblocked())
        await asyncio.sleep(0)
        assert not waiting.done()
        if end == "drop":
            outbox.drop()
        else:
            outbox.unblock(between_responses=True)
        await waiting
