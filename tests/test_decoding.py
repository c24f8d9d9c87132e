"""Bodies of all sizes are decoded alike; large ones leave the event loop alone and end early."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embedsvc.config import ServerConfig
from embedsvc.errors import InvalidRequest, TooManyInputs, TooManyTokens
from embedsvc.http.decoding import HEAD_BYTES, INLINE_BYTES, STEP_BYTES, BodyDecoder, check_ids
from embedsvc.http.schemas import EmbeddingsRequest, LargeEmbeddingsRequest

LIMITS = ServerConfig(max_inputs=10, max_request_tokens=1000)
DECODER = BodyDecoder(EmbeddingsRequest, LargeEmbeddingsRequest)
SMALL, LARGE = 0, 3 * STEP_BYTES
sizes = pytest.mark.parametrize("size", [SMALL, LARGE])


def decoded(body: bytes) -> EmbeddingsRequest:
    """Decode a body."""
    return asyncio.run(DECODER.decode(body, LIMITS))


def padded(body: bytes, size: int) -> bytes:
    """Put white space behind a body."""
    return body + b" " * size


# --- halves of surrogate pairs -------------------------------------------------------------------

PIECES = [
    "\ud83d",
    "\udc4d",
    "\ud83d\udc4d",
    "\\",
    "\\ud83d",
    "u",
    '"',
    "\n",
    "a",
    " ",
    ",",
    "é",
    "漢",
]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=12), st.sampled_from([SMALL, LARGE]))
def test_what_a_client_escapes_is_read_with_halves_replaced(pieces: list[str], size: int) -> None:
    """Law: any text, escaped and of any length, is what UTF-16 with replacement makes of it."""
    text = "".join(pieces)
    text *= 1 + size // (8 * len(text) or 1)
    given = json.dumps({"input": [text, "whole"]}).replace("\\u6f22", "漢").encode()

    mended = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    assert decoded(given).input == [mended, "whole"]


@sizes
@pytest.mark.parametrize(
    "body",
    [
        b'{"input":"\\ud83d \xff"}',
        b'{"input":"\\ud83d \xff\xff"}',
        b'{"input":"\\ud83d"',
        b'{"input":"\\ud83d","z":' + b"[" * 10_000 + b"]" * 10_000 + b"}",
        b'{"input":"\\ud83"}',
        b'{"input":"\\ud83d"} {}',
        b'["\\ud83d"]',
        b'{"input":["\\ud83d"],"model":3}',
    ],
)
def test_other_mistakes_beside_halves_are_still_mistakes(body: bytes, size: int) -> None:
    """What is mended is read as strictly as what needs no mending."""
    with pytest.raises(InvalidRequest):
        decoded(padded(body, size))


@sizes
def test_a_byte_order_mark_before_halves_is_skipped(size: int) -> None:
    """Both leniences at once."""
    body = b'\xef\xbb\xbf{"input":"\\ud83d"}'

    assert decoded(padded(body, size)).input == "\ufffd"


# --- large bodies --------------------------------------------------------------------------------


@sizes
@pytest.mark.parametrize(
    "value", ["a", ["a", ""], [1, 2], [[1], [2, 3]], ["a", None, {"b": 1.5}, True], None]
)
def test_bodies_of_all_sizes_are_decoded_alike(value: Any, size: int) -> None:
    """What is wrong with elements is told later, by their index."""
    body = json.dumps({"input": value, "model": "m", "zzz": [1]}).encode()
    request = decoded(padded(body, size))

    assert isinstance(request, EmbeddingsRequest)
    assert (request.input, request.model) == (value, "m")


@sizes
@pytest.mark.parametrize("body", [b"{", b"[]", b'{"model":3}', b'{"input":"\xff"}', b"[" * 10_000])
def test_bad_bodies_of_all_sizes_are_refused(body: bytes, size: int) -> None:
    """With the error of the client's, never one of ours."""
    with pytest.raises(InvalidRequest):
        decoded(padded(body, size))


async def test_large_bodies_are_not_decoded_on_the_event_loop() -> None:
    """Small ones are, because a thread costs more than they do."""
    body = b'{"input":"a"}'
    small = asyncio.create_task(DECODER.decode(body, LIMITS))
    large = asyncio.create_task(DECODER.decode(padded(body, INLINE_BYTES), LIMITS))
    await asyncio.sleep(0)

    assert small.done()
    assert not large.done()
    assert (await small).input == (await large).input == "a"


def test_a_large_body_of_too_many_texts_is_not_read_to_its_end() -> None:
    """What follows the limit may be anything."""
    body = b'{"input":[' + b'"a",' * (LIMITS.max_inputs + 1) + b"nonsense" * INLINE_BYTES
    with pytest.raises(TooManyInputs, match="more than 10 items"):
        decoded(body)


def test_a_large_body_of_too_many_ids_is_not_read_to_its_end() -> None:
    """Even where they are not seen at once."""
    hidden = b'{"zzz":"' + b"z" * HEAD_BYTES + b'","input":['
    body = hidden + b"1," * (LIMITS.max_request_tokens + 1) + b"nonsense" * INLINE_BYTES
    with pytest.raises(TooManyTokens, match="more than 1000 token ids"):
        decoded(body)


def test_as_many_ids_as_allowed_may_be_more_than_texts() -> None:
    """A flat list of ids is one input."""
    ids = [1] * LIMITS.max_request_tokens

    assert decoded(padded(json.dumps({"input": ids}).encode(), LARGE)).input == ids


@pytest.mark.parametrize(
    "body",
    [b'{"input":[1,2,3]}', b'{"model":"m", "input" : [ [1,2], [3,4,5]]}', b'{"input":[[[-1,2,3'],
)
def test_too_many_ids_are_refused_before_they_are_read(body: bytes) -> None:
    """Flat, nested or broken."""
    with pytest.raises(TooManyTokens, match="more than 2 token ids"):
        check_ids(body, 2)


@pytest.mark.parametrize(
    "body",
    [
        b'{"input":[1,2,3]}',
        b'{"input":"1,2,3,4,5"}',
        b'{"input":["1,2,3,4,5", "[1,2,3,4,5]"]}',
        b'{"input":"\\"input\\":[1,2,3,4,5]"}',
        b"1,2,3,4,5",
    ],
)
def test_texts_and_few_ids_are_left_to_the_decoder(body: bytes) -> None:
    """Commas in texts are no ids."""
    check_ids(body, 3)
