"""Replies as bytes: vectors, errors in OpenAI's envelope, and the headers of both.

Knows nothing of requests, services or sockets. Runs on the event loop.
"""

from __future__ import annotations

import itertools
import math
import re
import secrets
from binascii import b2a_base64
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from http import HTTPStatus
from typing import Literal

import numpy as np
import numpy.typing as npt
import orjson

from embedsvc.errors import RequestError
from embedsvc.tokenization import Token

Header = tuple[bytes, bytes]

# Values written between two turns of the event loop: 128 rows of 384, 1.5 ms.
SLICE_VALUES = 128 * 384
# Tokens made and written between two turns of the event loop: about a millisecond.
SLICE_TOKENS = 250
JSON_CONTENT = (b"content-type", b"application/json")
CLOSE = (b"connection", b"close")
REPLY_START = b'{"object":"list","data":['
# Every SDK honours a wait of 1 to 60 seconds; beyond that some do not retry and some sleep on.
RETRY_AFTER_S = (1, 60)
# Said to clients that come while the model loads.
NOT_READY_RETRY_S = 2.0
_SANE_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")


class RequestIds:
    """Ids of requests: the client's own where it is printable, else unique across processes."""

    def __init__(self) -> None:
        self._prefix = b"req_" + secrets.token_hex(6).encode()
        self._count = itertools.count(1)

    def header(self, inbound: bytes | None) -> Header:
        """Return the `x-request-id` header of a reply."""
        if inbound is not None and _SANE_REQUEST_ID.fullmatch(inbound):
            return (b"x-request-id", inbound)
        return (b"x-request-id", b"%s%08x" % (self._prefix, next(self._count)))


@dataclass(slots=True)
class WholeReply:
    """A response whose body is there."""

    status: int
    headers: list[Header]
    body: bytes


def error_reply(error: RequestError, *headers: Header) -> WholeReply:
    """Render an error as OpenAI's envelope, all four keys present."""
    body = orjson.dumps(
        {
            "error": {
                "message": error.message,
                "type": error.type,
                "param": error.param,
                "code": error.code,
            }
        }
    )
    all_headers = [JSON_CONTENT, (b"content-length", b"%d" % len(body)), *headers]
    if error.status == HTTPStatus.UNAUTHORIZED:
        # RFC 9110, 11.6.1.
        all_headers.append((b"www-authenticate", b"Bearer"))
    if error.retry_after_s is not None:
        low, high = RETRY_AFTER_S
        wait_ms = min(max(error.retry_after_s * 1000, 1), high * 1000)
        seconds = max(low, math.ceil(wait_ms / 1000))
        all_headers.append((b"retry-after", b"%d" % seconds))
        all_headers.append((b"retry-after-ms", b"%d" % wait_ms))
    if error.should_retry is not None:
        all_headers.append((b"x-should-retry", b"true" if error.should_retry else b"false"))
    return WholeReply(error.status, all_headers, body)


def head_of_reply(status: int, headers: list[Header]) -> bytes:
    """Write the head of an HTTP/1.1 response."""
    lines = [_status_line(status)]
    for name, value in headers:
        lines += (name, b": ", value, b"\r\n")
    lines.append(b"\r\n")
    return b"".join(lines)


def encoded_rows(
    vectors: npt.NDArray[np.float32], encoding_format: Literal["float", "base64"]
) -> Iterator[bytes]:
    """Write the elements of `data`, in slices of about `SLICE_VALUES` values.

    Args:
        vectors: `(n, dim) float32`, C-contiguous.
        encoding_format: `float` writes the shortest decimals that read back as the same float32;
            `base64` the little-endian bytes.
    """
    n_rows, dim = vectors.shape
    step = max(1, SLICE_VALUES // dim)
    write = _base64_row if encoding_format == "base64" else _float_row
    little_endian = vectors.astype("<f4", copy=False)
    for start in range(0, n_rows, step):
        rows = range(start, min(start + step, n_rows))
        written = b",".join([write(row, little_endian[row]) for row in rows])
        yield b"," + written if start else written


def reply_end(model: str, prompt_tokens: int) -> bytes:
    """Write what follows the elements of `data`."""
    return b'],"model":%s,"usage":{"prompt_tokens":%d,"total_tokens":%d}}' % (
        orjson.dumps(model),
        prompt_tokens,
        prompt_tokens,
    )


def tokens_reply(model: str, tokenized: Sequence[Sequence[Token]]) -> Iterator[bytes]:
    """Write the reply of the tokenize route, in slices of about `SLICE_TOKENS` tokens."""
    written, n = [b'{"model":%s,"data":[' % orjson.dumps(model)], 0
    for index, tokens in enumerate(tokenized):
        start = b'{"index":%d,"count":%d,"tokens":[' % (index, len(tokens))
        written.append(b"," + start if index else start)
        for k in range(0, len(tokens), SLICE_TOKENS):
            part = tokens[k : k + SLICE_TOKENS]
            written.append(b"," + orjson.dumps(part)[1:-1] if k else orjson.dumps(part)[1:-1])
            n += len(part)
            if n >= SLICE_TOKENS:
                yield b"".join(written)
                written, n = [], 0
        written.append(b"]}")
    yield b"".join([*written, b"]}"])


def _float_row(index: int, vector: npt.NDArray[np.float32]) -> bytes:
    values = orjson.dumps(vector, option=orjson.OPT_SERIALIZE_NUMPY)
    return b'{"object":"embedding","index":%d,"embedding":%s}' % (index, values)


def _base64_row(index: int, vector: npt.NDArray[np.float32]) -> bytes:
    text = b2a_base64(vector.data, newline=False)
    return b'{"object":"embedding","index":%d,"embedding":"%s"}' % (index, text)


@lru_cache(maxsize=600)
def _status_line(status: int) -> bytes:
    try:
        phrase = HTTPStatus(status).phrase
    except ValueError:
        phrase = ""
    return f"HTTP/1.1 {status} {phrase}\r\n".encode()
