"""Structs as TOML text, which msgspec only reads. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import Struct

from embedsvc.fields import fields

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def dumps(struct: Struct) -> str:
    """Return the struct as TOML: plain values first, then one table per section."""
    return "\n".join(_lines(struct, prefix="")).strip() + "\n"


def _lines(struct: Struct, prefix: str) -> Iterator[str]:
    sections = [field for field in fields(type(struct)) if field.section]
    for field in fields(type(struct)):
        if not field.section:
            yield f"{_key(field.name)} = {_value(getattr(struct, field.name))}"
    for field in sections:
        value, name = getattr(struct, field.name), prefix + field.name
        for item in value if isinstance(value, list) else [value]:
            yield ""
            yield f"[[{name}]]" if isinstance(value, list) else f"[{name}]"
            yield from _lines(item, f"{name}.")


def _key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else _string(key)


def _value(value: Any) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            return _string(value)
        case list():
            return "[" + ", ".join(map(_value, value)) + "]"
        case dict():
            pairs = ", ".join(f"{_key(k)} = {_value(v)}" for k, v in value.items())
            return f"{{ {pairs} }}" if pairs else "{}"
    return repr(value)


def _string(value: str) -> str:
    # JSON's escapes are legal in TOML; DEL is the one character that TOML wants escaped besides.
    return msgspec.json.encode(value).decode().replace("\x7f", "\\u007f")
