"""The proposed configuration file: the user's settings, with what changes and why as comments.

Pure. Files name only what differs from the defaults, besides what is proposed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import Struct

from embedsvc.config import Config
from embedsvc.fields import fields
from embedsvc.tuning.search import Choice, Proposal, shown

# Comments by the table of the tree they stand in, as `id`, and the key they stand before.
Comments = dict[tuple[int, str], str]


def rewritten(config: Config, device: str, proposal: Proposal, heading: list[str]) -> str:
    """Return a TOML file with the proposed settings of the first model and its device.

    Args:
        config: effective configuration.
        device: name of the model's device.
        proposal: of the search.
        heading: comment lines at the top.
    """
    tree = _differing(config)
    comments: Comments = {}
    for choice in proposal.choices:
        if choice.present == choice.proposed:
            continue
        if choice.name == "division":
            _divide(tree, device, choice, comments)
        else:
            batching = tree["models"][0]["versions"][0].setdefault("batching", {})
            batching[choice.name] = choice.proposed
            comments[id(batching), choice.name] = _comment(choice)
    lines = [f"# {line}" for line in heading]
    return "\n".join([*lines, *_lines(tree, "", comments)]) + "\n"


def _comment(choice: Choice) -> str:
    return f"# was {shown(choice.present)}; {choice.reason}"


def _divide(tree: dict[str, Any], device: str, choice: Choice, comments: Comments) -> None:
    """Set slots and threads of a device, which may not be in the file yet."""
    devices = tree.setdefault("devices", [])
    entry = next((d for d in devices if d["name"] == device), None)
    if entry is None:
        entry = {"name": device}
        devices.append(entry)
    slots, threads = ("auto", "auto") if choice.proposed == "auto" else choice.proposed
    entry |= {"slots": slots, "threads_per_slot": threads}
    comments[id(entry), "slots"] = _comment(choice)


def _differing(section: Struct) -> dict[str, Any]:
    """Return a section without what is as by default; names and sources are always there."""
    tree: dict[str, Any] = {}
    for field in fields(type(section)):
        value = getattr(section, field.name)
        if field.section is None:
            if value != field.default or (field.name in ("name", "source") and value):
                tree[field.name] = value
        elif isinstance(value, list):
            tree |= {field.name: [_differing(one) for one in value]} if value else {}
        elif differing := _differing(value):
            tree[field.name] = differing
    return tree


def _lines(table: dict[str, Any], path: str, comments: Comments) -> Iterator[str]:
    """Yield the lines of a table: its own keys, then the tables in it."""
    inner = {k: v for k, v in table.items() if isinstance(v, dict) or _holds_tables(v)}
    for key, value in table.items():
        if key in inner:
            continue
        if comment := comments.get((id(table), key)):
            yield comment
        yield msgspec.toml.encode({key: value}).decode().rstrip()
    for key, value in inner.items():
        name = f"{path}.{key}".lstrip(".")
        for one in value if isinstance(value, list) else [value]:
            yield f"\n[[{name}]]" if isinstance(value, list) else f"\n[{name}]"
            yield from _lines(one, name, comments)


def _holds_tables(value: object) -> bool:
    return isinstance(value, list) and any(isinstance(one, dict) for one in value)
