"""The nouns that travel through the engine: Request, Sequence, Batch.

No behaviour but bookkeeping; who writes which field is stated beside it.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from enum import IntEnum
from math import inf

from embedsvc.errors import RequestError
from embedsvc.models.buffers import Ids, Vectors


class Priority(IntEnum):
    """Share classes of the queue; the value is the flow's weight in the fair queue."""

    BULK = 1
    INTERACTIVE = 8


@dataclass(slots=True, frozen=True)
class Key:
    """Whom a request counts for when keys share the device.

    Attributes:
        name: unique among keys.
        weight: share of this key beside the others'.
    """

    name: str
    weight: float


# Where there are no keys, all requests count for this one.
NO_KEY = Key("", 1.0)


@dataclass(slots=True, eq=False)
class Request:
    """One API call: all its rows, one result, one future.

    Attributes:
        vectors: `(n, dim) float32`; row i is written by the device thread that ran sequence i.
        deadline: monotonic seconds after which nobody waits for the answer.
        arrival: monotonic seconds.
        priority: share class; the weight of the request beside others of its key.
        key: whom it counts for.
        settled: resolved once on the event loop: None when the last row is there, else the first
            error.
        open_rows: rows not yet settled; written by the event loop.
        open_tokens: tokens of those rows; written by the event loop.
        open_s: predicted slot seconds of those rows, not corrected; written by the event loop.
        width_class: class of its mean length, whose correction applies; written by the event loop.
        abandoned: set once by the event loop; a stale read elsewhere costs one computed row.
        timer: fires at the deadline; event loop.
        first_start: when its first row went to the device; event loop.
        last_end: when its last row came back; event loop.
        last_tag: fair-queueing tag of its last queued row; scheduler thread.
    """

    vectors: Vectors
    deadline: float
    arrival: float
    priority: Priority
    settled: asyncio.Future[RequestError | None]
    key: Key = NO_KEY
    open_rows: int = 0
    open_tokens: int = 0
    open_s: float = 0.0
    width_class: int = 0
    abandoned: bool = False
    timer: asyncio.TimerHandle | None = None
    first_start: float = inf
    last_end: float = inf
    last_tag: float = 0.0


@dataclass(slots=True, eq=False)
class Sequence:
    """One tokenized text.

    Attributes:
        request: the call it belongs to.
        row: its row in `request.vectors`.
        input_ids: `(length,) int64`, special tokens included, truncated, never empty.
        prompt_length: leading tokens that pooling leaves out.
    """

    request: Request
    row: int
    input_ids: Ids
    prompt_length: int = 0
    # Scheduler thread only: place in the queue, and what it takes of its key's share.
    tag: float = 0.0
    share_s: float = 0.0
    bucket: int = 0
    waiting: bool = False

    @property
    def length(self) -> int:
        """Tokens."""
        return len(self.input_ids)

    @property
    def weight(self) -> float:
        """Its weight beside rows of other keys."""
        return self.request.key.weight * self.request.priority


@dataclass(slots=True, eq=False)
class Batch:
    """Rows that go through the model together.

    Attributes:
        sequences: in row order.
        length: padded length in tokens, at least the longest row.
        predicted_s: cost predicted when it was chosen, in seconds; 0 where nobody did.
        deaths: of the model while all these rows were on the device.
    """

    sequences: list[Sequence]
    length: int
    predicted_s: float
    deaths: int = 0

    @property
    def alone(self) -> bool:
        """Whether its rows run one by one and nothing beside them: one of them may be guilty."""
        return self.deaths >= 2

    @property
    def rows(self) -> int:
        """Number of sequences."""
        return len(self.sequences)

    @property
    def real_tokens(self) -> int:
        """Tokens without padding."""
        return sum(s.length for s in self.sequences)

    @property
    def tokens_by_key(self) -> dict[Key, int]:
        """The same by whom they count for."""
        tokens: dict[Key, int] = {}
        for sequence in self.sequences:
            key = sequence.request.key
            tokens[key] = tokens.get(key, 0) + sequence.length
        return tokens
