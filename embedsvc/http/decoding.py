"""JSON of request bodies, as lenient as clients need it and no more.

Small bodies are decoded on the event loop. Large ones are decoded on a thread, in steps between
which the interpreter may turn to the event loop. Knows nothing of ASGI or of what the fields mean.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import msgspec

from embedsvc.config import ServerConfig
from embedsvc.errors import InvalidRequest, TooManyInputs, TooManyTokens

T = TypeVar("T")
Body = bytes | bytearray | memoryview
Hook = Callable[[type, Any], Any]

BOM = b"\xef\xbb\xbf"
# Decoded on the event loop: about a millisecond.
INLINE_BYTES = 256 * 1024
# Looked at without a break: about a millisecond.
STEP_BYTES = 1024 * 1024
# Where `input` begins at the latest, for an early look at it.
HEAD_BYTES = 64 * 1024
_FIELD_OF_PATH = re.compile(r"at `\$\.(\w+)")
_IDS = re.compile(rb'"input"\s*:\s*\[[\s\[]*-?\d')
# Stands for an escaped backslash; never in UTF-8.
_BACKSLASH = b"\xff\xff"
# The escape of a half of a surrogate pair without the other half.
_HALF = re.compile(
    rb"\\u[dD](?:[89abAB]\w\w(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB]\w\w\\u[dD])[c-fC-F]\w\w)"
)
# Where no escape and no pair of them is cut in two: before a byte that is in none, before one that
# does not end a pair, after one that does.
_BETWEEN = re.compile(rb'[^\\"/\w]|(?<!\\)\\(?!u[dD][c-fC-F])|(?<=[^\\]\\u[dD][c-fC-F]\w\w)')


class BodyDecoder(Generic[T]):
    """Decodes the bodies of one route.

    Args:
        kind: struct of a body.
        stepwise_kind: the same, for large bodies: its lists are `list[object]`, because msgspec
            calls Python for each `object` it meets and for no `Any`.
    """

    def __init__(self, kind: type[T], stepwise_kind: type[T]) -> None:
        self._decoder = msgspec.json.Decoder(kind)
        self._stepwise_kind = stepwise_kind

    async def decode(self, body: bytes | bytearray, limits: ServerConfig) -> T:
        """Decode a body.

        A leading byte order mark is skipped. Escaped halves of surrogate pairs, which JavaScript
        clients send when they cut a text inside an emoji, become U+FFFD.

        Raises:
            InvalidRequest: not JSON, nested too deeply, not an object, a field of the wrong type,
                or a large body with far more elements than a request may have.
        """
        if len(body) <= INLINE_BYTES:
            return _decode(lambda: self._decoder, body)
        return await asyncio.to_thread(self._decode_stepwise, body, limits)

    def _decode_stepwise(self, body: bytes | bytearray, limits: ServerConfig) -> T:
        check_ids(body, limits.max_request_tokens)
        return _decode(
            lambda: msgspec.json.Decoder(self._stepwise_kind, dec_hook=_counting(limits)), body
        )


def check_ids(body: bytes | bytearray, max_tokens: int) -> None:
    """Refuse more token ids than one request may have, before each becomes an object.

    64 MiB of ids take 2 s as objects (measured, one core of a Xeon). An approximate look: what
    follows the ids counts too, and ids behind an unusual spelling of the key are not seen.

    Raises:
        TooManyTokens: `input` is of ids, and of too many.
    """
    at = body.find(b'"input"', 0, HEAD_BYTES)
    if at < 0 or not _IDS.match(body, at):
        return
    n = 0
    for start in range(at, len(body), STEP_BYTES):
        n += body.count(b",", start, start + STEP_BYTES)
        if n >= max_tokens:
            raise _too_many_ids(max_tokens)


def _counting(limits: ServerConfig) -> Hook:
    """Return a hook that lets elements of lists pass until they are more than a request may have.

    Being Python, it is also where the interpreter can turn to the event loop.
    """
    n = 0

    def count(_: type, element: Any) -> Any:
        nonlocal n
        n += 1
        if n > limits.max_inputs:
            if type(element) is not int:
                raise TooManyInputs(
                    f"input has more than {limits.max_inputs} items, the most that are allowed.",
                    param="input",
                )
            if n > limits.max_request_tokens:
                raise _too_many_ids(limits.max_request_tokens)
        return element

    return count


def _decode(new_decoder: Callable[[], msgspec.json.Decoder[T]], body: bytes | bytearray) -> T:
    text: Body = memoryview(body)[len(BOM) :] if body.startswith(BOM) else body
    try:
        try:
            return new_decoder().decode(text)
        except msgspec.ValidationError:
            raise
        except msgspec.DecodeError:
            mended = _mended(body)
            if mended is None:
                raise
            return new_decoder().decode(mended)
    except msgspec.ValidationError as error:
        raise _mistyped(error) from error
    except RecursionError as error:
        raise _unparseable("it is nested too deeply") from error
    except msgspec.DecodeError as error:
        raise _unparseable(str(error) if body else "it is empty") from error


def _mended(body: bytes | bytearray) -> bytearray | None:
    """Replace escaped halves of surrogate pairs by U+FFFD; None where there are none.

    None also for what is not UTF-8, and for half a million backslashes in a row: they cannot be cut
    without counting them.
    """
    mended, n_halves, start = bytearray(), 0, 0
    while start < len(body):
        stop = start + STEP_BYTES
        cut = _BETWEEN.search(body, stop, stop + STEP_BYTES)
        if cut is None and stop + STEP_BYTES < len(body):
            return None
        stop = cut.start() if cut else len(body)
        part, n = bytes(body[start:stop]), 0
        if _BACKSLASH[:1] in part:
            return None
        if rb"\u" in part:
            part, n = _HALF.subn(rb"\\ufffd", part.replace(rb"\\", _BACKSLASH))
            part = part.replace(_BACKSLASH, rb"\\")
        mended += part
        n_halves, start = n_halves + n, stop
    return mended.removeprefix(BOM) if n_halves else None


def _too_many_ids(max_tokens: int) -> TooManyTokens:
    return TooManyTokens(
        f"input has more than {max_tokens} token ids, the most that one request may have. "
        "Send fewer at once.",
        param="input",
    )


def _unparseable(why: str) -> InvalidRequest:
    return InvalidRequest(f"We could not parse the JSON body of your request: {why}.")


def _mistyped(error: msgspec.ValidationError) -> InvalidRequest:
    field = _FIELD_OF_PATH.search(str(error))
    return InvalidRequest(
        f"The request body is invalid: {error}.", param=field.group(1) if field else None
    )
