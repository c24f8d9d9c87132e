"""What a scheduler thread is told through its inbox, the only way it is told anything."""

from __future__ import annotations

from dataclasses import dataclass

from embedsvc.engine.correction import Corrected
from embedsvc.engine.sequence import Request, Sequence


@dataclass(slots=True, frozen=True)
class OutOfMemory:
    """A batch that did not fit on the device."""

    rows: int
    length: int


@dataclass(slots=True, frozen=True)
class Edges:
    """Bucket edges to use from now on."""

    edges: tuple[int, ...]


@dataclass(slots=True, frozen=True)
class Arrivals:
    """Rows of new requests, request by request."""

    requests: list[list[Sequence]]


# A request by itself is one whose rows must leave; None is the order to stop.
Message = Arrivals | Request | OutOfMemory | Edges | Corrected | None
