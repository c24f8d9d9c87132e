"""The API key that a request carries, as OpenAI's and as Azure's clients send it. Pure."""

from __future__ import annotations

from embedsvc.http.body import Headers

_BEARER = b"bearer "


def presented_key(headers: Headers) -> bytes | None:
    """Return the key of `Authorization: Bearer KEY`, else of `api-key: KEY`; None without one."""
    authorization = headers.get(b"authorization", b"")
    if authorization[: len(_BEARER)].lower() == _BEARER:
        return authorization[len(_BEARER) :].strip()
    return headers.get(b"api-key")
