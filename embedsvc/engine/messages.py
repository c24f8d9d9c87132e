"""What a scheduler thread is told through its inbox, the only way it is told anything."""

from __future__ import annotations

from dataclasses import dataclass

from embedsvc.engine.correction import Corrected
from embedsvc.engine.sequence import Batch, Request, Sequence


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


@dataclass(slots=True, frozen=True)
class Died:
    """The model is dead and must be loaded again; the reason as metrics name it."""

    reason: str


# A request by itself is one whose rows must leave, a batch by itself is to be tried again; None is
# the order to stop.
Message = Arrivals | Request | OutOfMemory | Edges | Corrected | Died | Batch | None
