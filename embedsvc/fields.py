"""Struct types as data: the fields of a section with their type in words, default and description.

Made from the annotations by `msgspec.inspect`; error messages of the configuration and the tables
of docs/reference.md read it, so neither can drift from the code. Pure.
"""

from __future__ import annotations

import difflib
import re
from functools import cache
from typing import Any, NamedTuple

import msgspec
import msgspec.inspect as mi
from msgspec import Struct


class Field(NamedTuple):
    """One key of a section.

    Attributes:
        name: the key.
        kind: its type in words, e.g. `an integer of at least 1`.
        required: whether it has no default.
        default: the default; `None` where it is required or a section of its own.
        description: how to choose a value.
        section: struct type of the table or of the tables in the list, if it is one.
    """

    name: str
    kind: str
    required: bool
    default: Any
    description: str
    section: type[Struct] | None


@cache
def fields(section: type[Struct]) -> tuple[Field, ...]:
    """Return the fields of a struct type in the order of the source."""
    info = mi.type_info(section)
    assert isinstance(info, mi.StructType)
    return tuple(_field(field) for field in info.fields)


def _field(field: mi.Field) -> Field:
    kind, description = field.type, ""
    if isinstance(kind, mi.Metadata):
        description = (kind.extra_json_schema or {}).get("description", "")
        kind = kind.type
    section = _section(kind)
    return Field(field.name, in_words(kind), field.required, _default(field), description, section)


def _default(field: mi.Field) -> Any:
    if field.default_factory is not msgspec.NODEFAULT:
        return field.default_factory()
    if field.default is msgspec.NODEFAULT or isinstance(field.default, Struct):
        return None
    return field.default


def _section(kind: mi.Type) -> type[Struct] | None:
    if isinstance(kind, mi.ListType):
        return _section(kind.item_type)
    return kind.cls if isinstance(kind, mi.StructType) else None


def in_words(kind: mi.Type) -> str:
    """Return what a value of this type is, in words that fit after "must be"."""
    match kind:
        case mi.Metadata():
            return in_words(kind.type)
        case mi.IntType() | mi.FloatType():
            noun = "an integer" if isinstance(kind, mi.IntType) else "a number"
            return noun + _bounds(kind)
        case mi.StrType():
            return _string(kind)
        case mi.BoolType():
            return "true or false"
        case mi.LiteralType():
            return _one_of([f'"{value}"' for value in kind.values])
        case mi.UnionType():
            words = sorted((in_words(t) for t in kind.types), key=lambda word: word[0] == '"')
            return (", or " if "," in words[0] else " or ").join(words)
        case mi.ListType():
            return "a list, each " + in_words(kind.item_type)
        case mi.DictType():
            return "a table of strings"
        case mi.StructType():
            return "a table"
    raise TypeError(f"no words for {kind}")


def _bounds(kind: mi.IntType | mi.FloatType) -> str:
    if kind.ge is not None and kind.le is not None:
        return f" from {kind.ge:g} to {kind.le:g}"
    if kind.ge is not None:
        return f" of at least {kind.ge:g}"
    if kind.gt is None:
        return ""
    return f" over {kind.gt:g}" + ("" if kind.le is None else f" and at most {kind.le:g}")


def _string(kind: mi.StrType) -> str:
    if kind.pattern is not None and "0-9a-f" in kind.pattern:
        return "64 hexadecimal digits" + (" or empty" if "?" in kind.pattern else "")
    if kind.pattern is not None:
        return "a string without spaces, ? and #"
    return "a string, not empty" if kind.min_length else "a string"


def _one_of(values: list[str]) -> str:
    return values[0] if len(values) == 1 else "one of " + ", ".join(values)


# --- msgspec's complaints in the words of the fields --------------------------------------------


def explain(error: msgspec.ValidationError, raw: dict[str, Any], root: type[Struct]) -> str:
    """Return `path: what the value must be, what it is` for a failed conversion of `raw`."""
    what, _, where = str(error).partition(" - at `$")
    path = where.rstrip("`").removesuffix("[...]").lstrip(".")
    if key := re.search(r"(unknown|required) field `(.*)`", what):
        section = _field_at(root, path).section if path else root
        assert section is not None
        return f"{path}.{key[2]}: ".lstrip(".") + _bad_key(key[1], key[2], section)
    field = _field_at(root, path)
    if field.section is None:
        # The words describe the whole list, so a mistake in an item is shown in its list.
        path = re.sub(r"\[\d+\]$", "", path)
    return f"{path}: must be {field.kind}, got {_value_at(raw, path)!r:.80}"


def _bad_key(problem: str, key: str, section: type[Struct]) -> str:
    known = {field.name: field for field in fields(section)}
    if problem == "required":
        return f"is required. {known[key].description}"
    if near := difflib.get_close_matches(key, known, n=1):
        return f"unknown key, did you mean {near[0]}?"
    return f"unknown key, known are {', '.join(known)}"


def _field_at(root: type[Struct], path: str) -> Field:
    section = root
    for name in re.findall(r"[A-Za-z]\w*", path):
        field = next(f for f in fields(section) if f.name == name)
        section = field.section or section
    return field


def _value_at(raw: Any, path: str) -> Any:
    for name, index in re.findall(r"([A-Za-z]\w*)|\[(\d+)\]", path):
        raw = raw[name] if name else raw[int(index)]
    return raw
