"""JSON of request bodies, as lenient as clients need it and no more.

Knows nothing of ASGI or of what the fields mean. Runs on the event loop.
"""

from __future__ import annotations

import json
import re
from typing import Any, TypeVar

import msgspec

from embedsvc.errors import InvalidRequest, TooManyTokens

T = TypeVar("T")

BOM = b"\xef\xbb\xbf"
# Lone surrogates are mended by a second, slower reading that holds the event loop: 0.02 s for this.
MAX_MENDED_BYTES = 1024 * 1024
_FIELD_OF_PATH = re.compile(r"at `\$\.(\w+)")
_IDS = re.compile(rb'"input"\s*:\s*\[[\s\[]*-?\d')


def decode(decoder: msgspec.json.Decoder[T], body: bytes | bytearray) -> T:
    """Decode a JSON body.

    A leading byte order mark is skipped. Escaped halves of surrogate pairs, which JavaScript
    clients send when they cut a text inside an emoji, become U+FFFD.

    Raises:
        InvalidRequest: not JSON, nested too deeply, not an object, or a field of the wrong type.
    """
    if body.startswith(BOM):
        body = body[len(BOM) :]
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _mistyped(error) from error
    except RecursionError as error:
        raise _unparseable("it is nested too deeply") from error
    except msgspec.DecodeError as error:
        if b"\\u" in body and len(body) <= MAX_MENDED_BYTES:
            return _decode_mended(decoder, body)
        raise _unparseable(str(error) if body else "it is empty") from error


def check_ids(body: bytes | bytearray, max_tokens: int) -> None:
    """Refuse more token ids than one request may have, before each becomes an object.

    For large bodies: 64 MiB of ids hold the event loop for 2 s as objects and for 0.04 s here;
    texts take 0.04 to 0.1 s to decode (measured, one core of a Xeon). An approximate look: what
    follows the ids counts too, and ids behind an unusual spelling of the key are not seen.

    Raises:
        TooManyTokens: `input` is of ids, and of too many.
    """
    at = body.find(b'"input"')
    if at >= 0 and _IDS.match(body, at) and body.count(b",", at) >= max_tokens:
        raise TooManyTokens(
            f"input has more than {max_tokens} token ids, the most that one request may have. "
            "Send fewer at once.",
            param="input",
        )


def _decode_mended(decoder: msgspec.json.Decoder[T], body: bytes | bytearray) -> T:
    """Decode with the standard library, which lets half surrogate pairs pass, and replace them."""
    try:
        mended: T = msgspec.convert(_mend(json.loads(body.decode())), decoder.type)
    except msgspec.ValidationError as error:
        raise _mistyped(error) from error
    except (ValueError, RecursionError) as error:
        raise _unparseable(str(error)) from error
    return mended


def _mend(value: Any) -> Any:
    """Replace lone halves of surrogate pairs by U+FFFD in every string."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, list):
        return [_mend(element) for element in value]
    if isinstance(value, dict):
        return {_mend(key): _mend(element) for key, element in value.items()}
    return value


def _unparseable(why: str) -> InvalidRequest:
    return InvalidRequest(f"We could not parse the JSON body of your request: {why}.")


def _mistyped(error: msgspec.ValidationError) -> InvalidRequest:
    field = _FIELD_OF_PATH.search(str(error))
    return InvalidRequest(
        f"The request body is invalid: {error}.", param=field.group(1) if field else None
    )
